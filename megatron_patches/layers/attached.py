"""What patched modules have in common: the attribute ``coat``, and parameters of modules that
they do not call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.distributed.tensor import DTensor

from coat_dist import flow
from coat_dist.config import ActivationConfig

from .norm import Folded

Forward = TypeVar("Forward", bound=Callable[..., Any])


@dataclass(frozen=True)
class Patch:
    """What a patched module needs besides its own attributes; kept as its ``coat`` attribute.

    The norm is held here, out of ``nn.Module``'s sight, so that it stays registered under its own
    layer only.
    """

    settings: ActivationConfig
    tp: flow.TensorParallel = flow.TensorParallel()
    """As it was when the model was patched; a forward pass asks :meth:`tp_now`."""
    norm: nn.Module | None = None
    """Of a linear or MLP, the norm that it applies."""
    residual: bool = False
    """Whether the block's output carries its
    :class:`~megatron_patches.layers.residual.Residual`.
    """
    kind: Any = None
    """What the module computes, found when it is patched: of an attention ``AttentionKind``, of an
    MLP or experts ``Activation``, of a layer that runs as CUDA graphs its ``GraphedFunction``.
    """

    def tp_now(self, linear: Any) -> flow.TensorParallel:
        """``tp`` with the sequence parallelism that ``linear``, one of Megatron's, has at this
        moment.

        Megatron's ``set_model_to_sequence_parallel`` switches that flag on built models, and so
        does ``GPTModel`` around an output layer that is asked for the last token's logits only.
        """
        return self.tp.with_sequence_parallel(linear.sequence_parallel)


def eager_under_zero3(forward: Forward) -> Forward:
    """A ``forward`` that is not compiled where ZeRO-3 divides the module's parameters.

    ZeRO-3 fetches the parameters of a module before it is called, and those that another module
    uses when Python reads them. Compiled code reads past that, and would find empty tensors, or
    with ``fp8_weight_gather`` NaN.
    """
    eager = torch.compiler.disable(
        forward, reason="ZeRO-3 fetches parameters of a patched module as Python reads them"
    )

    @functools.wraps(forward)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and any(hasattr(p, "ds_id") for p in self.parameters()):
            return eager(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return either  # type: ignore[return-value]


_FORWARDS = ColumnParallelLinear.forward, RowParallelLinear.forward, Folded.forward


def check_uncalled(name: str, module: nn.Module) -> None:
    """Refuse a module that a block does not call, though it uses the parameters, and that is not
    what was patched.

    Raises:
        ValueError: another module is in its place, or a program has set its ``forward``;
            ``fully_shard`` is around it alone, and gathers its parameters only when it is called.
    """
    if "forward" in vars(module) or type(module).forward not in _FORWARDS:
        raise ValueError(
            f"{name}: got class {type(module).__name__} with another forward, accepted: what was "
            "there when the model "
            "was patched (a patched block uses its parameters without calling it); unpatch_model "
            "first"
        )
    if isinstance(module.weight, DTensor):
        raise ValueError(
            f"{name}: got fully_shard on this module alone, accepted: fully_shard on the whole "
            "layer"
        )


def wait_for_fc1(mlp: Any) -> Callable[[], None] | None:
    """Wait for the parameters of fc1, and return what waits for those of fc2, to be called before
    they are read.

    With ``overlap_param_gather`` forward pre-hooks of Megatron's ``DistributedDataParallel`` wait
    for the all-gather of a module's parameters and start the next one. A patched MLP does not call
    its linears, so this calls their hooks. fc1's start fc2's gather: to wait for both at once would
    let the GPU stand still meanwhile.

    Raises:
        ValueError: as :func:`check_uncalled`.
    """
    for name in ("linear_fc1", "linear_fc2"):
        check_uncalled(name, getattr(mlp, name))
    _call_gather_hooks(mlp.linear_fc1)
    if not torch.compiler.is_compiling():
        return functools.partial(_call_gather_hooks, mlp.linear_fc2)
    # Traced, nothing may happen in the middle of the flow's function.
    _call_gather_hooks(mlp.linear_fc2)
    return None


def _call_gather_hooks(module: nn.Module) -> None:
    for hook in tuple(module._forward_pre_hooks.values()):
        if getattr(hook, "__module__", None) == DistributedDataParallel.__module__:
            hook(module)
