"""Master weights as bfloat16 weights and remainders under ZeRO: one copy of the weights.

With ``bf16_master_weights_and_grads`` ZeRO hands the optimizer a bfloat16 copy of its bfloat16
partition. :func:`share_memory` makes the two the same memory, so that master weight and weight take
4 bytes; DeepSpeed then copies a tensor onto itself, which torch skips. DeepSpeed takes the bfloat16
partition for the master weight, so ``accessors.py`` answers for master weights, and loading of
weights without optimizer states is replaced here.
"""

from __future__ import annotations

from typing import Any

import torch

from ...checkpoint.zero_partitions import partitions
from ...config import refuse
from ...optim.state import has_remainder
from .step import is_verified_build


def check_master_weights(zero: Any) -> None:
    """Refuse (ValueError) options of a CoatAdamW that do not fit the weights that a ZeRO
    optimizer hands it.
    """
    for part in partitions(zero):
        if has_remainder(part.group) != (part.flat.dtype == torch.bfloat16):
            own, name = part.group["master_weights"], part.group.get("name", "")
            refuse(
                "CoatAdamW master_weights",
                f"got {own!r} in group {name!r}, and {part.flat.dtype} from {type(zero).__name__}",
                "'bf16_remainder' with bf16.bf16_master_weights_and_grads and "
                "bf16.bf16_optimizer_states true, or 'parameter' without them",
            )


def keeps_remainders(zero: Any) -> bool:
    """Whether the master weights of a ZeRO optimizer with a CoatAdamW are bfloat16 weights and
    remainders. All groups are alike in that: :func:`check_master_weights`.
    """
    return has_remainder(zero.optimizer.param_groups[0])


def share_memory(zero: Any) -> None:
    """Make weights and the partitions that are stepped one copy, right after a ZeRO optimizer was
    built. With an unverified DeepSpeed (``step.py``) they stay two copies.
    """
    if is_verified_build():
        for flat, weights in pairs_of_copies(zero):
            flat.data = weights.data


def pairs_of_copies(zero: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The partitions that ZeRO steps, each with the weights that it would copy them to."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO-3
        return list(
            zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
        )
    flats = zero.single_partition_of_fp32_groups
    return [(flat, zero.get_bit16_param_group(i)[0]) for i, flat in enumerate(flats)]


def restore_from_bit16_weights(zero: Any) -> None:
    """In place of the method of that name: weights were loaded without optimizer states, and
    are the master weights.
    """
    type(zero)._restore_from_bit16_weights(zero)
    for state in zero.optimizer.state.values():
        if "coat_p_low" in state:
            state["coat_p_low"].zero_()
