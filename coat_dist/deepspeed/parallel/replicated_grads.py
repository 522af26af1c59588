"""Tensor-parallel models that DeepSpeed would let drift apart: refused before an engine is built.

DeepSpeed reduces gradients over data-parallel ranks only. Tensor-parallel (TP) ranks must sum the
gradient of a parameter that each holds but sees only part of the data for. Otherwise the copies
drift apart without an error. This file knows the marks that Megatron puts on parameters, and
imports no Megatron.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ...config import refuse

SUMMED = "coat_replicated_grad"
"""The attribute of a parameter whose gradient is summed over TP ranks before DeepSpeed sees it.
``megatron_patches.install_replicated_grad_hooks`` sets it; a program that sums gradients itself
sets it to True.
"""


def partial_over_tp(name: str, parameter: torch.Tensor) -> Literal["sum", "average"] | None:
    """How TP ranks have to put the gradient of a parameter together, or None where each rank's
    is whole.
    """
    if getattr(parameter, "tensor_model_parallel", False):
        return None
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return "average"
    return "sum" if is_head_norm(name) or getattr(parameter, "sequence_parallel", False) else None


def is_head_norm(name: str) -> bool:
    """Whether a parameter or module belongs to a norm on queries or keys, which sees the heads
    of one rank.
    """
    return any(part in ("q_layernorm", "k_layernorm") for part in name.split("."))


def check_replicated_grads(model: torch.nn.Module, mpu: Any, tp: int) -> None:
    """Refuse a model over ``tp`` TP ranks whose replicated gradients nobody sums.

    Raises:
        CoatConfigError: no ``mpu`` for a model that is divided over TP ranks, whose gradients
            DeepSpeed would average over all ranks; or parameters without the mark :data:`SUMMED`
            that need the sum.
    """
    if mpu is None:
        for module in model.modules():
            size = getattr(getattr(module, "config", None), "tensor_model_parallel_size", 1)
            if isinstance(size, int) and size > 1:
                refuse(
                    "mpu",
                    f"got none for a model with tensor_model_parallel_size {size}, whose gradients "
                    "DeepSpeed would average over tensor-parallel ranks",
                    "megatron_patches.MPUAdapter(), or megatron_patches.initialize, which makes "
                    "one",
                )
    missing = []
    for name, parameter in model.named_parameters():
        summed = getattr(parameter, SUMMED, False) or not partial_over_tp(name, parameter)
        if parameter.requires_grad and not summed:
            missing.append(name)
    if tp > 1 and missing:
        refuse(
            "model",
            f"got {len(missing)} parameters ({missing[0]}{', ...' * (len(missing) > 1)}) that the "
            f"{tp} tensor-parallel ranks each hold and whose gradients nobody sums over these "
            "ranks, so that their copies would drift apart",
            "megatron_patches.install_replicated_grad_hooks(model) before initialize, or "
            "megatron_patches.initialize; or, where this program sums them, "
            f"parameter.{SUMMED} = True on each",
        )
