"""Megatron's own training loop, and its attention where that is not patched, on a machine without a GPU.

Optimizers, schedules, tied embeddings and causal masks ask for CUDA by name: ``device="cuda"``, ``.cuda()``, and types
of parameters that have to be ``"torch.cuda.BFloat16Tensor"``. Inside these functions, and nowhere else, such questions
are answered for the CPU. Every supported version of megatron-core needs this.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["answer_for_cuda"]

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
    "megatron.core.optimizer.grad_scaler": (
        "MegatronGradScaler.__init__",
        "DynamicGradScaler.__init__",
        "DynamicGradScaler.load_state_dict",
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


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _CPUForCUDA():
            return function(*args, **kwargs)

    return call
