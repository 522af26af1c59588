"""The plan of :func:`~megatron_patches.patch_model`: what to patch, and what the settings rule out.

Nothing is changed here. Under pipeline parallelism every rank sees its own stage only. All stages
refuse a model by its class and configuration, which they share, so that no rank waits for one that
has raised.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from coat_dist.config import ActivationConfig
from coat_dist.flow.graphs.cuda_graphs import GraphedFunction
from coat_dist.patching.plan import Plan
from coat_dist.patching.report import check_unpatched
from coat_dist.patching.settings import REFUSED, bf16_layers, check_bf16_layers, check_honoured

from ..config.config_check import why_bf16_config
from ..groups import tensor_parallel
from ..layers.attached import Patch
from ..layers.cuda_graphs import Graphed, why_no_graphs
from ..layers.dispatch import may_send_fp8
from ..layers.linear import InvariantColumnParallelLinear
from ..layers.loss import ChunkedLossGPTModel, ChunkedLossLinear, InvariantChunkedLossLinear
from ..layers.norm import AllHeadsNorm, Exact, Norm
from ..layers.post_norm import post_norms
from ..layers.recompute import RecomputedBlock, keeps_boundaries
from .blocks import blocks_of, configs_of, has_experts, language_models, layers_of, pipelined
from .recognize import (
    RECOGNIZERS,
    refuse_shared,
    why_bf16_layer,
    why_bf16_output_layer,
    why_no_fp8_attention,
    why_plain_loss,
)


def check_model(model: nn.Module, settings: ActivationConfig) -> None:
    """Raises ValueError where there is nothing to plan: no transformer layer, patched already,
    or switched off.
    """
    if not settings.enabled:
        raise ValueError(
            "activation.enabled: got false, accepted: true for a model that is to be patched"
        )
    check_honoured(REFUSED["Megatron"], settings)
    check_unpatched(model)
    if not any(layers_of(model)) and not pipelined(model):
        models = model if isinstance(model, nn.ModuleList) else [model]
        kinds = ", ".join(type(m).__name__ for m in models)
        raise ValueError(f"model: got {kinds}, which holds no Megatron transformer layer")


def make_plan(model: nn.Module, settings: ActivationConfig) -> Plan:
    """What to patch; the report says what and what not.

    Raises:
        ValueError: ``bf16_layers`` out of range; a plan that is not what the settings ask for.
    """
    plan = Plan(settings)
    check_bf16_layers(settings, max((c.num_layers for c in configs_of(model)), default=0))
    layers = list(layers_of(model))
    for name, layer in layers:
        _plan_layer(plan, name, layer)
    refuse_shared(plan, model)
    plan.fill_report()
    if any(entry.settings != settings for entry in plan.patched):
        plan.report.note(
            "weight gradients of patched blocks are added to main_grad, as "
            "config.gradient_accumulation_fusion asks"
        )
    for name, layer in layers:
        for norm in post_norms(layer):
            plan.report.unfused[f"{name}.{norm}"] = "a norm after its block, BF16"
    for name, module in model.named_modules():
        known = any(
            module is layer or module is getattr(layer, "_orig_mod", None) for _, layer in layers
        )
        if isinstance(module, BaseTransformerLayer) and not known:
            plan.report.blocks[name] = "outside the decoder's layers (multi-token prediction)"
    _plan_outputs(plan, model)
    if not plan.patched and pipelined(model):
        plan.report.note("no block is patched in this pipeline stage")
    _check_something(plan, model)
    _check_whole_model(plan, model)
    _check_blocks(plan)
    if settings.cuda_graphs:
        _plan_graphs(plan, model)
    for module in model.modules() if settings.boundaries == "fp8" else ():
        if isinstance(module, TransformerBlock) and keeps_boundaries(module.config):
            plan.swap(module, RecomputedBlock, Patch(settings))
    return plan


def _plan_layer(plan: Plan, name: str, layer: Any) -> None:
    settings = plan.settings
    if layer.layer_number - 1 in bf16_layers(settings, layer.config.num_layers):
        whole: str | None = "bf16_layers"
    else:
        whole = why_bf16_layer(layer, settings)
    if layer.config.gradient_accumulation_fusion:
        settings = settings.model_copy(update={"wgrad": "main_grad"})
    for kind, block in blocks_of(layer).items():
        plan.add(f"{name}.{kind}", layer, block, RECOGNIZERS, whole, settings)
    if whole is None and has_experts(layer):
        plan.add(f"{name}.mlp.router", layer, layer.mlp.router, (), "routing is not quantized")
    if whole is None and any(True for _ in layer.cross_attention.parameters()):
        why = "cross-attention"
        plan.add(f"{name}.cross_attention", layer, layer.cross_attention, (), why)


def _plan_outputs(plan: Plan, model: nn.Module) -> None:
    """Output layers and losses, and with ``tp_invariant`` the norms that no block applies."""
    settings, report = plan.settings, plan.report
    for path, module in language_models(model):
        output_layer, name = getattr(module, "output_layer", None), f"{path}.output_layer"
        if output_layer is None:
            continue
        name = name.lstrip(".")
        mixin: Any = None
        if settings.tp_invariant and isinstance(module, GPTModel):
            report.blocks[name] = why_bf16_output_layer(output_layer)
            mixin = InvariantColumnParallelLinear
        reason = "activation.loss" if settings.loss == "plain" else why_plain_loss(module)
        report.loss[name] = settings.loss if reason is None else f"plain ({reason})"
        if reason is None:
            mixin = InvariantChunkedLossLinear if settings.tp_invariant else ChunkedLossLinear
            plan.swap(module, ChunkedLossGPTModel)
            if module.config.cross_entropy_loss_fusion:
                report.note("cross_entropy_loss_fusion has no effect: the loss is chunked")
        if mixin is not None:
            plan.swap(output_layer, mixin, Patch(settings, tensor_parallel(output_layer)))
    for module in model.modules() if settings.tp_invariant else ():
        if type(module) in (Norm, AllHeadsNorm):
            plan.swap(module, Exact)


def _check_something(plan: Plan, model: nn.Module) -> None:
    """Raises ValueError where nothing is patched: in all pipeline stages, or in the only one."""
    why = None
    for config in configs_of(model):
        all_bf16 = len(bf16_layers(plan.settings, config.num_layers)) == config.num_layers
        why = why or why_bf16_config(config) or ("bf16_layers" if all_bf16 else None)
    if not plan.patched and (why is not None or not pipelined(model)):
        shown = "" if why is None else f" ({why})"
        raise ValueError(f"model: nothing to patch{shown}\n{plan.report}")


def _check_whole_model(plan: Plan, model: nn.Module) -> None:
    """Raises ValueError where the model as a whole cannot honour a setting."""
    settings, report = plan.settings, plan.report
    if settings.z_loss and _loss_stays_plain(plan, model):
        accepted = "0, or a model whose loss is chunked"
        raise ValueError(
            f"activation.z_loss: got {settings.z_loss}, accepted: {accepted}\n{report}"
        )
    if settings.tp_invariant and (report.left or settings.bf16_layers):
        raise ValueError(
            f"activation.tp_invariant: got true, accepted: false with BF16 blocks\n{report}"
        )
    if settings.boundaries == "fp8" and not any(map(keeps_boundaries, configs_of(model))):
        raise ValueError(
            'activation.boundaries: got "fp8", accepted: "bf16", or recompute_granularity "full" '
            "without distribute_saved_activations and without experts"
        )
    for config in configs_of(model) if settings.cuda_graphs else ():
        if (reason := why_no_graphs(config)) is not None:
            raise ValueError(f"activation.cuda_graphs: got true, accepted: false with {reason}")


def _loss_stays_plain(plan: Plan, model: nn.Module) -> bool:
    """Whether some language model has a loss that is not chunked, here or in another pipeline
    stage.
    """
    models = [m for _, m in language_models(model)]
    if pipelined(model) and any(why_plain_loss(m) is not None for m in models):
        return True
    return not models or any(how.startswith("plain") for how in plan.report.loss.values())


def _check_blocks(plan: Plan) -> None:
    """Raises ValueError where a block that is patched cannot honour a setting."""
    settings = plan.settings
    asked = [
        k for k in ("expert_dispatch", "expert_dispatch_grad") if getattr(settings, k) == "fp8"
    ]
    for entry in plan.patched:
        layer, block = entry.layer, entry.module
        reason = None
        if settings.attention == "fp8" and block is layer.self_attention:
            reason = why_no_fp8_attention(block)
        if reason is not None:
            raise ValueError(
                f'activation.attention: got "fp8", accepted: "bf16" with {reason} ({entry.name})'
            )
        if not asked or block is not getattr(layer.mlp, "experts", None):
            continue
        dispatcher = layer.mlp.token_dispatcher
        if dispatcher.ep_size > 1 and not may_send_fp8(dispatcher, settings):
            raise ValueError(
                f'activation.{asked[0]}: got "fp8", accepted: the default with '
                f"{type(dispatcher).__name__}, or alltoall without padding to capacity "
                f"({entry.name})"
            )


def _plan_graphs(plan: Plan, model: nn.Module) -> None:
    """Let layers run as CUDA graphs whose blocks are all patched."""
    patched, whole = {id(entry.module) for entry in plan.patched}, set()
    for name, layer in layers_of(model):
        parts = [id(layer.self_attention) in patched, id(layer.mlp) in patched]
        if all(parts):
            whole.add(id(layer))
            plan.swap(layer, Graphed, Patch(plan.settings, kind=GraphedFunction()))
        elif any(parts):
            plan.report.note(f"{name} runs without CUDA graphs: a part of it stays BF16")
    if not whole:
        why = "accepted: false where no layer has attention and MLP patched"
        raise ValueError(f"activation.cuda_graphs: got true, {why}\n{plan.report}")
    plan.report.note(f"forward and backward of {len(whole)} layers run as CUDA graphs in training")


@functools.cache
def mark_zeroed() -> None:
    """Have Megatron's DistributedDataParallel tell weights when their main_grad is zero
    (``flow/main_grad.py``).
    """
    original = DistributedDataParallel.zero_grad_buffer

    def zero_grad_buffer(self: Any) -> None:
        original(self)
        for parameter in self.params_with_grad:
            parameter.coat_zeroed = True

    DistributedDataParallel.zero_grad_buffer = zero_grad_buffer
