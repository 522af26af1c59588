"""Gradients of parameters that every tensor-parallel (TP) rank holds, when DeepSpeed drives
training.

DeepSpeed reduces gradients over data-parallel ranks only. Megatron's own loop also sums, over TP
ranks, those of parameters for which each rank sees a part of the data only: norms under sequence
parallelism (SP), norms on queries and keys, biases added after a reduce-scatter. Left out, the
replicas drift apart without any error.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import tensor_parallel as megatron_tp
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from coat_dist.deepspeed.parallel.replicated_grads import SUMMED, is_head_norm, partial_over_tp

from ..layers.norm import Norm


def install_replicated_grad_hooks(model: nn.Module) -> list[str]:
    """Sum (or average, where Megatron does) gradients of TP-replicated parameters over TP ranks,
    inside backward.

    Call it once, on the built model, **before** ``deepspeed.initialize``: ZeRO reads gradients in
    hooks of its own, which must run after these. Our own
    :class:`~megatron_patches.layers.norm.Norm` sums inside its backward, before rounding; every
    other parameter gets a tensor hook that sums in fp32. Not for Megatron's own training loop,
    which does this itself.

    Returns:
        Names of the parameters concerned; empty without tensor parallelism.

    Raises:
        RuntimeError: installed already, too late (DeepSpeed holds the parameters), or Megatron
            drives this model.
        ValueError: parameters whose kind cannot be told, and multi-latent attention.
    """
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return []
    _check_installable(model)
    operations: dict[int, Literal["sum", "average"]] = {}
    for name, parameter in model.named_parameters():
        operation = partial_over_tp(name, parameter)
        if operation is not None and parameter.requires_grad:
            operations[id(parameter)] = operation
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, Norm) and any(
            id(p) in operations for p in module.parameters(recurse=False)
        ):
            module.reduce_grad_over_tp, module.partial_by_heads = True, is_head_norm(name)
            inside.update(id(p) for p in module.parameters(recurse=False))
    group = parallel_state.get_tensor_model_parallel_group()
    configs = _configs(model)
    names = []
    for name, parameter in model.named_parameters():
        if id(parameter) in operations:
            setattr(parameter, SUMMED, True)
            if id(parameter) not in inside:
                by_tokens = operations[id(parameter)] == "sum" and not is_head_norm(name)
                config = configs.get(id(parameter)) if by_tokens else None
                parameter.register_hook(_reducer(group, operations[id(parameter)], config))
            names.append(name)
    return names


def _check_installable(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise RuntimeError(
                "model: wrapped in Megatron's DistributedDataParallel, whose training loop reduces "
                "these gradients "
                "itself; hooks would count them twice"
            )
        if isinstance(module, MultiLatentAttention):
            raise ValueError(
                "multi_latent_attention: got true, accepted: false with tensor parallelism under "
                "DeepSpeed"
            )
    # Parameters have one from zero.Init on.
    zero3 = any(hasattr(module, "ds_id") for module in model.modules())
    for name, parameter in model.named_parameters():
        if hasattr(parameter, SUMMED):
            raise RuntimeError(f"replicated-gradient hooks are installed already (seen on {name})")
        if zero3 or hasattr(parameter, "_hp_mapping"):
            raise RuntimeError(
                f"DeepSpeed already holds {name}; install replicated-gradient hooks before "
                "initialize"
            )
    kinds = (
        megatron_tp.ColumnParallelLinear,
        megatron_tp.RowParallelLinear,
        megatron_tp.VocabParallelEmbedding,
    )
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None) if isinstance(module, kinds) else None
        if weight is not None and not getattr(weight, "tensor_model_parallel", False):
            raise ValueError(
                f"{name}.weight: got no mark tensor_model_parallel (as with "
                "perform_initialization=False), accepted: "
                "marked parameters; DeepSpeed's gradient norm would count it wrongly too"
            )


def _configs(model: nn.Module) -> dict[int, Any]:
    """By the id of a parameter: the configuration in which Megatron switches its sequence
    parallelism on and off.

    A vision tower and the GPT beside it have two. Modules inside a block may have copies, which are
    not switched.
    """
    found: dict[int, Any] = {}
    for kinds in ((MegatronModule,), (LanguageModule, TransformerBlock)):
        own: dict[int, Any] = {}
        for module in (m for m in model.modules() if isinstance(m, kinds)):
            for parameter in module.parameters():
                own.setdefault(id(parameter), module.config)
        found |= own
    return found


def _reducer(group: dist.ProcessGroup, operation: str, config: Any = None) -> Any:
    """A tensor hook that sums or averages a gradient over ``group``, in fp32.

    With ``config`` it does so only while ``config.sequence_parallel`` is true: without, each rank's
    gradient is whole.
    """

    def reduce(grad: torch.Tensor) -> torch.Tensor:
        if config is not None and not config.sequence_parallel:
            return grad
        total = grad.to(torch.float32, copy=True).contiguous()
        dist.all_reduce(total, group=group)
        if operation == "average":  # not an operation of gloo
            total /= group.size()
        return total.to(grad.dtype)

    return reduce


@torch.no_grad()
def check_replicas(model: nn.Module) -> dict[str, float]:
    """How far each TP-replicated parameter differs between TP ranks; collective over the TP group.

    Returns:
        name → max |difference| over the group, 0.0 where replicas agree. ZeRO-3's have to be
        gathered first.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    differences = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        bounds = torch.stack([parameter.double(), -parameter.double()])
        if group.size() > 1:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        differences[name] = float((bounds[0] + bounds[1]).max())
    return differences
