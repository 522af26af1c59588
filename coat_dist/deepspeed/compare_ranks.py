"""Ranks that were started with different settings or models: found before they would hang, or silently train on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..config import CoatConfig
from ..ranks import check_same_on_all_ranks
from .roll_call import answer

__all__ = ["compare_ranks"]


def compare_ranks(
    settings: Mapping[str, Any], coat: CoatConfig | None, model: torch.nn.Module | None, given: Mapping[str, Any]
) -> None:
    """Compare what the ranks are going to run; a collective, for which torch.distributed is initialized if need be.

    Args:
        settings: DeepSpeed's configuration without the block.
        coat: the block.
        model: None where ranks hold different parts of it, as with pipelines.
        given: the arguments of ``deepspeed.initialize``, by name.

    Raises:
        CoatConfigError: on every rank; names the keys that differ, with the values and the ranks that have them.
    """
    answer(True, given)
    _take_device(given.get("args"))
    compared: dict[str, Any] = {**settings, "coat": coat and coat.model_dump()}
    if model is not None:
        compared["model.parameters"] = _parameters(model)
    check_same_on_all_ranks(compared)


def _take_device(args: Any) -> None:
    """Choose the device that DeepSpeed's engine is going to choose, in the same way, before a collective needs one.

    NCCL would otherwise run it on the first GPU for every rank. Without a local rank nothing is chosen: DeepSpeed's
    engine then refuses to start.
    """
    from deepspeed.accelerator import get_accelerator

    local = os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))
    rank = getattr(args, "device_rank", None if local is None else int(local))
    if rank is not None and rank >= 0:
        get_accelerator().set_device(rank)


def _parameters(model: torch.nn.Module) -> list[list[Any]]:
    """Names, full shapes (ZeRO-3 keeps them in ``ds_shape``), dtypes and trainability of all parameters."""
    return [
        [n, list(getattr(p, "ds_shape", p.shape)), str(p.dtype), p.requires_grad, type(m).__name__]
        for n, m in model.named_modules()
        for p in m.parameters(recurse=False)
    ]
