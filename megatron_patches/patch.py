"""Patch a built Megatron model in place: its layers keep their parameters and names, and run the FP8 precision flow.

Patching sets ``__class__`` of built modules to a subclass with another ``forward`` and gives it one attribute,
``coat``. Undoing it sets the class back. Each layer has two blocks that are patched independently, attention
(input_layernorm, linear_qkv, linear_proj) and MLP (pre_mlp_layernorm, linear_fc1, activation, linear_fc2); of a mixture
of experts, the experts and the shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel

from .attention import PATCHED, PatchedSelfAttention, unfused_reason, unsplit_reason
from .compat import check_version
from .linear import FP8RowParallelLinear, InvariantColumnParallelLinear, NormColumnParallelLinear, Patch
from .loss import ChunkedLossGPTModel, ChunkedLossLinear, InvariantChunkedLossLinear, loss_reason
from .mlp import ExpertMLP, NormMLP, SharedExperts, activation_name
from .norm import EXACT, FOLDED
from .parallel import tensor_parallel
from .reasons import (
    attention_reason,
    experts_reason,
    fp8_attention_reason,
    has_experts,
    layer_reason,
    mlp_reason,
    output_reason,
    shared_experts_reason,
)
from .report import PatchReport
from .residual import AliasedAdd, add_reason

__all__ = ["PatchReport", "patch_model", "patched", "unpatch_model"]

_ORIGINAL: dict[type, type] = {
    NormColumnParallelLinear: ColumnParallelLinear,
    InvariantColumnParallelLinear: ColumnParallelLinear,
    ChunkedLossLinear: ColumnParallelLinear,
    InvariantChunkedLossLinear: ColumnParallelLinear,
    ChunkedLossGPTModel: GPTModel,
    FP8RowParallelLinear: RowParallelLinear,
    NormMLP: MLP,
    ExpertMLP: MLP,
    SharedExperts: SharedExpertMLP,
    **{swapped: original for table in (FOLDED, EXACT, PATCHED) for original, swapped in table.items()},
}
# Megatron's flag on a layer that recomputes a norm's output, by the norm.
_RECOMPUTE = {"input_layernorm": "recompute_input_layernorm", "pre_mlp_layernorm": "recompute_pre_mlp_layernorm"}
# The attribute that makes the addition of bias, dropout and residual, with the block before it and its patched class.
_ADDITIONS: dict[str, tuple[str, Any]] = {
    "self_attn_bda": ("self_attention", PatchedSelfAttention),
    "mlp_bda": ("mlp", NormMLP),
}


def patch_model(model: nn.Module, settings: ActivationConfig) -> PatchReport:
    """Let the transformer layers of ``model`` run the FP8 precision flow. Nothing changes unless this returns.

    Args:
        model: a built ``GPTModel``, or a module that holds Megatron transformer blocks; before
            ``deepspeed.initialize``.
        settings: the ``"coat": {"activation": ...}`` block.

    Raises:
        ValueError: the model is patched already, holds no transformer block, or nothing in it can be patched (lists
            why); ``bf16_layers`` out of range; ``tp_invariant`` with blocks that would not be; ``attention: "fp8"``
            with attention that cannot; ``z_loss`` with a loss that stays plain.
        ImportError: unsupported megatron-core.
    """
    check_version()
    if not settings.enabled:
        raise ValueError("activation.enabled: got false, accepted: true for a model that is to be patched")
    for name, module in model.named_modules():
        if getattr(type(module), "coat_patched", False):
            raise ValueError(f"model: patched already ({name or type(module).__name__}); call unpatch_model first")
    report = PatchReport()
    layers = list(_layers(model))
    if not layers:
        raise ValueError(f"model: got {type(model).__name__}, which holds no Megatron transformer layer")
    plan: list[tuple[Any, _Patcher]] = []
    for name, layer in layers:
        keep = None
        if layer.layer_number - 1 in _bf16_layers(settings, layer.config.num_layers):
            keep = "bf16_layers"
        whole = keep or layer_reason(layer, settings)
        for block, (why, patcher) in _blocks(layer).items():
            reason = whole or why(layer, settings)
            if reason is None:
                plan.append((layer, patcher))
                report.patched.append(f"{name}.{block}")
            else:
                report.left[f"{name}.{block}"] = reason
        if not whole and has_experts(layer):
            report.left[f"{name}.mlp.router"] = "routing is not quantized"
        if not whole and any(True for _ in layer.cross_attention.parameters()):
            report.left[f"{name}.cross_attention"] = "cross-attention"
    for name, module in model.named_modules():
        if isinstance(module, BaseTransformerLayer) and not any(module is layer for _, layer in layers):
            report.left[name] = "outside the decoder's layers (multi-token prediction)"
    if not report.patched:
        raise ValueError(f"model: nothing to patch\n{report}")
    language_models = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, LanguageModule) and getattr(m, "output_layer", None) is not None
    ]
    outputs = [(n, m.output_layer) for n, m in language_models if isinstance(m, GPTModel)]
    chunked = [m for n, m in language_models if _chunked(n, m, settings, report)]
    has_loss = any(isinstance(m, LanguageModule) for m in model.modules())  # perhaps in a later pipeline stage
    if settings.z_loss and (not has_loss or len(chunked) < len(language_models)):
        accepted = "0, or a model whose loss is chunked"
        raise ValueError(f"activation.z_loss: got {settings.z_loss}, accepted: {accepted}\n{report}")
    if settings.tp_invariant:
        report.left |= {f"{n}.output_layer".lstrip("."): r for n, m in outputs if (r := output_reason(m)) is not None}
        if report.left:
            raise ValueError(f"activation.tp_invariant: got true, accepted: false with BF16 blocks\n{report}")
        report.patched += [f"{n}.output_layer".lstrip(".") for n, _ in outputs]
    if settings.attention == "fp8":
        refused = [(layer, fp8_attention_reason(layer.self_attention)) for layer, p in plan if p is _patch_attention]
        for layer, reason in refused:
            if reason is not None:
                raise ValueError(
                    f'activation.attention: got "fp8", accepted: "bf16" with {reason} (layer {layer.layer_number})'
                )
    for layer, patcher in plan:
        patcher(layer, _with_wgrad(layer, settings, report), report)
    for name, layer in layers:
        attention = f"{name}.self_attention"
        if attention in report.patched and (reason := unfused_reason(layer.self_attention)) is not None:
            report.unfused[attention] = reason
        report.unfused |= {f"{name}.{add}": reason for add, reason in _alias_residuals(layer).items()}
    if settings.tp_invariant:
        for _, output_layer in outputs:
            _swap(output_layer, InvariantColumnParallelLinear, Patch(settings, tensor_parallel(output_layer)))
        for module in model.modules():  # what is left: the final norm, norms of queries and keys
            if type(module) in EXACT:
                module.__class__ = EXACT[type(module)]
    for module in chunked:
        output_layer, invariant = module.output_layer, settings.tp_invariant
        patch = Patch(settings, tensor_parallel(output_layer))
        _swap(output_layer, InvariantChunkedLossLinear if invariant else ChunkedLossLinear, patch)
        module.__class__ = ChunkedLossGPTModel
    return report


def unpatch_model(model: nn.Module) -> None:
    """Undo :func:`patch_model`: every class is what it was, and so are outputs, to the bit.

    Raises:
        ValueError: the model is not patched.
    """
    found = [m for m in model.modules() if type(m) in _ORIGINAL]
    if not found:
        raise ValueError("model: not patched")
    for _, layer in _layers(model):
        for norm_name, flag in _RECOMPUTE.items():
            if getattr(layer, norm_name).__dict__.pop("coat_recompute", False):
                setattr(layer, flag, True)
        if isinstance(getattr(layer, "mlp", None), NormMLP):
            layer.recompute_mlp = layer.mlp.coat.recompute
        for add in _ADDITIONS:
            if isinstance(getattr(layer, add, None), AliasedAdd):
                setattr(layer, add, AliasedAdd.original)
    for module in found:
        module.__dict__.pop("coat", None)
        module.__class__ = _ORIGINAL[type(module)]


@contextmanager
def patched(model: nn.Module, settings: ActivationConfig) -> Iterator[PatchReport]:
    """``model`` runs the flow inside the ``with``, and is as it was after it."""
    report = patch_model(model, settings)
    try:
        yield report
    finally:
        unpatch_model(model)


def _patch_attention(layer: Any, settings: ActivationConfig, report: PatchReport) -> None:
    attention = layer.self_attention
    norm = _fold_norm(layer, "input_layernorm", report)
    _swap(attention.linear_qkv, NormColumnParallelLinear, Patch(settings, tensor_parallel(attention.linear_qkv), norm))
    _swap(attention.linear_proj, FP8RowParallelLinear, Patch(settings, tensor_parallel(attention.linear_proj)))
    _swap(attention, PATCHED[type(attention)], Patch(settings, tensor_parallel(attention.linear_qkv)))


def _patch_mlp(layer: Any, settings: ActivationConfig, report: PatchReport) -> None:
    norm = _fold_norm(layer, "pre_mlp_layernorm", report)
    recompute, layer.recompute_mlp = layer.recompute_mlp, False
    tp = tensor_parallel(layer.mlp.linear_fc1)
    _swap(layer.mlp, NormMLP, Patch(settings, tp, norm, activation_name(layer.mlp.config), recompute=recompute))


def _alias_residuals(layer: Any) -> dict[str, str]:
    """Let the norms' backward of patched blocks add the residual's gradient; where it stays autograd's, why."""
    reasons = {}
    for add, (block, swapped) in _ADDITIONS.items():
        module = getattr(layer, block)
        if not isinstance(module, swapped):
            continue
        reason = add_reason(layer, add) or (unsplit_reason(module) if block == "self_attention" else None)
        if reason is None:
            setattr(layer, add, AliasedAdd())
            module.coat = replace(module.coat, residual=True)
        else:
            reasons[add] = reason
    return reasons


def _chunked(name: str, model: Any, settings: ActivationConfig, report: PatchReport) -> bool:
    """Whether a language model's loss is to be chunked; says so in the report."""
    reason = "activation.loss" if settings.loss == "plain" else loss_reason(model)
    report.loss[f"{name}.output_layer".lstrip(".")] = "chunked" if reason is None else f"plain ({reason})"
    if reason is None and model.config.cross_entropy_loss_fusion:
        report.notes.append("cross_entropy_loss_fusion has no effect: the loss is chunked")
    return reason is None


def _patch_experts(layer: Any, settings: ActivationConfig, report: PatchReport) -> None:
    for expert in layer.mlp.experts.local_experts:
        _swap(expert, ExpertMLP, Patch(settings, TensorParallel(), activation=activation_name(expert.config)))


def _patch_shared_experts(layer: Any, settings: ActivationConfig, report: PatchReport) -> None:
    shared = layer.mlp.shared_experts
    patch = Patch(settings, tensor_parallel(shared.linear_fc1), activation=activation_name(shared.config))
    _swap(shared, SharedExperts, patch)


_Reason = Callable[[Any, ActivationConfig], str | None]
_Patcher = Callable[[Any, ActivationConfig, PatchReport], None]


def _blocks(layer: Any) -> dict[str, tuple[_Reason, _Patcher]]:
    """What can be patched in a layer, by name: the function that says why not, and the one that does it."""
    blocks: dict[str, tuple[_Reason, _Patcher]] = {"self_attention": (attention_reason, _patch_attention)}
    if not has_experts(layer):
        return blocks | {"mlp": (mlp_reason, _patch_mlp)}
    blocks["mlp.experts"] = (experts_reason, _patch_experts)
    if layer.mlp.shared_experts is not None:
        blocks["mlp.shared_experts"] = (shared_experts_reason, _patch_shared_experts)
    return blocks


def _with_wgrad(layer: Any, settings: ActivationConfig, report: PatchReport) -> ActivationConfig:
    """``settings`` with weight gradients where the layer's configuration wants them."""
    if not getattr(layer.config, "gradient_accumulation_fusion", False) or settings.wgrad == "main_grad":
        return settings
    note = "weight gradients of patched blocks are added to main_grad, as config.gradient_accumulation_fusion asks"
    if note not in report.notes:
        report.notes.append(note)
    return settings.model_copy(update={"wgrad": "main_grad"})


def _fold_norm(layer: Any, name: str, report: PatchReport) -> nn.Module:
    norm = getattr(layer, name)
    norm.__class__ = FOLDED[type(norm)]
    flag = _RECOMPUTE[name]
    if getattr(layer, flag, False):
        # Megatron would free the norm's "output", which now is the layer's input. There is nothing to recompute either.
        setattr(layer, flag, False)
        norm.coat_recompute = True
        note = "recompute_modules 'layernorm' is off in patched blocks: they never keep a norm's output"
        if note not in report.notes:
            report.notes.append(note)
    return norm


def _swap(module: Any, swapped: type, patch: Patch) -> None:
    module.__class__ = swapped
    module.coat = patch


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every layer of every transformer block."""
    for name, block in model.named_modules():
        if isinstance(block, TransformerBlock):
            for i, layer in enumerate(block.layers):
                yield f"{name}.layers.{i}".lstrip("."), layer


def _bf16_layers(settings: ActivationConfig, layers: int) -> set[int]:
    wrong = [i for i in settings.bf16_layers if not -layers <= i < layers]
    if wrong:
        accepted = f"{-layers} to {layers - 1} for {layers} layers"
        raise ValueError(f"activation.bf16_layers: got {wrong[0]}, accepted: {accepted}")
    return {i % layers for i in settings.bf16_layers}
