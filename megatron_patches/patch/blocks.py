"""The parts of a model that are patched as a whole or not at all, and where to find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from ..layers.experts import has_experts

__all__ = ["NORMS", "Block", "blocks_of", "configs_of", "language_models", "layers_of", "pipelined"]

NORMS = {"self_attention": "input_layernorm", "mlp": "pre_mlp_layernorm"}
"""The norm that a block applies itself, by the block."""


@dataclass(frozen=True)
class Block:
    """A part of a layer that is patched as a whole or not at all."""

    layer_name: str
    layer: Any
    kind: str
    """One of "self_attention", "mlp", "mlp.experts", "mlp.shared_experts"; also its name in the
    layer.
    """

    @property
    def name(self) -> str:
        return f"{self.layer_name}.{self.kind}"

    def modules(self) -> dict[str, Any]:
        """The modules whose class a patch changes, by their name in the layer."""
        if self.kind == "mlp.experts":
            experts = getattr(self.layer.mlp.experts, "local_experts", None)
            paths = (
                [self.kind]
                if experts is None
                else [f"{self.kind}.local_experts.{i}" for i in range(len(experts))]
            )
        elif self.kind == "self_attention":
            paths = [
                NORMS[self.kind],
                self.kind,
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
            ]
        else:
            paths = [NORMS[self.kind], self.kind] if self.kind in NORMS else [self.kind]
        return {path: self.layer.get_submodule(path) for path in paths}


def layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every layer of every transformer block. One layer may have several
    names.
    """
    for name, block in model.named_modules():
        if isinstance(block, TransformerBlock):
            for i, layer in enumerate(block.layers):
                yield f"{name}.layers.{i}".lstrip("."), layer


def blocks_of(name: str, layer: Any) -> list[Block]:
    """What can be patched in a ``TransformerLayer``."""
    kinds = ["self_attention", "mlp"]
    if has_experts(layer):
        kinds = ["self_attention", "mlp.experts"] + ["mlp.shared_experts"] * (
            layer.mlp.shared_experts is not None
        )
    return [Block(name, layer, kind) for kind in kinds]


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
