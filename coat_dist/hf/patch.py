"""Patch a built transformers model in place: its layers keep parameters and names, and run the FP8 flow.

Two tiers. A decoder layer that reads as Llama's is *fused*: norm, queries, keys and values, rotation, output
projection, MLP and residuals, with the bytes saved that a Megatron layer saves. In other layers the model's own code
runs, with its norms, projections and gated MLPs in the flow. What is not recognized stays in BF16, with the reason in
the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..config import ActivationConfig, CoatConfigError
from ..patching.changes import Changes, all_or_none, restored
from ..patching.report import PatchReport, is_patched
from ..patching.settings import REFUSED, Config, Rows, bf16_layers, check_bf16_layers, check_honoured, coat_block
from .layer import FusedAttention, FusedLayer
from .loss import ChunkedLM, LossHead, why_plain
from .modules import (
    MLP,
    FirstProjection,
    JoinedAttention,
    LaterProjection,
    Layer,
    OutProjection,
    Part,
    Projection,
    UnfusedNorm,
    activation_of,
    swapped,
)
from .recognize import attention_kind, gate, is_causal_lm, is_decoder_layer, norm_kind, shares_input

__all__ = ["is_transformers_model", "patch_model", "unpatch_model"]

QKV = "q_proj", "k_proj", "v_proj"


def is_transformers_model(model: Any) -> bool:
    """Whether there is a model of transformers in ``model``, be it in PEFT's or torch's wrappers."""
    return isinstance(model, nn.Module) and any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for module in model.modules()
        for base in type(module).__mro__
    )


def patch_model(model: nn.Module, config: Config | ActivationConfig) -> PatchReport:
    """Let the layers of a built transformers model run the FP8 flow while it trains; all or nothing changes.

    Call it before DDP or ``fully_shard``; ``deepspeed.initialize`` does it by itself where the block asks for it.
    Evaluation and generation run the model's own forward.

    Args:
        model: a causal language model of transformers, also inside PEFT's wrappers.
        config: what ``deepspeed.initialize`` takes, with a ``"coat"`` block; or that block as ``CoatConfig``, or its
            ``"activation"`` as ``ActivationConfig``.

    Returns:
        What was patched, which is also ``model.coat_patch_report``.

    Raises:
        CoatConfigError: ``config`` has no block; an option that needs Megatron; nothing could be patched (lists why);
            ``bf16_layers`` out of range; a model that is patched already.
    """
    if not isinstance(config, ActivationConfig):
        config = coat_block(config).activation
    if is_patched(model):
        raise CoatConfigError("model: got one that is patched already, accepted: one that is not (unpatch_model first)")
    check_honoured(REFUSED["transformers"], config)
    report = PatchReport(config)
    _drop_own_forwards(model)
    with all_or_none() as changes:
        layers = list(_layers(model))
        check_bf16_layers(config, len(layers))
        kept = bf16_layers(config, len(layers))
        for i, (name, layer) in enumerate(layers):
            if i in kept:
                report.left |= {f"{name}.{block}": "bf16_layers" for block in ("self_attn", "mlp")}
                changes.swap(layer, swapped(type(layer), Layer))
            else:
                _patch_layer(name, layer, config, changes, report)
        if not report.patched:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(report.left.items())[:4])
            raise CoatConfigError(f"model: got one with nothing to patch ({reasons or 'no layers'})")
        inside = {id(m) for _, layer in layers for m in layer.modules()}
        for module in model.modules():
            if id(module) not in inside and norm_kind(module) in ("rms", "centered"):
                changes.swap(module, swapped(type(module), UnfusedNorm), Part(config))
        _patch_loss(model, config, changes, report)
        check_honoured(_not_in_this(model, report), config)
        changes.set(model, "coat_patch_report", report)
    return report


def unpatch_model(model: nn.Module) -> None:
    """Undo :func:`patch_model`: every class is what it was, and outputs to the bit.

    Raises:
        CoatConfigError: the model is not patched.
    """
    if "coat_patch_report" not in vars(model):
        raise CoatConfigError("model: got one that is not patched, accepted: what patch_model has patched")
    _drop_own_forwards(model)
    for module in model.modules():
        cls: Any = type(module)
        own = next((c for c in cls.__mro__ if "coat_original" in vars(c)), None)
        if own is not None:
            module.__class__ = restored(cls, own, own.coat_original)
            vars(module).pop("coat", None)
    del model.coat_patch_report


def _drop_own_forwards(model: nn.Module) -> None:
    """Drop copies of a class's forward, which would outlive the class.

    transformers before 5.2 leaves them on modules whose outputs it has recorded.
    """
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers of attention and MLP, by name."""
    for name, module in model.named_modules():
        parts = dict(module.named_children())
        if {"self_attn", "mlp"} <= parts.keys():
            yield name, module


def _patch_layer(name: str, layer: Any, settings: ActivationConfig, changes: Changes, report: PatchReport) -> None:
    attention, mlp, part = layer.self_attn, layer.mlp, Part(settings)
    kind = attention_kind(attention)
    why_attention = _why_not_linears(attention) if shares_input(attention) else "an attention that is not known"
    why_mlp = _why_not_mlp(mlp)
    norms = [getattr(layer, n, None) for n in ("input_layernorm", "post_attention_layernorm")]
    fused = (
        why_attention is None
        and why_mlp is None
        and is_decoder_layer(layer)
        and kind is not None
        and all(n is not None and norm_kind(n) in ("rms", "centered") and not _has_hooks(n) for n in norms)
        and not any(map(_has_hooks, attention.modules()))
    )
    for block, why in (("self_attn", why_attention), ("mlp", why_mlp)):
        if why is None:
            report.patched.append(f"{name}.{block}")
        else:
            report.left[f"{name}.{block}"] = why
    for module in layer.modules():
        if norm_kind(module) in ("rms", "centered") and not (fused and module in norms):
            changes.swap(module, swapped(type(module), UnfusedNorm), part)
    if why_mlp is None:
        changes.swap(mlp, swapped(type(mlp), MLP), part)
    if fused:
        changes.swap(attention, swapped(type(attention), FusedAttention), Part(settings, kind=kind))
        changes.swap(layer, swapped(type(layer), FusedLayer), part)
        return
    report.unfused[f"{name}.self_attn"] = "the model's own code runs around its projections"
    changes.swap(layer, swapped(type(layer), Layer), part)
    if why_attention is None:
        _patch_projections(attention, settings, changes)


def _patch_projections(attention: Any, settings: ActivationConfig, changes: Changes) -> None:
    linears: list[Any] = [getattr(attention, n, None) for n in QKV]
    if all(type(m) is nn.Linear for m in linears) and len({m.bias is None for m in linears}) == 1:
        changes.swap(attention, swapped(type(attention), JoinedAttention))
        for module in linears:
            kind = FirstProjection if module is linears[0] else LaterProjection
            changes.swap(module, swapped(nn.Linear, kind), Part(settings, tuple(linears)))
    for module_name, module in list(attention.named_modules()):
        if type(module) is nn.Linear and "lora_" not in module_name:
            mixin = OutProjection if module_name == "o_proj" else Projection
            changes.swap(module, swapped(nn.Linear, mixin), Part(settings))


def _patch_loss(model: nn.Module, settings: ActivationConfig, changes: Changes, report: PatchReport) -> None:
    for name, module in model.named_modules():
        head = module._modules.get("lm_head")  # not by what PEFT passes on
        if not isinstance(head, nn.Module):
            continue
        label = f"{name}.lm_head".lstrip(".")
        why = "loss: plain" if settings.loss == "plain" else None
        why = why or (None if is_causal_lm(module) else "a forward that is not known") or why_plain(module)
        why = why or ("hooks on lm_head" if _has_hooks(head) else None)
        report.loss[label] = settings.loss if why is None else f"plain: {why}"
        if why is None:
            changes.swap(head, swapped(type(head), LossHead), Part(settings))
            changes.swap(module, swapped(type(module), ChunkedLM), Part(settings))


def _not_in_this(model: nn.Module, report: PatchReport) -> Rows:
    """What this model cannot honour."""
    rows: dict[str, tuple[tuple, str]] = {}
    plain = [f"{name}: {how}" for name, how in report.loss.items() if how.startswith("plain")]
    if plain or not report.loss:
        rows["z_loss"] = (0,), f"where the loss stays the model's own: {'; '.join(plain) or 'no lm_head'}"
    fused: list[Any] = [m for m in model.modules() if isinstance(m, FusedAttention)]
    if all(m.config._attn_implementation == "eager" or m.attention_dropout for m in fused):
        rows["attention"] = ("bf16",), "FP8 needs fused attention, without dropout and other than eager"
    return rows


def _why_not_mlp(mlp: Any) -> str | None:
    names = gate(mlp)
    if names is None:
        return "an MLP that is not known"
    if activation_of(mlp) is None:
        return "an activation that the flow does not have"
    linears = [getattr(mlp, n) for n in (*names, "down_proj")]
    if strange := [type(m) for m in linears if type(m) is not nn.Linear]:
        return f"{strange[0].__module__.partition('.')[0]}'s {strange[0].__name__} in place of a linear"
    if any(map(_has_hooks, linears)):
        return "hooks on its linears"
    return _why_not_linears(mlp)


def _why_not_linears(block: nn.Module) -> str | None:
    linears = [m for n, m in block.named_modules() if type(m) is nn.Linear and "lora_" not in n]
    if not linears:
        return "no linears that can be computed in FP8"
    for module in linears:
        shape = getattr(module.weight, "ds_shape", module.weight.shape)
        if any(n % 16 for n in shape):
            return f"a weight {list(shape)}, whose sizes are not multiples of 16"
        if module.weight.dtype not in (torch.bfloat16, torch.float32):
            return f"weights in {module.weight.dtype}"
    return None


def _has_hooks(module: nn.Module) -> bool:
    """Whether a program watches calls of a module that would no longer happen."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
