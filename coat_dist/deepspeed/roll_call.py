"""Ranks of which some have a ``"coat"`` block or a CoatAdamW and others neither: told apart before they would meet.

A rank with a block compares its settings with all others', in a collective. One without would go straight on into
DeepSpeed's collectives, the two would not fit, and the ranks would wait for each other until a timeout that names
nobody. So each call of ``deepspeed.initialize`` leaves a word in torch.distributed's store, and looks whether all
others have left the same. DeepSpeed's first collective would wait for the others as well. A rank whose configuration
is refused says that, before it raises: a file may be cut, or absent, on one node alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from .. import nodes
from ..config import CoatConfigError
from ..ranks import rank_and_world, say_ranks
from .slurm import in_a_step
from .timeouts import group_timeout
from .without_launcher import prepare

__all__ = ["answer", "refusals_are_heard"]

PATIENCE = 20.0
"""Seconds that a rank without a block waits for the others: in a program of DeepSpeed's alone, ranks may build unequal
numbers of engines."""

HEARD = 5.0
"""Seconds that a rank whose configuration is refused waits for the others to hear of it, before it raises."""
_WORDS = {True: "1", False: "0", None: "-"}

_answered = 0  # calls of this process: all ranks of a program build their engines in the same order


@contextmanager
def refusals_are_heard(given: Mapping[str, Any]) -> Iterator[None]:
    """Tell the other ranks of a ValueError inside that comes before this rank's :func:`answer`."""
    before = _answered
    try:
        yield
    except ValueError:
        if _answered == before:
            with suppress(Exception):  # the error that is on its way says more
                answer(None, given)
        raise


def answer(ours: bool | None, given: Mapping[str, Any]) -> None:
    """Say whether this rank's call has a block or a CoatAdamW, and wait until every rank has said so.

    Args:
        ours: whether it has; None: its configuration is refused.
        given: the arguments of ``deepspeed.initialize``, by name.

    Raises:
        CoatConfigError: some ranks have one and others have not, or one's is refused; on every rank but that one, and
            those without that have waited for :data:`PATIENCE`.
    """
    import deepspeed

    global _answered
    call, _answered = _answered, _answered + 1
    if not dist.is_initialized() and given.get("dist_init_required") is not False:
        # A baseline starts as the run it is compared with; where nothing will run, a process of its own stays as it is.
        prepare(ours is not False or in_a_step(), alone=ours is not None)
        if ours or int(os.environ.get("WORLD_SIZE", 1)) > 1:
            deepspeed.init_distributed(**{k: given[k] for k in ("distributed_port",) if k in given})
    rank, world = rank_and_world()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() and world > 1 else None
    if store is None:
        return
    key = f"coat_dist/initialize/{call}"
    store.set(f"{key}/{rank}", f"{_WORDS[ours]} {nodes.host()}")
    with_, without, refused = (store.add(f"{key}/{kind}", int(ours is kind)) for kind in _WORDS)
    end = time.monotonic() + (HEARD if ours is None else group_timeout() if ours else PATIENCE)
    while with_ + without + refused < world and time.monotonic() < end:
        if ours is not None and (refused or (with_ and without)):
            break
        time.sleep(0.02)
        with_, without, refused = (store.add(f"{key}/{kind}", 0) for kind in _WORDS)
    if refused or (with_ and without):
        _refuse(store, key, world)


def _refuse(store: Any, key: str, world: int) -> None:
    answers = {r: store.get(f"{key}/{r}").decode().partition(" ") for r in range(world) if store.check([f"{key}/{r}"])}
    said, hosts = ({r: answer[i] for r, answer in answers.items()} for i in (0, 2))
    store.add(f"{key}/read", 1)
    end = time.monotonic() + 2.0
    while store.add(f"{key}/read", 0) < len(said) and time.monotonic() < end:
        time.sleep(0.02)  # the store ends with the process of rank 0
    told = []
    for word, what in (("1", 'a "coat" block or a CoatAdamW'), ("0", "neither"), ("-", "one that is refused there")):
        if ranks := [r for r, ours in said.items() if ours == word]:
            several = len(set(hosts.values())) > 1
            where = f" ({', '.join(dict.fromkeys(hosts[r] for r in ranks))})" if several else ""
            told.append(f"{what} on {say_ranks(ranks)}{where}")
    raise CoatConfigError(
        f"ranks were started differently: {', '.join(told)}; accepted: the same configuration on all ranks"
    )
