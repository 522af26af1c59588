"""Patch a built transformers model in place: its layers keep parameters and names, and run the FP8
flow.

Two tiers. A decoder layer that reads as Llama's is *fused*: norm, queries, keys and values,
rotation, output projection, MLP and residuals, with the bytes saved that a Megatron layer saves. In
other layers the model's own code runs, with its norms, projections and gated MLPs in the flow. What
is not recognized stays in BF16, with the reason in the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..config import ActivationConfig, CoatConfigError
from ..extras import need
from ..patching.changes import Changes, all_or_none, restored
from ..patching.report import PatchReport, is_patched
from ..patching.settings import (
    REFUSED,
    Config,
    Rows,
    bf16_layers,
    check_bf16_layers,
    check_honoured,
    coat_block,
)
from .layer import DecoderLayer, FusedAttention
from .loss import ChunkedLM, LossHead, why_plain
from .modules import (
    MLP,
    Block,
    FirstProjection,
    Gate,
    JoinedAttention,
    LaterProjection,
    OutProjection,
    Part,
    Projection,
    Stack,
    UnfusedNorm,
    activation_of,
    has_plain_weight,
    module_of,
    own_code,
    swapped,
    why_own_code,
)
from .recognize import (
    attention_kind,
    gate,
    is_causal_lm,
    is_decoder_layer,
    norm_kind,
    original_class,
    shares_input,
)

__all__ = ["is_transformers_model", "patch_model", "unpatch_model"]

QKV = "q_proj", "k_proj", "v_proj"
NORMS = "input_layernorm", "post_attention_layernorm"


def is_transformers_model(model: Any) -> bool:
    """Whether there is a model of transformers in ``model``, be it in PEFT's or torch's
    wrappers.
    """
    return isinstance(model, nn.Module) and any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for module in model.modules()
        for base in type(module).__mro__
    )


def patch_model(model: nn.Module, config: Config | ActivationConfig) -> PatchReport:
    """Let the layers of a built transformers model run the FP8 flow while it trains; all or nothing
    changes.

    Call it before DDP or ``fully_shard``; ``deepspeed.initialize`` does it by itself where the
    block asks for it. Evaluation and generation run the model's own forward.

    Args:
        model: a causal language model of transformers, also inside PEFT's wrappers.
        config: what ``deepspeed.initialize`` takes, with a ``"coat"`` block; or that block as
            ``CoatConfig``, or its ``"activation"`` as ``ActivationConfig``.

    Returns:
        What was patched, which is also ``model.coat_patch_report``.

    Raises:
        CoatConfigError: ``config`` has no block; an option that needs Megatron; nothing could be
            patched (lists why); ``bf16_layers`` out of range; a model that is patched already.
    """
    need("transformers", "hf", "coat_dist.patch_model")
    if not isinstance(config, ActivationConfig):
        config = coat_block(config).activation
    if is_patched(model):
        raise CoatConfigError(
            "model: got one that is patched already, accepted: one that is not (unpatch_model "
            "first)"
        )
    check_honoured(REFUSED["transformers"], config)
    report = PatchReport(config)
    _drop_own_forwards(model)
    with all_or_none() as changes:
        inside, stacks = set(), _stacks(model)
        for layers in stacks.values():
            check_bf16_layers(config, len(layers))
            kept = bf16_layers(config, len(layers))
            for i, (name, layer) in enumerate(layers):
                inside |= {id(m) for m in layer.modules()}
                _patch_layer(
                    name, layer, config, changes, report, "bf16_layers" if i in kept else None
                )
        if not report.patched:
            raise CoatConfigError(
                f"model: got a {type(model).__name__} with nothing to patch "
                f"({PatchReport.summary([report]) if stacks else 'no layers of transformers'}), "
                "accepted: models of "
                'docs/hugging-face.md, or "coat": {"activation": {"enabled": false}}, which keeps '
                "8-bit moments"
            )
        for module in model.modules():
            if id(module) not in inside:
                _patch_norm(module, config, changes)
        for parent in {stack.rpartition(".")[0] for stack in stacks}:
            module = model.get_submodule(parent)
            changes.swap(module, swapped(type(module), Stack), Part(config))
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
        raise CoatConfigError(
            "model: got one that is not patched, accepted: what patch_model has patched"
        )
    _drop_own_forwards(model)
    for module in model.modules():
        cls: Any = type(module)
        own = next((c for c in cls.__mro__ if "coat_original" in vars(c)), None)
        if own is not None:
            module.__class__ = restored(cls, own, own.coat_original)
        if isinstance(vars(module).get("coat"), Part):
            del module.coat
    del model.coat_patch_report


def _drop_own_forwards(model: nn.Module) -> None:
    """Drop copies of a class's forward, which would outlive the class.

    transformers before 5.2 leaves them on modules whose outputs it has recorded.
    """
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward


def _stacks(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """What transformers calls layers, with their names, by the name of the list that holds them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: dict[str, list[tuple[str, nn.Module]]] = {}
    outer = None
    for name, module in model.named_modules():
        known = (
            isinstance(module, GradientCheckpointingLayer)
            or {"self_attn", "mlp"} <= module._modules.keys()
        )
        if known and not (outer is not None and name.startswith(outer)):
            outer = f"{name}."
            found.setdefault(name.rpartition(".")[0], []).append((name, module))
    return found


def _blocks(layer: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Parts of a layer that hold weights of matrices, by name."""
    for name, module in layer.named_children():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from _blocks(module, f"{prefix}.{name}")
        elif any(getattr(p, "ds_shape", p.shape)[1:] for p in module.parameters()):
            yield f"{prefix}.{name}", module


def _patch_layer(
    name: str,
    layer: Any,
    settings: ActivationConfig,
    changes: Changes,
    report: PatchReport,
    whole: str | None,
) -> None:
    """Patch a layer, or with a reason in ``whole`` leave all of its blocks in BF16."""
    blocks = dict(_blocks(layer, name))
    why = {
        block_name: whole or _why_bf16(block_name, block) for block_name, block in blocks.items()
    }
    fused = (
        is_decoder_layer(layer)
        and all(why.get(f"{name}.{n}", "absent") is None for n in ("self_attn", "mlp"))
        and all(norm_kind(layer._modules.get(n)) in ("rms", "centered") for n in NORMS)
        and attention_kind(layer.self_attn) is not None
        and all(type(layer.self_attn._modules.get(n)) is nn.Linear for n in (*QKV, "o_proj"))
    )
    for block_name, block in blocks.items():
        reason = why[block_name]
        if reason is None and gate(block) is not None:
            _patch_mlp(block_name, block, settings, changes, report)
        elif reason is None and fused:
            part = Part(
                settings, block_name, report, attention_kind(block), _named(block, *QKV, "o_proj")
            )
            changes.swap(block, swapped(type(block), FusedAttention), part)
        elif reason is None:
            _patch_projections(block, settings, changes)
            report.unfused[block_name] = (
                f"own code around its projections: {_why_unfused(layer, block)}"
            )
        if reason is None and isinstance(block, Block):
            reason = why_own_code(block)
        if reason is None:
            report.patched.append(block_name)
        else:
            report.left[block_name] = reason
    patched = any(block_name in report.patched for block_name in blocks)
    others = _others(layer, "self_attn", "mlp", *NORMS) if fused else ()
    part = Part(settings, name, report if patched else None, fused or None, others=others)
    changes.swap(layer, swapped(type(layer), DecoderLayer), part)
    if fused and (reason := why_own_code(layer)) is not None:
        report.unfused[name] = reason
    uncalled = [layer._modules[n] for n in NORMS] if fused else []
    for module in layer.modules() if whole is None else ():
        _patch_norm(module, settings, changes, called=all(module is not norm for norm in uncalled))


def _why_unfused(layer: nn.Module, attention: nn.Module) -> str:
    for name in NORMS:
        if name in layer._modules and (why := own_code(layer._modules[name])) is not None:
            return f"{why} on {name}"
    for name, module in attention.named_children():
        if any(type(inner) is nn.Linear for inner in module.children()):
            return (
                f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__} in "
                f"place of {name}"
            )
    return "no layer that is known as a whole"


def _named(module: nn.Module, *names: str) -> tuple[tuple[str, nn.Module], ...]:
    return tuple((name, getattr(module, name)) for name in names)


def _others(module: nn.Module, *names: str) -> tuple[tuple[str, nn.Module, type], ...]:
    return tuple((name, found, original_class(found)) for name, found in _named(module, *names))


def _patch_norm(
    module: nn.Module, settings: ActivationConfig, changes: Changes, called: bool = True
) -> None:
    """Patch an RMSNorm that is called, or let a fused layer know one that it computes itself."""
    kind = norm_kind(module)
    if kind in ("rms", "centered"):
        if called:
            changes.swap(module, swapped(type(module), UnfusedNorm))
        changes.set(module, "coat", Part(settings, kind=kind))


def _patch_mlp(
    name: str, mlp: Any, settings: ActivationConfig, changes: Changes, report: PatchReport
) -> None:
    names, activation = gate(mlp), activation_of(mlp)
    assert names is not None and activation is not None
    others = _others(mlp, *(n for n in ("act_fn", "activation_fn") if n in mlp._modules))
    part = Part(
        settings, name, report, Gate(names, activation), _named(mlp, *names, "down_proj"), others
    )
    changes.swap(mlp, swapped(type(mlp), MLP), part)


def _patch_projections(attention: Any, settings: ActivationConfig, changes: Changes) -> None:
    linears: list[Any] = [getattr(attention, n, None) for n in QKV]
    part = Part(settings)
    if all(type(m) is nn.Linear for m in linears) and len({m.bias is None for m in linears}) == 1:
        changes.swap(attention, swapped(type(attention), JoinedAttention), part)
        for module in linears:
            kind = FirstProjection if module is linears[0] else LaterProjection
            changes.swap(
                module,
                swapped(nn.Linear, kind),
                Part(settings, linears=tuple(zip(QKV, linears, strict=True))),
            )
    for module_name, module in list(attention.named_modules()):
        if type(module) is nn.Linear and "lora_" not in module_name:
            mixin = OutProjection if module_name == "o_proj" else Projection
            changes.swap(module, swapped(nn.Linear, mixin), part)


def _patch_loss(
    model: nn.Module, settings: ActivationConfig, changes: Changes, report: PatchReport
) -> None:
    for name, module in model.named_modules():
        head = module._modules.get("lm_head")  # not by what PEFT passes on
        if not isinstance(head, nn.Module):
            continue
        label = f"{name}.lm_head".lstrip(".")
        if settings.loss == "plain":
            why: str | None = "loss: plain"
        elif not is_causal_lm(module):
            why = _unknown_forward(module)
        elif not has_plain_weight(head):
            why = f"a {type(head.weight).__name__} as weight of lm_head"
        else:
            why = why_plain(module)
        report.loss[label] = settings.loss if why is None else f"plain: {why}"
        if why is None:
            changes.swap(head, swapped(type(head), LossHead), Part(settings))
            part = Part(settings, label, report)
            changes.swap(module, swapped(type(module), ChunkedLM), part)


def _unknown_forward(model: nn.Module) -> str:
    """Why a model with an unknown forward keeps its own loss."""
    package = module_of(model.forward).partition(".")[0]
    return "a forward that is not known" if package == "transformers" else f"a forward of {package}"


def _why_bf16(name: str, block: nn.Module) -> str | None:
    """Why a block stays BF16; None where it is patched."""
    if shares_input(block):
        return _why_not_linears(block)
    if gate(block) is not None:
        return _why_not_mlp(block)
    if "forward" in vars(block):
        return "a forward of its own"
    last = name.rpartition(".")[2]
    if any(module_name.endswith("experts") for module_name, _ in block.named_modules()):
        return "experts that are not known"
    kind = "an attention" if "att" in last else "an MLP" if "mlp" in last else "a block"
    return f"{kind} that is not known"


def _not_in_this(model: nn.Module, report: PatchReport) -> Rows:
    """What this model cannot honour."""
    rows: dict[str, tuple[tuple, str]] = {}
    plain = [f"{name}: {how}" for name, how in report.loss.items() if how.startswith("plain")]
    if plain or not report.loss:
        rows["z_loss"] = (
            (0,),
            f"where the loss stays the model's own: {'; '.join(plain) or 'no lm_head'}",
        )
    fused: list[Any] = [m for m in model.modules() if isinstance(m, FusedAttention)]
    if all(m.config._attn_implementation == "eager" or m.attention_dropout for m in fused):
        rows["attention"] = (
            ("bf16",),
            "FP8 needs fused attention, without dropout and other than eager",
        )
    return rows


def _why_not_mlp(mlp: Any) -> str | None:
    if activation_of(mlp) is None:
        return "an activation that the flow does not have"
    linears = [getattr(mlp, n) for n in (*(gate(mlp) or ()), "down_proj")]
    if strange := [type(m) for m in linears if type(m) is not nn.Linear]:
        return (
            f"{strange[0].__module__.partition('.')[0]}'s {strange[0].__name__} in place of a "
            "linear"
        )
    return _why_not_linears(mlp)


def _why_not_linears(block: nn.Module) -> str | None:
    linears = {n: m for n, m in block.named_modules() if type(m) is nn.Linear and "lora_" not in n}
    if not linears:
        return "no linears that can be computed in FP8"
    for name, module in linears.items():
        shape = getattr(module.weight, "ds_shape", module.weight.shape)
        if not has_plain_weight(module):
            return f"a {type(module.weight).__name__} as weight of {name}"
        if "forward" in vars(module) and (why := own_code(module)) is not None:
            return f"{why} on {name}"
        if any(n % 16 for n in shape):
            return f"a weight {list(shape)}, whose sizes are not multiples of 16"
        if module.weight.dtype not in (torch.bfloat16, torch.float32):
            return f"weights in {module.weight.dtype}"
    return None
