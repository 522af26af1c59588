"""First step of :func:`~megatron_patches.patch_model`: decide what to patch. Nothing is changed, little is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from coat_dist.config import ActivationConfig

from ..layers.experts import has_experts
from ..layers.linear import why_bf16_output_layer
from ..layers.loss import why_plain_loss
from .blocks import Block, blocks_of, configs_of, language_models, layers_of, pipelined
from .config_check import why_bf16_config
from .report import PatchReport
from .why_bf16 import WHY_BF16, why_bf16_layer, why_bf16_sharing

__all__ = ["Plan", "make_plan"]


@dataclass
class Plan:
    """What to patch in a model, and what not and why (``report``)."""

    report: PatchReport = field(default_factory=PatchReport)
    blocks: list[Block] = field(default_factory=list)
    """To be patched."""
    invariant_outputs: dict[str, Any] = field(default_factory=dict)
    """Output layers that ``tp_invariant`` replaces, by name."""
    chunked: list[Any] = field(default_factory=list)
    """Language models whose loss is to be chunked."""
    nothing: bool = False
    """Whether there is nothing to patch, which is no error in a pipeline stage while others may have something."""
    why_nothing: str | None = None
    """What keeps the layers of all pipeline stages from being patched, or None."""


def make_plan(model: nn.Module, settings: ActivationConfig) -> Plan:
    """What to patch; the report says what and what not.

    Raises:
        ValueError: ``bf16_layers`` out of range.
    """
    plan = Plan(PatchReport(settings=settings))
    _plan_blocks(model, settings, plan)
    if not plan.nothing:
        _plan_outputs(model, settings, plan)
    return plan


def _plan_blocks(model: nn.Module, settings: ActivationConfig, plan: Plan) -> None:
    left = plan.report.left
    _check_bf16_layers(settings, max((config.num_layers for config in configs_of(model)), default=0))
    for config in configs_of(model):
        all_bf16 = len(_bf16_layers(settings, config.num_layers)) == config.num_layers
        plan.why_nothing = plan.why_nothing or why_bf16_config(config) or ("bf16_layers" if all_bf16 else None)
    layers, blocks = list(layers_of(model)), []
    for name, layer in layers:
        asked = layer.layer_number - 1 in _bf16_layers(settings, layer.config.num_layers)
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
        known = any(module is layer or module is getattr(layer, "_orig_mod", None) for _, layer in layers)
        if isinstance(module, BaseTransformerLayer) and not known:
            left[name] = "outside the decoder's layers (multi-token prediction)"
    plan.nothing = not plan.blocks and (plan.why_nothing is not None or not pipelined(model))
    if not plan.blocks and not plan.nothing:
        plan.report.note("no block is patched in this pipeline stage")


def _plan_outputs(model: nn.Module, settings: ActivationConfig, plan: Plan) -> None:
    report = plan.report
    for name, module in language_models(model):
        output_layer, name = getattr(module, "output_layer", None), f"{name}.output_layer".lstrip(".")
        if output_layer is None:
            continue
        reason = "activation.loss" if settings.loss == "plain" else why_plain_loss(module)
        report.loss[name] = "chunked" if reason is None else f"plain ({reason})"
        if reason is None:
            plan.chunked.append(module)
            if module.config.cross_entropy_loss_fusion:
                report.note("cross_entropy_loss_fusion has no effect: the loss is chunked")
        if settings.tp_invariant and isinstance(module, GPTModel):
            if (reason := why_bf16_output_layer(output_layer)) is not None:
                report.left[name] = reason
            else:
                plan.invariant_outputs[name] = output_layer


def _bf16_layers(settings: ActivationConfig, layers: int) -> set[int]:
    """Indices, from 0 over all pipeline stages, of the layers that stay BF16; ``layers`` is how many there are."""
    return {i % layers for i in settings.bf16_layers if -layers <= i < layers}


def _check_bf16_layers(settings: ActivationConfig, layers: int) -> None:
    """Raises ValueError for an index that is out of range; ``layers``: of the highest stack in the model."""
    wrong = [i for i in settings.bf16_layers if not -layers <= i < layers]
    if wrong and layers:
        accepted = f"0 to {layers - 1}, or {-layers} to -1 from the last, for {layers} layers"
        raise ValueError(f"activation.bf16_layers: got {wrong[0]}, accepted: {accepted}")
