"""Megatron models, their layers, and the blocks of a layer, each of which is patched as a whole or
not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn


def layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every layer of every transformer block. One layer may have several
    names.
    """
    for name, block in model.named_modules():
        if isinstance(block, TransformerBlock):
            for i, layer in enumerate(block.layers):
                yield f"{name}.layers.{i}".lstrip("."), layer


def has_experts(layer: Any) -> bool:
    """Whether the MLP of a ``TransformerLayer`` is a mixture of experts, of the class that is
    known here.
    """
    return type(getattr(layer, "mlp", None)) is MoELayer


def blocks_of(layer: Any) -> dict[str, Any]:
    """What can be patched in a ``TransformerLayer``, by the name in the layer."""
    blocks = {"self_attention": layer.self_attention}
    if not has_experts(layer):
        return blocks | {"mlp": layer.mlp}
    blocks["mlp.experts"] = layer.mlp.experts
    if layer.mlp.shared_experts is not None:
        blocks["mlp.shared_experts"] = layer.mlp.shared_experts
    return blocks


def language_models(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of every language model; ``model`` itself has the name ""."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, LanguageModule)
    ]


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of Megatron's models and transformer blocks in ``model``, none of them
    twice.
    """
    kinds = (LanguageModule, TransformerBlock)
    return list({id(m.config): m.config for m in model.modules() if isinstance(m, kinds)}.values())


def pipelined(model: nn.Module) -> bool:
    """Whether other ranks hold other layers of the model."""
    return any(
        getattr(config, "pipeline_model_parallel_size", 1) > 1 for config in configs_of(model)
    )
