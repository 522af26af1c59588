"""Last step of :func:`~megatron_patches.patch_model`: change classes and attributes as planned, all
or none.

Layers may share a block, and one layer may stand in several places: what is patched already is
passed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.identity_op import IdentityOp
from torch import nn

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel
from coat_dist.flow.graphs.cuda_graphs import GraphedFunction
from coat_dist.patching.changes import Changes, all_or_none
from coat_dist.patching.report import PatchReport

from ..layers.activations import activation_name
from ..layers.attached import Patch
from ..layers.attention import (
    PATCHED,
    PatchedSelfAttention,
    why_megatron_splits_qkv,
    why_rope_unfused,
)
from ..layers.cuda_graphs import GRAPHED, layers_to_graph
from ..layers.dispatch import LOCAL, FP8AlltoAllDispatcher, may_send_fp8, may_stay_local
from ..layers.experts import ExpertMLP, SharedExperts
from ..layers.grouped import GROUPED, grouped_activation
from ..layers.linear import (
    FP8RowParallelLinear,
    InvariantColumnParallelLinear,
    NormColumnParallelLinear,
)
from ..layers.loss import ChunkedLossGPTModel, ChunkedLossLinear, InvariantChunkedLossLinear
from ..layers.mlp import NormMLP
from ..layers.norm import EXACT, FOLDED
from ..layers.post_norm import post_norms
from ..layers.residual import AliasedAdd, why_residual_unfused
from ..parallel.groups import tensor_parallel
from .blocks import NORMS, layers_of
from .plan import Plan

__all__ = ["apply_plan"]

# Megatron's flag on a layer that recomputes a norm's output, by the norm.
_RECOMPUTE = {
    "input_layernorm": "recompute_input_layernorm",
    "pre_mlp_layernorm": "recompute_pre_mlp_layernorm",
}
# The attribute that makes the addition of bias, dropout and residual, with the block before it and
# its patched class.
_ADDITIONS: dict[str, tuple[str, Any]] = {
    "self_attn_bda": ("self_attention", PatchedSelfAttention),
    "mlp_bda": ("mlp", NormMLP),
}


def apply_plan(plan: Plan, model: nn.Module, settings: ActivationConfig) -> None:
    """Patch what ``plan`` says, and add to its report what stays unfused. All or nothing."""
    report = plan.report
    with all_or_none() as changes:
        for block in plan.blocks:
            own = _with_wgrad(block.layer, settings, report)
            _PATCHERS[block.kind](block.layer, own, changes, report)
            if own.wgrad == "main_grad":
                _mark_zeroed()
        _patch_residuals(model, changes, report)
        if settings.tp_invariant:
            for name, output_layer in plan.invariant_outputs.items():
                patch = Patch(settings, tensor_parallel(output_layer))
                changes.swap(output_layer, InvariantColumnParallelLinear, patch)
                report.patched.append(name)
            # What is left: the final norm, norms of queries and keys.
            for module in model.modules():
                if type(module) in EXACT:
                    changes.swap(module, EXACT[type(module)])
        for module in plan.chunked:
            swapped = InvariantChunkedLossLinear if settings.tp_invariant else ChunkedLossLinear
            changes.swap(
                module.output_layer, swapped, Patch(settings, tensor_parallel(module.output_layer))
            )
            changes.swap(module, ChunkedLossGPTModel)
        if settings.cuda_graphs:
            _patch_layers(plan, settings, changes)
        # Or the chunks of a list.
        for whole in list(model) if type(model) is nn.ModuleList else [model]:
            changes.set(whole, "coat_patch_report", report)
            changes.set(whole, "coat_changes", changes)


def _patch_attention(
    layer: Any, settings: ActivationConfig, changes: Changes, report: PatchReport
) -> None:
    attention = layer.self_attention
    norm = _fold_norm(layer, "self_attention", changes, report)
    if type(attention) in PATCHED:
        tp = tensor_parallel(attention.linear_qkv)
        changes.swap(attention.linear_qkv, NormColumnParallelLinear, Patch(settings, tp, norm))
        row = Patch(settings, tensor_parallel(attention.linear_proj))
        changes.swap(attention.linear_proj, FP8RowParallelLinear, row)
        changes.swap(attention, PATCHED[type(attention)], Patch(settings, tp))


def _patch_mlp(
    layer: Any, settings: ActivationConfig, changes: Changes, report: PatchReport
) -> None:
    norm = _fold_norm(layer, "mlp", changes, report)
    if not isinstance(layer.mlp, NormMLP):
        tp = tensor_parallel(layer.mlp.linear_fc1)
        patch = Patch(settings, tp, norm, **_activation(layer.mlp), recompute=layer.recompute_mlp)
        changes.swap(layer.mlp, NormMLP, patch)
    changes.set(layer, "recompute_mlp", False)


def _patch_experts(
    layer: Any, settings: ActivationConfig, changes: Changes, report: PatchReport
) -> None:
    experts = layer.mlp.experts
    if type(experts) in GROUPED:
        config = experts.config
        names = {"activation": grouped_activation(config), "function": config.activation_func}
        changes.swap(experts, GROUPED[type(experts)], Patch(settings, TensorParallel(), **names))
    for expert in getattr(experts, "local_experts", ()):
        if not isinstance(expert, ExpertMLP):
            patch = Patch(settings, TensorParallel(), **_activation(expert))
            changes.swap(expert, ExpertMLP, patch)
    dispatcher = layer.mlp.token_dispatcher
    if may_send_fp8(dispatcher, settings):
        changes.set(dispatcher, "coat_settings", settings)
        changes.set(dispatcher, "__class__", FP8AlltoAllDispatcher)
        report.note("tokens travel to experts of other ranks in FP8")
    if may_stay_local(dispatcher):
        changes.set(dispatcher, "__class__", LOCAL[type(dispatcher)])


def _patch_shared_experts(
    layer: Any, settings: ActivationConfig, changes: Changes, report: PatchReport
) -> None:
    shared = layer.mlp.shared_experts
    if not isinstance(shared, SharedExperts):
        patch = Patch(settings, tensor_parallel(shared.linear_fc1), **_activation(shared))
        changes.swap(shared, SharedExperts, patch)


def _activation(mlp: Any) -> dict[str, Any]:
    return {"activation": activation_name(mlp.config), "function": mlp.config.activation_func}


_PATCHERS: dict[str, Callable[[Any, ActivationConfig, Changes, PatchReport], None]] = {
    "self_attention": _patch_attention,
    "mlp": _patch_mlp,
    "mlp.experts": _patch_experts,
    "mlp.shared_experts": _patch_shared_experts,
}


def _fold_norm(layer: Any, block: str, changes: Changes, report: PatchReport) -> nn.Module | None:
    """The norm that the block is to apply itself, or None where none comes before it."""
    norm = getattr(layer, NORMS[block])
    if isinstance(norm, IdentityOp):
        return None
    if type(norm) in FOLDED:
        changes.swap(norm, FOLDED[type(norm)])
    flag = _RECOMPUTE[NORMS[block]]
    if getattr(layer, flag, False):
        # Megatron would free the norm's "output", which now is the layer's input. There is nothing
        # to recompute either.
        changes.set(layer, flag, False)
        report.note(
            "recompute_modules 'layernorm' is off in patched blocks: they never keep a norm's "
            "output"
        )
    return norm


def _patch_layers(plan: Plan, settings: ActivationConfig, changes: Changes) -> None:
    """Let layers run as CUDA graphs whose blocks are all patched."""
    whole, parted = layers_to_graph(plan.blocks)
    for layer in whole.values():
        changes.swap(
            layer, GRAPHED[type(layer)], Patch(settings, TensorParallel(), graphs=GraphedFunction())
        )
    for name in parted:
        plan.report.note(f"{name} runs without CUDA graphs: a part of it stays BF16")
    plan.report.note(f"forward and backward of {len(whole)} layers run as CUDA graphs in training")


def _with_wgrad(layer: Any, settings: ActivationConfig, report: PatchReport) -> ActivationConfig:
    """``settings`` with weight gradients where the layer's configuration wants them."""
    if not layer.config.gradient_accumulation_fusion or settings.wgrad == "main_grad":
        return settings
    report.note(
        "weight gradients of patched blocks are added to main_grad, as "
        "config.gradient_accumulation_fusion asks"
    )
    return settings.model_copy(update={"wgrad": "main_grad"})


@functools.cache
def _mark_zeroed() -> None:
    """Have Megatron's DistributedDataParallel tell weights when their main_grad is zero
    (``flow/core/main_grad.py``).
    """
    original = DistributedDataParallel.zero_grad_buffer

    def zero_grad_buffer(self: Any) -> None:
        original(self)
        for parameter in self.params_with_grad:
            parameter.coat_zeroed = True

    DistributedDataParallel.zero_grad_buffer = zero_grad_buffer


def _patch_residuals(model: nn.Module, changes: Changes, report: PatchReport) -> None:
    done: dict[int, dict[str, str]] = {}
    for name, layer in layers_of(model):
        attention = f"{name}.self_attention"
        if (
            attention in report.patched
            and (reason := why_rope_unfused(layer.self_attention)) is not None
        ):
            report.unfused[attention] = reason
        report.unfused |= {
            f"{name}.{norm}": "a norm after its block, BF16" for norm in post_norms(layer)
        }
        if id(layer) not in done:
            done[id(layer)] = _alias_residuals(layer, changes)
        report.unfused |= {f"{name}.{add}": reason for add, reason in done[id(layer)].items()}


def _alias_residuals(layer: Any, changes: Changes) -> dict[str, str]:
    """Let the norms' backward of patched blocks add the residual's gradient; where it stays
    autograd's, why.
    """
    reasons = {}
    for add, (block, swapped) in _ADDITIONS.items():
        module = getattr(layer, block)
        if not isinstance(module, swapped):
            continue
        reason = why_residual_unfused(layer, add, NORMS[block]) or (
            why_megatron_splits_qkv(module) if block == "self_attention" else None
        )
        if reason is None:
            changes.set(layer, add, AliasedAdd())
            changes.set(module, "coat", replace(module.coat, residual=True))
        else:
            reasons[add] = reason
    return reasons
