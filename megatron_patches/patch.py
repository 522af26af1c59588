"""Patch a built Megatron model in place: its layers keep their parameters and names, and run the FP8 precision flow.

Patching sets ``__class__`` of built modules to a subclass with another ``forward`` and gives it one attribute,
``coat``. Undoing it sets the class back. Each layer has two blocks that are patched independently, attention
(input_layernorm, linear_qkv, linear_proj) and MLP (pre_mlp_layernorm, linear_fc1, activation, linear_fc2); of a mixture
of experts, the experts and the shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel

from .activations import activation_name
from .attention import PATCHED, PatchedSelfAttention, unfused_reason, unsplit_reason
from .compat import check_version
from .groups import tensor_parallel
from .linear import FP8RowParallelLinear, InvariantColumnParallelLinear, NormColumnParallelLinear, Patch
from .loss import ChunkedLossGPTModel, ChunkedLossLinear, InvariantChunkedLossLinear
from .mlp import ExpertMLP, NormMLP, SharedExperts
from .norm import EXACT, FOLDED
from .plan import NORMS, layers_of, pipelined, plan_blocks, plan_outputs
from .reasons import fp8_attention_reason
from .report import PatchReport
from .residual import AliasedAdd, add_reason
from .swap import Changes, all_or_none, original_classes

__all__ = ["PatchReport", "patch_model", "patched", "unpatch_model"]

# Megatron's flag on a layer that recomputes a norm's output, by the norm.
_RECOMPUTE = {"input_layernorm": "recompute_input_layernorm", "pre_mlp_layernorm": "recompute_pre_mlp_layernorm"}
# The attribute that makes the addition of bias, dropout and residual, with the block before it and its patched class.
_ADDITIONS: dict[str, tuple[str, Any]] = {
    "self_attn_bda": ("self_attention", PatchedSelfAttention),
    "mlp_bda": ("mlp", NormMLP),
}


def patch_model(model: nn.Module | Sequence[nn.Module], settings: ActivationConfig) -> PatchReport:
    """Let the transformer layers of ``model`` run the FP8 precision flow. Nothing changes unless this returns.

    Under pipeline parallelism every rank calls this for its own stage. A stage in which nothing can be patched, because
    it has no layers or all of them are ``bf16_layers``, is no error: other stages go on. Settings of the whole model
    that rule out patching are one, on every rank.

    Args:
        model: a built ``GPTModel``, or a module that holds Megatron transformer blocks; before
            ``deepspeed.initialize``. Or the list of a rank's model chunks (interleaved pipeline stages); names in the
            report then begin with the chunk's index.
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
    model = _one_module(model)
    for name, module in model.named_modules():
        if getattr(type(module), "coat_patched", False):
            raise ValueError(f"model: patched already ({name or type(module).__name__}); call unpatch_model first")
    report = PatchReport()
    blocks = plan_blocks(model, settings, report)
    outputs, chunked = plan_outputs(model, settings, report)
    if settings.attention == "fp8":
        for block in blocks:
            reason = fp8_attention_reason(block.layer.self_attention) if block.kind == "self_attention" else None
            if reason is not None:
                where = f"layer {block.layer.layer_number}"
                raise ValueError(f'activation.attention: got "fp8", accepted: "bf16" with {reason} ({where})')
    with all_or_none() as changes:
        for block in blocks:
            _PATCHERS[block.kind](block.layer, _with_wgrad(block.layer, settings, report), report, changes)
        _patch_residuals(model, report, changes)
        if settings.tp_invariant:
            for _, output_layer in outputs:
                changes.swap(
                    output_layer, InvariantColumnParallelLinear, Patch(settings, tensor_parallel(output_layer))
                )
            for module in model.modules():  # what is left: the final norm, norms of queries and keys
                if type(module) in EXACT:
                    changes.swap(module, EXACT[type(module)])
        for module in chunked:
            swapped = InvariantChunkedLossLinear if settings.tp_invariant else ChunkedLossLinear
            changes.swap(module.output_layer, swapped, Patch(settings, tensor_parallel(module.output_layer)))
            changes.swap(module, ChunkedLossGPTModel)
    return report


def unpatch_model(model: nn.Module | Sequence[nn.Module]) -> None:
    """Undo :func:`patch_model`: every class is what it was, and so are outputs, to the bit.

    Modules may have been wrapped by ``fully_shard``, or parametrized, since. Nothing changes unless this returns.

    Raises:
        ValueError: the model is not patched (no error in a pipeline stage, where there may have been nothing to patch),
            or a class was derived from a patched one; names the module.
    """
    model = _one_module(model)
    found = original_classes(model)
    if not found and not pipelined(model):
        raise ValueError("model: not patched")
    with all_or_none() as changes:
        for layer in (m for m in model.modules() if isinstance(m, BaseTransformerLayer)):
            for norm, flag in _RECOMPUTE.items():
                if getattr(getattr(layer, norm, None), "coat_recompute", False):
                    changes.set(layer, flag, True)
            if isinstance(getattr(layer, "mlp", None), NormMLP):
                changes.set(layer, "recompute_mlp", layer.mlp.coat.recompute)
            for add in _ADDITIONS:
                if isinstance(getattr(layer, add, None), AliasedAdd):
                    changes.set(layer, add, AliasedAdd.original)
        for module, original in found:
            changes.remove(module, "coat")
            changes.remove(module, "coat_recompute")
            changes.set(module, "__class__", original)


@contextmanager
def patched(model: nn.Module | Sequence[nn.Module], settings: ActivationConfig) -> Iterator[PatchReport]:
    """``model`` runs the flow inside the ``with``, and is as it was after it."""
    report = patch_model(model, settings)
    try:
        yield report
    finally:
        unpatch_model(model)


def _one_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)


# Layers may share a block, or be one layer in several places: what is patched already is passed over.


def _patch_attention(layer: Any, settings: ActivationConfig, report: PatchReport, changes: Changes) -> None:
    attention = layer.self_attention
    norm = _fold_norm(layer, "self_attention", report, changes)
    if type(attention) in PATCHED:
        tp = tensor_parallel(attention.linear_qkv)
        changes.swap(attention.linear_qkv, NormColumnParallelLinear, Patch(settings, tp, norm))
        row = Patch(settings, tensor_parallel(attention.linear_proj))
        changes.swap(attention.linear_proj, FP8RowParallelLinear, row)
        changes.swap(attention, PATCHED[type(attention)], Patch(settings, tp))


def _patch_mlp(layer: Any, settings: ActivationConfig, report: PatchReport, changes: Changes) -> None:
    norm = _fold_norm(layer, "mlp", report, changes)
    if not isinstance(layer.mlp, NormMLP):
        tp = tensor_parallel(layer.mlp.linear_fc1)
        patch = Patch(settings, tp, norm, **_activation(layer.mlp), recompute=layer.recompute_mlp)
        changes.swap(layer.mlp, NormMLP, patch)
    changes.set(layer, "recompute_mlp", False)


def _patch_experts(layer: Any, settings: ActivationConfig, report: PatchReport, changes: Changes) -> None:
    for expert in layer.mlp.experts.local_experts:
        if not isinstance(expert, ExpertMLP):
            patch = Patch(settings, TensorParallel(), **_activation(expert))
            changes.swap(expert, ExpertMLP, patch)


def _patch_shared_experts(layer: Any, settings: ActivationConfig, report: PatchReport, changes: Changes) -> None:
    shared = layer.mlp.shared_experts
    if not isinstance(shared, SharedExperts):
        patch = Patch(settings, tensor_parallel(shared.linear_fc1), **_activation(shared))
        changes.swap(shared, SharedExperts, patch)


def _activation(mlp: Any) -> dict[str, Any]:
    return {"activation": activation_name(mlp.config), "function": mlp.config.activation_func}


_PATCHERS: dict[str, Callable[[Any, ActivationConfig, PatchReport, Changes], None]] = {
    "self_attention": _patch_attention,
    "mlp": _patch_mlp,
    "mlp.experts": _patch_experts,
    "mlp.shared_experts": _patch_shared_experts,
}


def _fold_norm(layer: Any, block: str, report: PatchReport, changes: Changes) -> nn.Module:
    norm = getattr(layer, NORMS[block])
    if type(norm) in FOLDED:
        changes.swap(norm, FOLDED[type(norm)])
    flag = _RECOMPUTE[NORMS[block]]
    if getattr(layer, flag, False):
        # Megatron would free the norm's "output", which now is the layer's input. There is nothing to recompute either.
        changes.set(layer, flag, False)
        changes.set(norm, "coat_recompute", True)
        note = "recompute_modules 'layernorm' is off in patched blocks: they never keep a norm's output"
        if note not in report.notes:
            report.notes.append(note)
    return norm


def _with_wgrad(layer: Any, settings: ActivationConfig, report: PatchReport) -> ActivationConfig:
    """``settings`` with weight gradients where the layer's configuration wants them."""
    if not layer.config.gradient_accumulation_fusion or settings.wgrad == "main_grad":
        return settings
    note = "weight gradients of patched blocks are added to main_grad, as config.gradient_accumulation_fusion asks"
    if note not in report.notes:
        report.notes.append(note)
    return settings.model_copy(update={"wgrad": "main_grad"})


def _patch_residuals(model: nn.Module, report: PatchReport, changes: Changes) -> None:
    done: dict[int, dict[str, str]] = {}
    for name, layer in layers_of(model):
        attention = f"{name}.self_attention"
        if attention in report.patched and (reason := unfused_reason(layer.self_attention)) is not None:
            report.unfused[attention] = reason
        if id(layer) not in done:
            done[id(layer)] = _alias_residuals(layer, changes)
        report.unfused |= {f"{name}.{add}": reason for add, reason in done[id(layer)].items()}


def _alias_residuals(layer: Any, changes: Changes) -> dict[str, str]:
    """Let the norms' backward of patched blocks add the residual's gradient; where it stays autograd's, why."""
    reasons = {}
    for add, (block, swapped) in _ADDITIONS.items():
        module = getattr(layer, block)
        if not isinstance(module, swapped):
            continue
        reason = add_reason(layer, add) or (unsplit_reason(module) if block == "self_attention" else None)
        if reason is None:
            changes.set(layer, add, AliasedAdd())
            changes.set(module, "coat", replace(module.coat, residual=True))
        else:
            reasons[add] = reason
    return reasons
