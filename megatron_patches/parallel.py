"""Tensor parallelism when DeepSpeed, not Megatron, drives training.

DeepSpeed reduces gradients over data-parallel ranks only. Megatron's own training loop also sums, over tensor-parallel
(TP) ranks, the gradients of parameters that every TP rank holds but that each rank sees only a part of the data for:
norms under sequence parallelism (SP), query/key norms, biases added after a reduce-scatter. Left out, the replicas
drift apart without any error. :func:`install_replicated_grad_hooks` is that sum; :func:`check_replicas` shows whether
it was needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import tensor_parallel as megatron_tp
from megatron.core.transformer.module import MegatronModule
from torch import nn

from coat_dist.flow import TensorParallel

from .compat import check_version, prepare_cpu
from .norm import Norm

__all__ = [
    "MPUAdapter",
    "check_replicas",
    "initialize_model_parallel",
    "install_replicated_grad_hooks",
    "rng_state",
    "set_rng_state",
    "tensor_parallel",
]


def initialize_model_parallel(tp: int = 1, *, seed: int = 1234, **kwargs: Any) -> None:
    """Set up Megatron's process groups and random states over an initialized ``torch.distributed``, on GPU or CPU.

    Args:
        tp: tensor-parallel size.
        seed: of parameter initialization (the same on all ranks) and of dropout (tensor-parallel regions differ by
            rank).
        kwargs: further arguments of ``parallel_state.initialize_model_parallel``.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized, or the groups exist already.
        ValueError: ``tp`` does not divide the world size.
    """
    check_version()
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed: not initialized, accepted: call init_process_group (or "
            "deepspeed.init_distributed) first"
        )
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("model parallel groups exist already; call parallel_state.destroy_model_parallel() first")
    world = dist.get_world_size()
    if tp < 1 or world % tp:
        raise ValueError(f"tp: got {tp}, accepted: a divisor of the number of ranks, {world}")
    prepare_cpu()
    # Gloo twins of every group serve Megatron's own checkpoints only, and cost start-up time.
    kwargs.setdefault("create_gloo_process_groups", False)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **kwargs)
    torch.manual_seed(seed)
    megatron_tp.model_parallel_cuda_manual_seed(seed)


def tensor_parallel(module: nn.Module) -> TensorParallel:
    """The :class:`TensorParallel` that ``module`` (a Megatron layer, linear or norm) takes part in."""
    group = getattr(module, "tp_group", None)
    if group is None:
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        return TensorParallel()
    of_model = getattr(getattr(module, "config", None), "sequence_parallel", False)
    return TensorParallel(group, bool(getattr(module, "sequence_parallel", of_model)))


class MPUAdapter:
    """Megatron's groups under the names that ``deepspeed.initialize(mpu=...)`` asks for.

    ``megatron.core.parallel_state`` itself lacks some of them. DeepSpeed's own sequence parallelism is recognized by
    the mere presence of ``initialize_sequence_parallel`` or ``get_sequence_parallel_*``: they must never be added here.

    Raises:
        RuntimeError: Megatron's groups do not exist yet.
        ValueError: Megatron pipeline parallelism, which needs Megatron's own schedule.
    """

    def __init__(self) -> None:
        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError("mpu: Megatron's groups do not exist yet; call initialize_model_parallel first")
        pipeline = parallel_state.get_pipeline_model_parallel_world_size()
        if pipeline != 1:
            raise ValueError(f"pipeline_model_parallel_size: got {pipeline}, accepted: 1 under DeepSpeed")

    # With one pipeline stage, "model parallel" is tensor parallel.
    def get_model_parallel_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_src_rank()

    def get_pipeline_model_parallel_rank(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        return parallel_state.get_pipeline_model_parallel_world_size()

    def get_context_parallel_world_size(self) -> int:
        return parallel_state.get_context_parallel_world_size()

    def get_data_parallel_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(parallel_state.get_data_parallel_group())


def install_replicated_grad_hooks(model: nn.Module) -> list[str]:
    """Sum (or average, where Megatron does) gradients of TP-replicated parameters over TP ranks, inside backward.

    Call it once, on the built model, **before** ``deepspeed.initialize``: ZeRO reads gradients in hooks of its own,
    which must run after these. Our own :class:`~megatron_patches.norm.Norm` sums inside its backward, before rounding;
    every other parameter gets a tensor hook that sums in fp32. Not for Megatron's own training loop, which does this
    itself.

    Returns:
        Names of the parameters concerned; empty without tensor parallelism.

    Raises:
        RuntimeError: installed already, too late (DeepSpeed holds the parameters), or Megatron drives this model.
        ValueError: parameters whose kind cannot be told, and multi-latent attention.
    """
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return []
    _check_installable(model)
    operations: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        operation = _missing_reduction(name, parameter)
        if operation is not None and parameter.requires_grad:
            operations[id(parameter)] = operation
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, Norm) and any(id(p) in operations for p in module.parameters(recurse=False)):
            module.reduce_grad_over_tp, module.partial_by_heads = True, _of_heads(name)
            inside.update(id(p) for p in module.parameters(recurse=False))
    group = parallel_state.get_tensor_model_parallel_group()
    config = _config(model)
    names = []
    for name, parameter in model.named_parameters():
        if id(parameter) in operations:
            parameter.coat_replicated_grad = True  # type: ignore[attr-defined]
            if id(parameter) not in inside:
                by_tokens = operations[id(parameter)] == dist.ReduceOp.SUM and not _of_heads(name)
                parameter.register_hook(_reducer(group, operations[id(parameter)], config if by_tokens else None))
            names.append(name)
    return names


def _check_installable(model: nn.Module) -> None:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise RuntimeError(
                "model: wrapped in Megatron's DistributedDataParallel, whose training loop reduces these gradients "
                "itself; hooks would count them twice"
            )
        if isinstance(module, MultiLatentAttention):
            raise ValueError(
                "multi_latent_attention: got true, accepted: false with tensor parallelism under DeepSpeed"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "coat_replicated_grad"):
            raise RuntimeError(f"replicated-gradient hooks are installed already (seen on {name})")
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            raise RuntimeError(f"DeepSpeed already holds {name}; install replicated-gradient hooks before initialize")
    for name, parameter in _sharded_parameters(model):
        if not getattr(parameter, "tensor_model_parallel", False):
            raise ValueError(
                f"{name}: not marked tensor_model_parallel (as with perform_initialization=False), accepted: marked "
                "parameters; DeepSpeed's gradient norm would count it wrongly too"
            )


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    kinds = (megatron_tp.ColumnParallelLinear, megatron_tp.RowParallelLinear, megatron_tp.VocabParallelEmbedding)
    for name, module in model.named_modules():
        if isinstance(module, kinds) and getattr(module, "weight", None) is not None:
            yield f"{name}.weight", module.weight


def _missing_reduction(name: str, parameter: nn.Parameter) -> Any:
    """The reduction over TP that Megatron's training loop applies to this gradient and DeepSpeed does not; or None."""
    if getattr(parameter, "tensor_model_parallel", False):
        return None
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return dist.ReduceOp.AVG
    if _of_heads(name) or getattr(parameter, "sequence_parallel", False):
        return dist.ReduceOp.SUM
    return None


def _of_heads(name: str) -> bool:
    return any(part in ("q_layernorm", "k_layernorm") for part in name.split("."))


def _config(model: nn.Module) -> Any:
    """The configuration in which Megatron switches sequence parallelism on and off; None where nothing has one."""
    return next((m.config for m in model.modules() if isinstance(m, MegatronModule)), None)


def _reducer(group: dist.ProcessGroup, operation: Any, config: Any = None) -> Any:
    """``config``: where the gradient is partial under sequence parallelism only, which may be switched."""

    def reduce(grad: torch.Tensor) -> torch.Tensor:
        if config is not None and not config.sequence_parallel:
            return grad
        total = grad.to(torch.float32, copy=True).contiguous()
        dist.all_reduce(total, group=group)
        if operation == dist.ReduceOp.AVG:  # not an operation of gloo
            total /= group.size()
        return total.to(grad.dtype)

    return reduce


@torch.no_grad()
def check_replicas(model: nn.Module) -> dict[str, float]:
    """How far each TP-replicated parameter differs between TP ranks; collective over the TP group.

    Returns:
        name → max |difference| over the group, 0.0 where replicas agree.

    Raises:
        ValueError: parameters are partitioned by ZeRO-3 (gather them first).
    """
    group = parallel_state.get_tensor_model_parallel_group()
    differences = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        if getattr(parameter, "ds_status", None) is not None and parameter.numel() != parameter.ds_numel:  # type: ignore[attr-defined]
            raise ValueError(f"{name}: partitioned by ZeRO-3, accepted: gathered parameters")
        bounds = torch.stack([parameter.double(), -parameter.double()])
        if group.size() > 1:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        differences[name] = float((bounds[0] + bounds[1]).max())
    return differences


def rng_state() -> dict[str, Any]:
    """Every random state that Megatron layers draw from: CPU, GPU and the tracker of tensor-parallel regions."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    state["tracker"] = {k: v.clone() for k, v in megatron_tp.get_cuda_rng_tracker().get_states().items()}
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` returned (tensors may have been saved and loaded in between)."""
    torch.set_rng_state(state["cpu"].cpu())
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
    megatron_tp.get_cuda_rng_tracker().set_states({k: v.cpu().clone() for k, v in state["tracker"].items()})
