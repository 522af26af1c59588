"""Megatron's process groups and random states, and the ``mpu`` object by which DeepSpeed finds
the groups.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import tensor_parallel as megatron_tp
from torch import nn

from coat_dist.deepspeed import zero_init as sharded
from coat_dist.flow import TensorParallel

from .compat import check_version, prepare_cpu


def initialize_model_parallel(tp: int = 1, *, seed: int = 1234, **kwargs: Any) -> None:
    """Set up Megatron's process groups and random states over an initialized ``torch.distributed``,
    on GPU or CPU.

    Args:
        tp: tensor-parallel size.
        seed: of parameter initialization (the same on all ranks) and of dropout (tensor-parallel
            regions differ by rank).
        kwargs: further arguments of ``parallel_state.initialize_model_parallel``, such as
            ``pipeline_model_parallel_size``. By default Megatron also makes a gloo twin of every
            data-parallel group, for ``get_megatron_optimizer``; under DeepSpeed
            ``create_gloo_process_groups=False`` leaves them out.
    """
    check_version()
    prepare_cpu()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **kwargs)
    torch.manual_seed(seed)
    megatron_tp.model_parallel_cuda_manual_seed(seed)


def tensor_parallel(module: nn.Module) -> TensorParallel:
    """The :class:`TensorParallel` that ``module`` (a Megatron layer, linear or norm) takes part
    in.
    """
    group = getattr(module, "tp_group", None)
    if group is None:
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        return TensorParallel()
    of_model = getattr(getattr(module, "config", None), "sequence_parallel", False)
    return TensorParallel(group, bool(getattr(module, "sequence_parallel", of_model)))


class MPUAdapter:
    """Megatron's groups under the names that ``deepspeed.initialize(mpu=...)`` asks for.

    ``megatron.core.parallel_state`` itself lacks some of them. DeepSpeed's own sequence parallelism
    is recognized by the mere presence of ``initialize_sequence_parallel`` or
    ``get_sequence_parallel_*``: they must never be added here.

    "Model parallel" is tensor times pipeline parallel, so that DeepSpeed's gradient norm is summed
    over all stages, a step that one of them skips is skipped by all, and each has checkpoint files
    of its own: ``mp_rank_XX``, where XX is stage * TP + tensor-parallel rank.
    """

    coat_mpu = True  # by this `deepspeed.initialize` knows it, after `import coat_dist`

    def get_model_parallel_rank(self) -> int:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return stage * tp + parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        return stages * parallel_state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_model_parallel_group()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(parallel_state.get_data_parallel_group())


_AS_IN_MEGATRON = """
    get_tensor_model_parallel_rank get_tensor_model_parallel_world_size
    get_tensor_model_parallel_group get_tensor_model_parallel_src_rank
    get_pipeline_model_parallel_rank get_pipeline_model_parallel_world_size
    get_pipeline_model_parallel_group get_context_parallel_world_size
    get_expert_model_parallel_world_size get_expert_model_parallel_group
    get_expert_data_parallel_group get_data_parallel_rank get_data_parallel_world_size
    get_data_parallel_group
"""
for _name in _AS_IN_MEGATRON.split():
    setattr(MPUAdapter, _name, staticmethod(getattr(parallel_state, _name)))


def rng_state() -> dict[str, Any]:
    """Every random state that Megatron layers draw from: CPU, GPU and the tracker of
    tensor-parallel regions.
    """
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    state["tracker"] = {
        k: v.clone() for k, v in megatron_tp.get_cuda_rng_tracker().get_states().items()
    }
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` returned (tensors may have been saved and loaded in
    between).
    """
    torch.set_rng_state(state["cpu"].cpu())
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
    megatron_tp.get_cuda_rng_tracker().set_states(
        {k: v.cpu().clone() for k, v in state["tracker"].items()}
    )


def zero_init(
    config: Any, dtype: torch.dtype | None = torch.bfloat16
) -> AbstractContextManager[bool]:
    """Build a Megatron model inside this context, and with ZeRO-3 no rank ever holds the whole of
    it.

    Parameters of each module are divided over data-parallel ranks as soon as the module is built;
    weights are those that the model has without it, to the bit. With other stages of ZeRO it does
    nothing.

    Args:
        config: what ``initialize`` takes, with ``zero_optimization.stage`` 3 or another.
        dtype: of floating-point parameters, as ``model.to(dtype)`` would leave them; None = as they
            are built.

    Raises:
        CoatConfigError: the configuration cannot be read, or its block is wrong.
    """
    return sharded.zero_init(config, MPUAdapter(), dtype)
