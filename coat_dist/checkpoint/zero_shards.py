"""Weights that ZeRO-3 has divided, written from whole ones: each rank's shard, and no second one that is older."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["copy_into", "forget_second_shard"]


@torch.no_grad()
def copy_into(parameter: Any, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter; of one that ZeRO-3 has divided, this rank's part.

    Not collective, but to be called on every rank. For parameters that nothing has gathered: before ``initialize``,
    or while a checkpoint is loaded.

    Args:
        whole: of the parameter's whole shape, any device and floating dtype.
    """
    if not hasattr(parameter, "ds_tensor"):
        parameter.copy_(whole)
        return
    part = parameter.ds_tensor.ds_numel  # padded at the parameter's end
    mine = whole.reshape(-1)[part * torch.distributed.get_rank(parameter.ds_process_group) :][:part]
    parameter.ds_tensor.data.view(-1)[: mine.numel()].copy_(mine)
    forget_second_shard(parameter)


def forget_second_shard(parameter: Any) -> None:
    """Let the next fetch begin from the shards, whose values have changed, and not from hpZ's copy of the old ones.

    DeepSpeed makes second shards whenever it lets go of a gathered weight, while a model is built in shards too, and
    drops those of weights that are trained after a step and a load. Of others it keeps them for ever.
    """
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        parameter.ds_secondary_tensor = None
