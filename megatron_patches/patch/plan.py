"""First steps of :func:`~megatron_patches.patch_model`: decide what to patch, and refuse what the
settings rule out.

Nothing is changed here. Under pipeline parallelism every rank sees its own stage only. All stages
refuse a model by its class and configuration, which they share, so that no rank waits for one that
has raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from coat_dist.config import ActivationConfig
from coat_dist.patching.report import PatchReport
from coat_dist.patching.settings import REFUSED, bf16_layers, check_bf16_layers, check_honoured

from ..layers.attention import why_no_fp8_attention
from ..layers.cuda_graphs import layers_to_graph, why_no_graphs
from ..layers.dispatch import may_send_fp8
from ..layers.experts import has_experts
from ..layers.linear import why_bf16_output_layer
from ..layers.loss import why_plain_loss
from .blocks import Block, blocks_of, configs_of, language_models, layers_of, pipelined
from .config_check import why_bf16_config
from .why_bf16 import WHY_BF16, why_bf16_layer, why_bf16_sharing

__all__ = ["Plan", "check_model", "check_plan", "make_plan"]


@dataclass
class Plan:
    """What to patch in a model, and what not and why (``report``)."""

    report: PatchReport
    blocks: list[Block] = field(default_factory=list)
    """To be patched."""
    invariant_outputs: dict[str, Any] = field(default_factory=dict)
    """Output layers that ``tp_invariant`` replaces, by name."""
    chunked: list[Any] = field(default_factory=list)
    """Language models whose loss is to be chunked."""
    why_nothing: str | None = None
    """What keeps the layers of all pipeline stages from being patched, or None."""


def check_model(model: nn.Module, settings: ActivationConfig) -> None:
    """Raises ValueError where there is nothing to plan: no transformer layer, patched already,
    or switched off.
    """
    if not settings.enabled:
        raise ValueError(
            "activation.enabled: got false, accepted: true for a model that is to be patched"
        )
    check_honoured(REFUSED["Megatron"], settings)
    for name, module in model.named_modules():
        if getattr(type(module), "coat_patched", False):
            raise ValueError(
                f"model: patched already ({name or type(module).__name__}); call unpatch_model "
                "first"
            )
    if not any(layers_of(model)) and not pipelined(model):
        kinds = ", ".join(
            type(m).__name__ for m in (model if isinstance(model, nn.ModuleList) else [model])
        )
        raise ValueError(f"model: got {kinds}, which holds no Megatron transformer layer")


def make_plan(model: nn.Module, settings: ActivationConfig) -> Plan:
    """What to patch; the report says what and what not.

    Raises:
        ValueError: ``bf16_layers`` out of range.
    """
    plan, configs = Plan(PatchReport(settings=settings)), configs_of(model)
    check_bf16_layers(settings, max((config.num_layers for config in configs), default=0))
    for config in configs:
        all_bf16 = len(bf16_layers(settings, config.num_layers)) == config.num_layers
        plan.why_nothing = (
            plan.why_nothing or why_bf16_config(config) or ("bf16_layers" if all_bf16 else None)
        )
    _plan_blocks(model, settings, plan)
    _plan_outputs(model, settings, plan)
    if not plan.blocks and pipelined(model):
        plan.report.note("no block is patched in this pipeline stage")
    return plan


def _plan_blocks(model: nn.Module, settings: ActivationConfig, plan: Plan) -> None:
    left, blocks, layers = plan.report.left, [], list(layers_of(model))
    for name, layer in layers:
        asked = layer.layer_number - 1 in bf16_layers(settings, layer.config.num_layers)
        whole = "bf16_layers" if asked else why_bf16_layer(layer, settings)
        for block in blocks_of(name, layer):
            reason = whole or WHY_BF16[block.kind](layer, settings)
            if reason is None:
                blocks.append(block)
            else:
                left[block.name] = reason
        if not whole and has_experts(layer):
            left[f"{name}.mlp.router"] = "routing is not quantized"
        if not whole and any(True for _ in layer.cross_attention.parameters()):
            left[f"{name}.cross_attention"] = "cross-attention"
    left |= why_bf16_sharing(model, blocks)
    plan.blocks = [b for b in blocks if b.name not in left]
    plan.report.patched += [b.name for b in plan.blocks]
    for name, module in model.named_modules():
        known = any(
            module is layer or module is getattr(layer, "_orig_mod", None) for _, layer in layers
        )
        if isinstance(module, BaseTransformerLayer) and not known:
            left[name] = "outside the decoder's layers (multi-token prediction)"


def _plan_outputs(model: nn.Module, settings: ActivationConfig, plan: Plan) -> None:
    report = plan.report
    for name, module in language_models(model):
        output_layer, name = (
            getattr(module, "output_layer", None),
            f"{name}.output_layer".lstrip("."),
        )
        if output_layer is None:
            continue
        reason = "activation.loss" if settings.loss == "plain" else why_plain_loss(module)
        report.loss[name] = settings.loss if reason is None else f"plain ({reason})"
        if reason is None:
            plan.chunked.append(module)
            if module.config.cross_entropy_loss_fusion:
                report.note("cross_entropy_loss_fusion has no effect: the loss is chunked")
        if settings.tp_invariant and isinstance(module, GPTModel):
            if (reason := why_bf16_output_layer(output_layer)) is not None:
                report.left[name] = reason
            else:
                plan.invariant_outputs[name] = output_layer


def check_plan(plan: Plan, model: nn.Module, settings: ActivationConfig) -> None:
    """Raises ValueError, with the report, where the plan is not what the settings ask for."""
    if not plan.blocks and (plan.why_nothing is not None or not pipelined(model)):
        raise ValueError(
            "model: nothing to "
            f"patch{f' ({plan.why_nothing})' * bool(plan.why_nothing)}\n{plan.report}"
        )
    if settings.z_loss and _loss_stays_plain(plan, model):
        accepted = "0, or a model whose loss is chunked"
        raise ValueError(
            f"activation.z_loss: got {settings.z_loss}, accepted: {accepted}\n{plan.report}"
        )
    if settings.tp_invariant and (plan.report.left or settings.bf16_layers):
        raise ValueError(
            f"activation.tp_invariant: got true, accepted: false with BF16 blocks\n{plan.report}"
        )
    if settings.cuda_graphs:
        for config in configs_of(model):
            if (reason := why_no_graphs(config)) is not None:
                raise ValueError(f"activation.cuda_graphs: got true, accepted: false with {reason}")
        if not layers_to_graph(plan.blocks)[0]:
            why = "accepted: false where no layer has attention and MLP patched"
            raise ValueError(f"activation.cuda_graphs: got true, {why}\n{plan.report}")
    for block in plan.blocks if settings.attention == "fp8" else ():
        if block.kind == "self_attention" and (
            reason := why_no_fp8_attention(block.layer.self_attention)
        ):
            raise ValueError(
                f'activation.attention: got "fp8", accepted: "bf16" with {reason} ({block.name})'
            )
    asked = [
        key
        for key in ("expert_dispatch", "expert_dispatch_grad")
        if getattr(settings, key) == "fp8"
    ]
    for block in plan.blocks if asked else ():
        dispatcher = block.layer.mlp.token_dispatcher if block.kind == "mlp.experts" else None
        if (
            dispatcher is not None
            and dispatcher.ep_size > 1
            and not may_send_fp8(dispatcher, settings)
        ):
            accepted = (
                f"the default with {type(dispatcher).__name__}, or alltoall without padding "
                "to capacity"
            )
            raise ValueError(
                f'activation.{asked[0]}: got "fp8", accepted: {accepted} ({block.name})'
            )


def _loss_stays_plain(plan: Plan, model: nn.Module) -> bool:
    """Whether some language model has a loss that is not chunked, here or in another pipeline
    stage.
    """
    models = [m for _, m in language_models(model)]
    if pipelined(model) and any(why_plain_loss(m) is not None for m in models):
        return True
    return not models or len(plan.chunked) < sum(
        getattr(m, "output_layer", None) is not None for m in models
    )
