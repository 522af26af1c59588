"""Links from parameters to their shards of the master weights, and their repair under
``round_robin_gradients``.

ZeRO-1, 2 and BF16_Optimizer call ``_link_all_hp_params`` when they are built and after loading;
:func:`after_linking` adds what has to follow. ``"round_robin_gradients": true`` deals the
parameters of a group out to the ranks in turn, but DeepSpeed's links, accessors and
``param_slice_mappings`` count in the order of the group, so they silently name elements of other
parameters. :func:`relink` links them in the order of the flat tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["after_linking", "deals_out", "relink"]


def after_linking(zero: Any, action: Callable[[Any], None]) -> None:
    """Call ``action(zero)`` now and after each time that a ZeRO-1, 2 or BF16_Optimizer links
    parameters, after the actions that came before; its parameters are linked again now.
    """
    actions: list[Callable[[Any], None]] | None = getattr(zero, "coat_after_linking", None)
    if actions is None:
        actions = zero.coat_after_linking = []
        link = zero._link_all_hp_params

        def link_all() -> None:
            link()
            for action in actions:
                action(zero)

        zero._link_all_hp_params = link_all
    actions.append(action)
    zero._link_all_hp_params()


def deals_out(zero: Any) -> bool:
    """Whether one of DeepSpeed's ZeRO-1 and 2 optimizers deals parameters out in turn."""
    return bool(getattr(zero, "round_robin_gradients", False)) and hasattr(
        zero, "round_robin_bit16_groups"
    )


def relink(zero: Any) -> None:
    """Correct the links of an optimizer that :func:`deals_out`, now and whenever it links
    parameters again.
    """
    after_linking(zero, _link_all)
    zero._param_slice_mappings = zero._create_param_mapping()


def _link_all(zero: Any) -> None:
    """What DeepSpeed's ``_link_all_hp_params`` does, with the offsets that parameters have in
    the flat tensor.
    """
    from deepspeed.utils import link_hp_params

    for i, params in enumerate(zero.bit16_groups):
        group = zero.real_dp_process_group[i]
        size = zero.bit16_groups_flat[i].numel() // dist.get_world_size(group)
        starts = zip(
            zero.round_robin_bit16_groups[i], zero.round_robin_bit16_offsets[i], strict=True
        )
        offset = {id(p): start for p, start in starts}
        link_hp_params(
            lp_param_list=params,
            flat_hp_partition=zero.single_partition_of_fp32_groups[i],
            gradient_dict=zero.averaged_gradients,
            offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload,
            param_group_index=i,
            partition_start=dist.get_rank(group) * size,
            partition_size=size,
            dp_group=group,
            param_offsets=[offset[id(p)] for p in params],
        )
