"""DeepSpeed's ``PipelineModule``, whose engine runs its own schedule: what CoatAdamW's groups mean
to its stages.

Stages have other parameters, so other groups of FP8 moments, other noise, and sometimes another
number of groups. (Megatron's stages are ``pipeline.py``.)
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...config import refuse
from ...optim.groups import parameter_of
from ...ranks import gather
from .pipeline import TIED, has_groups_of_norms


def tied_weights(model: Any) -> set[int]:
    """Identities of a PipelineModule's trained weights of ``TiedLayerSpec`` that another stage
    holds, too.
    """
    found = set()
    for weight, group in model.get_tied_weights_and_groups():
        if weight.requires_grad and dist.get_world_size(group) > 1:
            found.add(id(weight))
    return found


def tied_apart(groups: Iterable[dict[str, Any]], tied: Collection[int]) -> list[dict[str, Any]]:
    """Groups in which ``tied`` weights have fp32 moments, in a separate group behind the one that
    held them.

    FP8 moments depend on where a weight lies in its shard, and on noise; their copies on two stages
    would drift apart. fp32 moments depend on nothing but the gradient, which DeepSpeed sums over
    the copies.
    """
    result: list[dict[str, Any]] = []
    for group in groups:
        held = [p for p in group["params"] if id(parameter_of(p)) in tied]
        if not held or group.get("moments") == "fp32":
            result.append(group)
            continue
        if rest := [p for p in group["params"] if id(parameter_of(p)) not in tied]:
            result.append({**group, "params": rest})
        name = {"name": f"{group['name']}{TIED}"} if "name" in group else {}
        result.append({**group, **name, "params": held, "moments": "fp32"})
    return result


def check_tied(groups: Iterable[Mapping[str, Any]], tied: Collection[int], what: str) -> None:
    """Refuse ``tied`` weights in groups (``what.i``) that ask for FP8 moments."""
    for i, group in enumerate(groups):
        if group.get("moments") == "fp8" and any(
            id(parameter_of(p)) in tied for p in group["params"]
        ):
            given = (
                'got "fp8" for a weight that several stages of a PipelineModule hold: copies '
                "would drift apart"
            )
            refuse(f"{what}.{i}.moments", given, '"fp32"')


def groups_differ(engine: Any) -> bool:
    """Whether ZeRO has another number of groups on another stage, as where one has no biases;
    collective over stages.

    ZeRO then sums norms over all stages group by group, and hangs waiting for the one that has no
    further group.
    """
    zero = engine.optimizer
    if getattr(engine, "grid", None) is None or not has_groups_of_norms(zero) or zero.cpu_offload:
        return False
    return len(set(_counts(zero))) > 1


def call_norms_alike(engine: Any) -> None:
    """Let every stage take part in as many sums as the one with most groups has."""
    zero = engine.optimizer
    more = max(_counts(zero)) - len(zero.bit16_groups)

    def scaled_global_norm(zero: Any, norm_type: float = 2) -> torch.Tensor:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        held = enumerate(zero.params_in_partition)
        norms = [
            zero.get_grad_norm_direct(zero.averaged_gradients[i], params) for i, params in held
        ]
        if zero.has_moe_layers:
            zero._average_expert_grad_norms(norms)
        norms += [zero.get_grad_norm_direct([], []) for _ in range(more)]
        return combine_grad_norm_groups(norms, norm_type=norm_type)

    zero.scaled_global_norm = types.MethodType(scaled_global_norm, zero)


def _counts(zero: Any) -> list[int]:
    """How many groups each of the ranks has over which ZeRO sums norms."""
    return gather(len(zero.bit16_groups), zero.model_parallel_group)
