"""Modules that a patched block does not call, though it uses their parameters: fc1, fc2 and folded norms."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["check_whole", "wait_for_parameters"]


_CALLED = "a patched block uses its parameters without calling it); unpatch_model first"
_FORWARDS = ColumnParallelLinear.forward, RowParallelLinear.forward


def check_whole(name: str, module: nn.Module) -> None:
    """Refuse a module that computes more than its class in Megatron, or is sharded by itself.

    Raises:
        ValueError: ``fully_shard`` is around the module alone, and gathers its parameters only when it is called; or a
            program has set another ``forward`` since the model was patched.
    """
    if "forward" in vars(module):
        raise ValueError(f"{name}: got a forward that was set on the module, accepted: that of its class ({_CALLED}")
    if isinstance(module, ColumnParallelLinear | RowParallelLinear) and type(module).forward not in _FORWARDS:
        raise ValueError(f"{name}: got class {type(module).__name__}, accepted: the one that was patched ({_CALLED}")
    if isinstance(module.weight, DTensor):
        raise ValueError(
            f"{name}: got fully_shard on this module alone, accepted: fully_shard on the whole layer (a patched block "
            "uses these parameters outside of the module that holds them)"
        )


def wait_for_parameters(**modules: torch.nn.Module) -> None:
    """Call the forward pre-hooks of Megatron's ``DistributedDataParallel`` on linears that are not called themselves.

    With ``overlap_param_gather`` these hooks wait for the all-gather of a module's parameters and start the next one.

    Raises:
        ValueError: a module that computes the right thing only when it is called: sharded alone, or not Megatron's.
    """
    for name, module in modules.items():
        check_whole(name, module)
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            raise ValueError(
                f"{name}: got class {type(module).__name__}, accepted: the linear that was there when the model was "
                "patched (a patched MLP uses its weight without calling it); unpatch_model first"
            )
        for hook in tuple(module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) == DistributedDataParallel.__module__:
                hook(module)
