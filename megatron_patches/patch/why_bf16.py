"""Why blocks of a layer stay BF16: start here. A reason is a sentence for the report, None means "none".

The reasons of one kind of block stand beside the classes that would replace it: ``attention.py``, ``mlp.py`` and
``experts.py``, which ask ``linear.py``, ``norm.py`` and ``hooks.py``; those of the loss are in ``loss.py``, those of
Megatron's settings in ``fields.py``. Here are what concerns a layer as a whole, and blocks that share modules.
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
from .blocks import NORMS, Block
from .config_check import why_bf16_config

__all__ = ["WHY_BF16", "why_bf16_layer", "why_bf16_sharing"]

WHY_BF16: dict[str, Callable[[Any, ActivationConfig], str | None]] = {
    "self_attention": why_bf16_attention,
    "mlp": why_bf16_mlp,
    "mlp.experts": why_bf16_experts,
    "mlp.shared_experts": why_bf16_shared_experts,
}
"""By the kind of block: the function of the layer and the settings that says why this block stays BF16, by itself."""


def why_bf16_layer(layer: nn.Module, settings: ActivationConfig) -> str | None:
    """What keeps all blocks of ``layer`` in BF16, whatever they are."""
    if type(layer) not in (TransformerLayer, PostNormTransformerLayer):
        wrapped = "fully_shard" if isinstance(layer, FSDPModule) else None
        wrapped = "torch.compile" if isinstance(layer, OptimizedModule) else wrapped
        return f"layer class {type(layer).__name__}" + (f" (patch before {wrapped})" if wrapped else "")
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
    """Why blocks that could be patched by themselves stay BF16 all the same, by name: they share modules.

    A module that is used in two places can be patched if both want the same of it. Norms of patched blocks all hand
    their input on. Everything else belongs to one norm: two layers can share an attention if they share its norm too. A
    place outside of ``blocks`` wants the module as it was.
    """
    places: dict[int, dict[tuple[int, str], str]] = defaultdict(dict)  # of a module: parent and attribute → name
    for name, parent in model.named_modules():
        for key, child in parent.named_children():
            places[id(child)][id(parent), key] = f"{name}.{key}".lstrip(".")
    left: dict[str, str] = {}
    while True:
        rest = [b for b in blocks if b.name not in left]
        users: dict[int, list[Block]] = defaultdict(list)
        known: dict[int, set[tuple[int, str]]] = defaultdict(set)
        for block in rest:
            for path, module in block.modules().items():
                parent, _, key = path.rpartition(".")
                users[id(module)].append(block)
                known[id(module)].add((id(block.layer.get_submodule(parent)), key))
        more = {}
        for block in rest:
            for path, module in block.modules().items():
                others = [name for place, name in places[id(module)].items() if place not in known[id(module)]]
                if path not in NORMS.values():
                    others += [b.name for b in users[id(module)] if _ids(b) != _ids(block)]
                if others:
                    more[block.name] = f"{path} shared with {others[0]}"
                    break
        if not more:
            return left
        left |= more


def _ids(block: Block) -> list[int]:
    return [id(m) for m in block.modules().values()]
