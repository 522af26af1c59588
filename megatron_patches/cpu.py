"""Megatron's own training loop, and its attention where that is not patched, on a machine without a
GPU.

Optimizers, schedules, tied embeddings and causal masks ask for CUDA by name: ``device="cuda"``,
``.cuda()``, and types of parameters that have to be ``"torch.cuda.BFloat16Tensor"``. Inside these
functions, and nowhere else, such questions are answered for the CPU. Every supported version of
megatron-core needs this.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

# By module, what asks for CUDA. Functions stand where their callers look them up.
_ASKING = {
    "megatron.core.fusions.fused_softmax": ("FusedScaleMaskSoftmax.forward_torch_softmax",),
    "megatron.core.models.common.language_module.language_module": (
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
    "megatron.core.optimizer.optimizer": (
        "MixedPrecisionOptimizer.__init__",
        "Float16OptimizerWithFloat16Params.__init__",
        "FP32Optimizer.__init__",
        "clip_grad_by_total_norm_fp32",
        "count_zeros_fp32",
        "get_grad_norm_fp32",
    ),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer.__init__",
        "DistributedOptimizer.get_parameter_state_dp_zero",
    ),
    "megatron.core.pipeline_parallel.schedules": (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_with_interleaving",
        "forward_backward_pipelining_without_interleaving",
    ),
}


class _CPUForCUDA(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        asked = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return result.replace("torch.", "torch.cuda.") if asked else result


def answer_for_cuda() -> None:
    """Have the functions that ask for CUDA find the CPU. To be called once."""
    for module_name, names in _ASKING.items():
        module = importlib.import_module(module_name)
        for name in names:
            path, _, last = name.rpartition(".")
            owner = getattr(module, path) if path else module
            setattr(owner, last, _on_cpu(getattr(owner, last)))


def dispatch_tokens() -> None:
    """Have Megatron's alltoall dispatcher of tokens run without a CUDA stream for its counts. To be
    called once.

    On the CPU the counts are on the host already, and gloo wants them as lists.
    """
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAlltoAllTokenDispatcher as Dispatcher,
    )

    def numbers_on_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point and not self.drop_and_pad:
            for name in ("input_splits", "output_splits"):
                if isinstance(given := getattr(self, name, None), torch.Tensor):
                    setattr(self, name, given.tolist())
        return tokens_per_expert

    Dispatcher.cuda_dtoh_stream = object()  # not None, or it makes one
    Dispatcher._maybe_dtoh_and_synchronize = numbers_on_host


def gather_unevenly() -> None:
    """Have Megatron gather and scatter different numbers of rows over gloo, which cannot. To be
    called once.
    """
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_rows(
        rows: torch.Tensor, group: Any = None, sizes: Any = None, *more: Any, **others: Any
    ) -> Any:
        sizes = others.pop("output_split_sizes", sizes)
        if sizes is None or group is None or group.size() == 1:
            return gather(rows, group, sizes, *more, **others)
        parts = [rows.new_empty(size, *rows.shape[1:]) for size in sizes]
        parts[group.rank()].copy_(rows)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        return torch.cat(parts)

    def scatter_rows(
        rows: torch.Tensor, group: Any = None, sizes: Any = None, *more: Any, **others: Any
    ) -> Any:
        sizes = others.pop("input_split_sizes", sizes)
        if sizes is None or group is None or group.size() == 1:
            return scatter(rows, group, sizes, *more, **others)
        parts = [part.clone() for part in rows.split(list(sizes))]
        for rank, part in enumerate(parts):
            dist.reduce(part, group=group, group_dst=rank)
        return parts[group.rank()]

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = (
        gather_rows,
        scatter_rows,
    )


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _CPUForCUDA():
            return function(*args, **kwargs)

    return call
