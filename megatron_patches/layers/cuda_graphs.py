"""Patched layers as CUDA graphs (``activation.cuda_graphs``): for models whose layers the host
starts too slowly.

``flow/graphs/cuda_graphs.py`` captures and replays. This file decides which layers and calls run as
graphs: training on whole sequences with Megatron's causal mask. Every other call runs without a
graph, and warns if it needs gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from coat_dist.flow.graphs.graph_pool import run_without_graphs
from coat_dist.patching.classes import Patched
from coat_dist.patching.reasons import CALL

from .attached import Patch

_ARGUMENTS = ("hidden_states", "attention_mask", "context", "context_mask", "rotary_pos_emb")
"""Of a layer's forward, the first by position."""
_REQUIRED_VALUES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "num_moe_experts": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "recompute_granularity": None,
    "gradient_accumulation_fusion": False,
}
"""Fields of the model's configuration and the one value with which layers can be graphs. Experts
make the host wait for numbers of tokens, Megatron's dropout and recomputation exchange random
states; collectives in graphs are not tested.
"""


class Graphed(Patched):
    """A patched layer whose training runs as CUDA graphs."""

    coat: Patch

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """As Megatron's: hidden states ``[s, b, h]`` → the same shape, and the context."""
        plain = super().forward  # type: ignore[misc]
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        x, rope = given.pop("hidden_states", None), given.pop("rotary_pos_emb", None)
        if torch.compiler.is_compiling():
            _warn_compiled()
            return plain(*args, **kwargs)
        if (
            not torch.is_grad_enabled()
            or not isinstance(x, torch.Tensor)
            or len(args) > len(_ARGUMENTS)
        ):
            return plain(*args, **kwargs)
        modules = dict(self.named_modules(prefix="layer"))  # type: ignore[attr-defined]
        named = {
            f"{path}.{key}": p
            for path, m in modules.items()
            for key, p in m._parameters.items()
            if p is not None
        }
        own = tuple(named.values())
        why = _why_eager(x, own, modules, given)
        if why is not None:
            run_without_graphs(why)
            return plain(*args, **kwargs)

        def layer(x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
            if parameters is own:
                return plain(hidden_states=x, attention_mask=None, rotary_pos_emb=rope)[0]
            values = dict(zip(named, parameters, strict=True))
            # Tied parameters have a name and a value for each place: of what torch ties it restores
            # one place alone.
            return torch.func.functional_call(_Plain(self, rope), values, (x,), tie_weights=False)  # type: ignore[arg-type]

        return self.coat.kind(layer, x, own, rope), None


@torch.compiler.assume_constant_result
def _warn_compiled() -> None:
    """Run while torch.compile traces, and not part of what it compiles."""
    run_without_graphs("the model is compiled")


class _Plain(nn.Module):
    """A layer without its graphs, whose parameters can be replaced for a call."""

    def __init__(self, layer: nn.Module, rope: Any) -> None:
        super().__init__()
        self.layer = layer
        self.rope = rope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = super(Graphed, self.layer).forward  # type: ignore[misc, arg-type]
        return plain(hidden_states=x, attention_mask=None, rotary_pos_emb=self.rope)[0]


def _why_eager(
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    modules: Mapping[str, nn.Module],
    others: Mapping[str, Any],
) -> str | None:
    """Why a call does not run as graphs, or None. ``modules``: the layer, first, and those in
    it.
    """
    if not x.is_cuda:
        return f"the model is on {x.device.type}"
    for name, given in others.items():
        if given is not None:
            return f"a layer was called with {name}"
    if torch.cuda.get_allocator_backend() != "native":
        return (
            f"PYTORCH_ALLOC_CONF has backend {torch.cuda.get_allocator_backend()}, which has no "
            "memory pools"
        )
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    if _hooks_of_saved_tensors():
        return "hooks of saved tensors, as for checkpointing or offloading, are on"
    layer, *parts = modules.items()
    if isinstance(layer[1], FSDPModule) or any(
        hasattr(p, "ds_id") or isinstance(p, DTensor) for p in parameters
    ):
        return "parameters are divided between ranks (ZeRO-3, fully_shard)"
    for path, module in parts:
        if any(getattr(module, table) for table in CALL):
            return f"{path} has a hook, which a graph would not call"
    if torch.nn.modules.module._has_any_global_hook():
        return "there are hooks on all modules, which a graph would not call"
    return None


def _hooks_of_saved_tensors() -> bool:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("none"):
            return False
    except RuntimeError:
        return True


def why_no_graphs(config: Any) -> str | None:
    """The first field of a model's configuration with which its layers cannot be graphs, or
    None.
    """
    for name, accepted in _REQUIRED_VALUES.items():
        if (given := getattr(config, name, accepted)) != accepted:
            return f"config.{name}={given}"
    return None
