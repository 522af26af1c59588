"""Agreement of all ranks on a request: every rank raises the errors of any, and settings that
differ are named.

A rank with a ``"coat"`` block compares its settings with all others' in a collective. One without
would go straight on into DeepSpeed's collectives, and the ranks would hang until a timeout that
names none of them. So each call of ``deepspeed.initialize`` first leaves its error, and whether it
has a block, in torch.distributed's store, and waits for all others', as DeepSpeed's first
collective would.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from ...config import CoatConfigError
from ...ranks import check_same_on_all_ranks, rank_and_world, say_ranks, wait_for
from ..build.pipeline import stages
from ..heartbeat import group_timeout
from ..optimizer_from_json import parameter_of
from ..without_launcher import in_a_step, prepare
from .validate import Request

__all__ = ["agree"]

# Seconds that a rank without a block waits for the others: without one, ranks may build unequal
# numbers of engines.
PATIENCE = 20.0
HEARD = 5.0  # seconds that a rank with an error waits for the others to read it, before it raises

_calls = 0  # of this process: all ranks of a program build their engines in the same order


def agree(request: Request) -> None:
    """Wait for all ranks, and raise where any has an error or they differ; starts torch.distributed
    if need be.

    Raises:
        Exception: ``request.error``.
        CoatConfigError: another rank's error; some ranks have a block or a CoatAdamW and others
            have not; or keys that differ, with the values and the ranks that have them.
    """
    try:
        _start(request)
    except Exception as error:
        request.error = request.error or error
    # The error that is on its way says more.
    with suppress(Exception) if request.error else nullcontext():
        _exchange(request)
    if request.error is not None:
        raise request.error
    if request.ours:
        _compare(request)


def _start(request: Request) -> None:
    """Start torch.distributed as DeepSpeed would, where several ranks, or something of ours, are
    going to run.
    """
    import deepspeed

    given = request.given
    if not dist.is_initialized() and given.get("dist_init_required") is not False:
        right = request.error is None
        # A baseline starts as the run it is compared with; where nothing will run, a process of its
        # own stays as it is.
        prepare(request.ours or not right or in_a_step(), alone=right)
        if (right and request.ours) or int(os.environ.get("WORLD_SIZE", 1)) > 1:
            deepspeed.init_distributed(**{k: given[k] for k in ("distributed_port",) if k in given})


def _exchange(request: Request) -> None:
    """Leave this rank's error, or whether it has a block, in the store; raise what the other
    ranks have left.
    """
    global _calls
    call, _calls = _calls, _calls + 1
    rank, world = rank_and_world()
    if world == 1:
        return
    store, error = dist.distributed_c10d._get_default_store(), request.error
    keys = [f"coat_dist/initialize/{call}/{one}" for one in range(world)]
    kind = "refused" if error else "with" if request.ours else "without"
    store.set(keys[rank], json.dumps([kind, str(error)]))
    wait_for(keys, HEARD if error else group_timeout() if request.ours else PATIENCE)
    ranks = [one for one in range(world) if store.check([keys[one]])]
    left = dict(
        zip(ranks, map(json.loads, store.multi_get([keys[one] for one in ranks])), strict=True)
    )
    if error or len({kind for kind, _ in left.values()}) > 1:
        time.sleep(1.0)  # until all have read: the store ends with the process of rank 0
        if not error:
            _raise(left)


def _raise(left: Mapping[int, tuple[str, str]]) -> None:
    """Raise what ranks have left in the store: their kinds and errors."""
    errors: dict[str, list[int]] = {}
    for rank, (kind, text) in left.items():
        if kind == "refused":
            errors.setdefault(text, []).append(rank)
    if errors:
        lines = (
            f"{line} (on {say_ranks(ranks)})"
            for text, ranks in errors.items()
            for line in text.splitlines()
        )
        raise CoatConfigError(*lines)
    with_, without = (
        say_ranks([rank for rank, one in left.items() if one[0] == kind])
        for kind in ("with", "without")
    )
    text = (
        f'ranks were started differently: a "coat" block or a CoatAdamW on {with_}, neither on '
        f"{without}; accepted: "
    )
    raise CoatConfigError(f"{text}the same configuration on all ranks")


def _compare(request: Request) -> None:
    """Compare what the ranks are going to run: ranks that step with other options, each on its own
    shards, would train on silently. Where ranks hold different parts of a model, as with pipelines,
    the configuration alone is compared.
    """
    from deepspeed import PipelineModule

    given, model = request.given, request.given["model"]
    _take_device(given.get("args"))
    compared: dict[str, Any] = {
        **request.settings,
        "coat": request.coat and request.coat.model_dump(),
    }
    if not isinstance(model, PipelineModule) and stages(given.get("mpu")) == 1:
        compared["model.parameters"] = [  # ZeRO-3 keeps full shapes in ds_shape
            [
                name,
                list(getattr(p, "ds_shape", p.shape)),
                str(p.dtype),
                p.requires_grad,
                type(module).__name__,
            ]
            for name, module in model.named_modules()
            for p in module.parameters(recurse=False)
        ]
        names = {id(p): name for name, p in model.named_parameters()}
        groups = getattr(request.facts.optimizer, "param_groups", None)
        compared["model_parameters"] = _groups(given.get("model_parameters"), names)
        compared["optimizer.param_groups"] = _groups(groups, names)
    check_same_on_all_ranks(compared)


def _take_device(args: Any) -> None:
    """Choose the device that DeepSpeed's engine is going to choose, in the same way, before a
    collective needs one: NCCL would run it on the first GPU for every rank.
    """
    from deepspeed.accelerator import get_accelerator

    local = os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))
    rank = getattr(args, "device_rank", None if local is None else int(local))
    if rank is not None and rank >= 0:
        get_accelerator().set_device(rank)


def _groups(listed: Iterable[Any] | None, names: Mapping[int, str]) -> dict[str, Any]:
    """Plain options of parameter groups, or of a list of parameters as one group, and the names
    of what is in each.
    """
    groups = list(listed or [])
    if groups and not isinstance(groups[0], Mapping):
        groups = [{"params": groups}]
    plain = bool | int | float | str | list | tuple | torch.Tensor
    found = {}
    for i, group in enumerate(groups):
        params = [names.get(id(parameter_of(p)), "unknown") for p in group["params"]]
        found[str(i)] = {str(k): v for k, v in group.items() if isinstance(v, plain)} | {
            "params": params
        }
    return found
