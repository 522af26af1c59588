"""Why blocks of a layer stay BF16: what concerns a layer as a whole, and modules that stand in
several places.

A reason is a sentence for the report, None means "none". Those of one kind of block stand beside
the classes that would replace it, those of the loss in ``loss.py``, those of Megatron's settings in
``fields.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule

from coat_dist.config import ActivationConfig

from ..layers.attention import why_bf16_attention
from ..layers.experts import why_bf16_experts, why_bf16_shared_experts
from ..layers.mlp import why_bf16_mlp
from ..layers.post_norm import PostNormTransformerLayer
from .blocks import Block
from .config_check import why_bf16_config

__all__ = ["WHY_BF16", "why_bf16_layer", "why_bf16_sharing"]

WHY_BF16: dict[str, Callable[[Any, ActivationConfig], str | None]] = {
    "self_attention": why_bf16_attention,
    "mlp": why_bf16_mlp,
    "mlp.experts": why_bf16_experts,
    "mlp.shared_experts": why_bf16_shared_experts,
}
"""By the kind of block: the function of the layer and the settings that says why this block
stays BF16, by itself.
"""


def why_bf16_layer(layer: nn.Module, settings: ActivationConfig) -> str | None:
    """What keeps all blocks of ``layer`` in BF16, whatever they are."""
    if type(layer) not in (TransformerLayer, PostNormTransformerLayer):
        wrapped = "fully_shard" if isinstance(layer, FSDPModule) else None
        wrapped = "torch.compile" if isinstance(layer, OptimizedModule) else wrapped
        return f"layer class {type(layer).__name__}" + (
            f" (patch before {wrapped})" if wrapped else ""
        )
    if (reason := why_bf16_config(layer.config)) is not None:
        return reason
    for key in ("hidden_dropout", "attention_dropout"):  # random states of ranks differ
        if settings.tp_invariant and getattr(layer.config, key):
            return f"tp_invariant with config.{key}={getattr(layer.config, key)}"
    for parameter in layer.parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            return f"{str(parameter.dtype).removeprefix('torch.')} parameters"
    return None


def why_bf16_sharing(model: nn.Module, blocks: list[Block]) -> dict[str, str]:
    """Why blocks that could be patched by themselves stay BF16 all the same, by name: a module has
    several places.

    Each place may want another patch of it, or none. A layer that stands in several places is one
    block.
    """
    places: dict[int, list[str]] = defaultdict(list)
    for name, parent in model.named_modules():
        for key, child in parent.named_children():
            places[id(child)].append(f"{name}.{key}".lstrip("."))
    return {
        block.name: f"{path} shared by {' and '.join(places[id(module)])}"
        for block in blocks
        for path, module in block.modules().items()
        if len(places[id(module)]) > 1
    }
