"""Ranks of which some have a ``"coat"`` block or a CoatAdamW and others neither: told apart before they would meet.

A rank with a block compares its settings with all others', in a collective. One without would go straight on into
DeepSpeed's collectives, the two would not fit, and the ranks would wait for each other until a timeout that names
nobody. So each call of ``deepspeed.initialize`` leaves a word in torch.distributed's store, and looks whether all
others have left the same. DeepSpeed's first collective would wait for the others as well.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from .. import nodes
from ..config import CoatConfigError
from ..ranks import rank_and_world, say_ranks
from .timeouts import group_timeout
from .without_launcher import prepare

__all__ = ["answer"]

PATIENCE = 20.0
"""Seconds that a rank without a block waits for the others: in a program of DeepSpeed's alone, ranks may build unequal
numbers of engines."""

_calls = itertools.count()  # of this process: all ranks of a program build their engines in the same order


def answer(ours: bool, given: Mapping[str, Any]) -> None:
    """Say whether this rank's call has a block or a CoatAdamW, and wait until every rank has said so.

    Args:
        ours: whether it has.
        given: the arguments of ``deepspeed.initialize``, by name.

    Raises:
        CoatConfigError: some ranks have one and others have not; on every rank, but for those without that have waited
            for :data:`PATIENCE`.
    """
    import deepspeed

    call = next(_calls)
    if not dist.is_initialized() and given.get("dist_init_required") is not False:
        prepare()  # a baseline, which has nothing of ours, starts as the run it is compared with
        if ours or int(os.environ.get("WORLD_SIZE", 1)) > 1:
            deepspeed.init_distributed(**{k: given[k] for k in ("distributed_port",) if k in given})
    rank, world = rank_and_world()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() and world > 1 else None
    if store is None:
        return
    key = f"coat_dist/initialize/{call}"
    store.set(f"{key}/{rank}", f"{int(ours)} {nodes.host()}")
    with_, without = (store.add(f"{key}/{kind}", int(ours == kind)) for kind in (True, False))
    end = time.monotonic() + (group_timeout() if ours else PATIENCE)
    while with_ + without < world and not (with_ and without) and time.monotonic() < end:
        time.sleep(0.02)
        with_, without = (store.add(f"{key}/{kind}", 0) for kind in (True, False))
    if with_ and without:
        _refuse(store, key, world)


def _refuse(store: Any, key: str, world: int) -> None:
    answers = {r: store.get(f"{key}/{r}").decode().partition(" ") for r in range(world) if store.check([f"{key}/{r}"])}
    said, hosts = ({r: answer[i] for r, answer in answers.items()} for i in (0, 2))
    store.add(f"{key}/read", 1)
    end = time.monotonic() + 2.0
    while store.add(f"{key}/read", 0) < len(said) and time.monotonic() < end:
        time.sleep(0.02)  # the store ends with the process of rank 0
    have, lack = ([r for r, ours in said.items() if ours == kind] for kind in ("1", "0"))
    have_hosts, lack_hosts = (
        "" if len(set(hosts.values())) == 1 else f" ({', '.join(dict.fromkeys(hosts[r] for r in ranks))})"
        for ranks in (have, lack)
    )
    raise CoatConfigError(
        f'ranks were started differently: a "coat" block or a CoatAdamW on {say_ranks(have)}{have_hosts}, neither on '
        f"{say_ranks(lack)}{lack_hosts}; accepted: the same configuration on all ranks"
    )
