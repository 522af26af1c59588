"""Ranks that go on together or stop together: an error of one rank is raised on all.

:class:`Team` is how every part of the project does this. Without torch.distributed, this process is
the only rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from . import nodes
from .config import CoatConfigError

T = TypeVar("T")
_alone = False


def rank_and_world() -> tuple[int, int]:
    """This rank, and how many there are."""
    if _alone or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def say_on_rank_0(line: str) -> None:
    """Print a line to stderr, on rank 0 alone."""
    if rank_and_world()[0] == 0:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def alone() -> Iterator[None]:
    """Within, this process is the only rank for all of this module: for work that one rank does for
    the others, whose parts are collectives elsewhere.
    """
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def gather(mine: T, group: Any = None) -> list[T]:
    """What every rank gives, of all or of a ``group``, in rank order; also a barrier."""
    world = rank_and_world()[1] if group is None else dist.get_world_size(group)
    everyone: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def share(things: Sequence[T]) -> Sequence[T]:
    """This rank's share of ``things``, the same sequence on all ranks, dealt out in turns."""
    rank, world = rank_and_world()
    return things[rank::world]


def on_rank_0(function: Callable[[], T], patient: bool = False) -> T:
    """Call ``function`` on rank 0 alone; every rank gets its result, or raises what it raised.

    For what is read from a shared folder that ranks write to later: if each looked for itself, one
    that is late would see what another has written since.

    Args:
        patient: as in :func:`on_first_ranks`.
    """
    return on_first_ranks([range(rank_and_world()[1])], function, patient)


def on_first_ranks(
    teams: Sequence[Sequence[int]], function: Callable[[], T], patient: bool = True
) -> T:
    """Call ``function`` on the first rank of each team (nodes with disks of their own); every rank
    gets its team's result, or raises what one raised.

    Args:
        teams: ranks, each in one of them; the same on all ranks.
        patient: it may take longer than the timeout of collectives: the others begin to wait in one
            when it is done. Should a first rank be killed, it is the launcher that ends them.
    """
    rank, world = rank_and_world()
    firsts = [team[0] for team in teams]
    patient, done = patient and world > 1, ""
    # The same key on all ranks: each counts for itself, in the store, which is new with every
    # group.
    if patient:
        done = f"coat_dist/first_ranks/{_store().add(f'coat_dist/first_ranks/calls/{rank}', 1)}"
    answer: tuple[Any, Exception | None] = None, None
    if rank in firsts:
        try:
            answer = function(), None
        except Exception as problem:
            answer = None, problem
        if patient:
            _store().set(f"{done}/{rank}", "1")
    if patient:
        wait_for([f"{done}/{first}" for first in firsts])
    answers = gather(answer)
    for first in firsts:
        if (error := answers[first][1]) is not None:
            several = len(firsts) > 1 and isinstance(error, ValueError)
            raise type(error)(f"{error}{nodes.say_host(first)}") if several else error
    return answers[next(team[0] for team in teams if rank in team)][0]


def wait_for(keys: list[str], seconds: float = math.inf) -> None:
    """Wait until all keys are in the store, or for that long."""
    pause, end = 0.01, time.monotonic() + seconds
    while not _store().check(keys) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _store() -> Any:
    """What the ranks of the default group met through."""
    return dist.distributed_c10d._get_default_store()


def attempt(work: Callable[[], T]) -> tuple[list[T | None], dict[int, str]]:
    """Do this rank's part, whatever it raises; ``work`` must not use collectives.

    Returns:
        What each rank's part returned, in rank order (None where it raised), and the text of each
        error by rank: a ``ValueError`` names what is wrong itself, any other error stands with its
        type.
    """
    result, text = None, None
    try:
        result = work()
    except ValueError as problem:
        text = str(problem)
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
    results, texts = zip(*gather((result, text)), strict=True)
    return list(results), {rank: text for rank, text in enumerate(texts) if text is not None}


@dataclass(frozen=True)
class Team:
    """All ranks, and the error that each of them raises where any of them fails.

    Every method is a collective. The functions that they are given run between collectives and must
    not use any: a rank that raised would leave the others waiting.
    """

    error: Callable[[str], Exception] = ValueError
    """Makes the error of its text."""

    def each(self, work: Callable[[], T], doing: str = "") -> list[T]:
        """What ``work`` returns on each rank, in rank order.

        Raises:
            error: any rank's part raised. With ``doing``, its first words, it names the ranks.
        """
        results, errors = attempt(work)
        if errors and doing:
            lines = [f"rank {i}{nodes.say_host(i)}: {text}" for i, text in errors.items()]
            raise self.error(f"{doing}: {'; '.join(lines)}")
        if errors:
            raise self.error("\n".join(dict.fromkeys(errors.values())))
        return cast(list[T], results)

    def on_rank_0(self, work: Callable[[], T], doing: str = "") -> T:
        """:meth:`each`, where rank 0 alone works; every rank gets its result."""
        rank = rank_and_world()[0]
        return cast(T, self.each(lambda: work() if rank == 0 else None, doing)[0])

    def agree(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Refuse named values, such as arguments, that differ between ranks."""
        by_rank = self.each(lambda: {key: repr(value) for key, value in values().items()})
        wrong = _differing(by_rank)
        if wrong:
            lines = [f"{key}: got {who}, accepted: the same on all ranks" for key, who in wrong]
            raise self.error("\n".join(lines))

    def refuse(
        self, check: Callable[[], Sequence[str]], heading: str = "", accepted: str = ""
    ) -> None:
        """Raise on all ranks the problems that any rank finds.

        Args:
            check: returns a line for each problem, or raises one.
            heading: first line of the error.
            accepted: last line of the error, behind at most eight different problems.
        """
        found, errors = attempt(check)
        lines: list[str] = []
        for rank, mine in enumerate(found):
            lines += [errors[rank]] if mine is None else mine
        lines = list(dict.fromkeys(lines))
        if lines:
            lines = _some(lines, _SHOWN_KEYS)
            raise self.error("\n".join([heading, *lines, accepted]).strip())


def check_same_on_all_ranks(values: Mapping[str, Any]) -> None:
    """Compare what each rank believes to run; ranks that differ would train on silently or hang.

    A collective: under NCCL each rank's device must be the current one. Ranks exchange one digest,
    and values only where digests differ. ``values`` are plain ones; their names are the first parts
    of dotted keys.

    Raises:
        CoatConfigError: on every rank; names the dotted keys that differ, with the values and the
            ranks that have them. Of a list of lists, such as all parameters, the first entry that
            differs.
    """
    text = json.dumps(values, sort_keys=True, default=lambda v: getattr(v, "tolist", v.__str__)())
    digests, places = zip(
        *gather((hashlib.sha256(text.encode()).hexdigest(), nodes.my_place())), strict=True
    )
    nodes.meet(list(places))
    if len(set(digests)) == 1:
        return
    wrong = _differing(gather(dict(leaves("", json.loads(text)))))
    lines = [f"{key}: {who}" for key, who in wrong]
    lines = _some(lines, _SHOWN_KEYS)
    raise CoatConfigError("ranks were started differently: " + "; ".join(lines))


_SHOWN_KEYS, _SHOWN_CHARACTERS, _SHOWN_VALUES = 8, 120, 4
"""Of an error: keys that are named, characters of each value, and values of each key."""


def leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Dotted keys of a JSON value, each with its value as text. Lists are one value, but for those
    that hold lists or objects: their entries are ``key[0]`` and so on.
    """
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}" if key else name, inner)
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        yield from ((f"{key}[{i}]", json.dumps(inner)) for i, inner in enumerate(value))
    else:
        yield key, json.dumps(value)


def _differing(by_rank: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Keys whose values differ between ranks, of each list the first one, and who has which."""
    found: dict[str, tuple[str, str]] = {}
    for key in dict.fromkeys(key for mine in by_rank for key in mine):
        texts = [mine.get(key) for mine in by_rank]
        if len(set(texts)) > 1:
            found.setdefault(key.partition("[")[0], (key, _who_has_what(texts)))
    return list(found.values())


def _who_has_what(texts: Sequence[str | None]) -> str:
    """``1.0 on rank 0, 0.5 on ranks 1-3``, the value of most ranks first."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault("absent" if text is None else text, []).append(rank)
    parts = []
    for text, having in sorted(ranks.items(), key=lambda item: -len(item[1])):
        if len(text) > _SHOWN_CHARACTERS:
            text = f"{text[:_SHOWN_CHARACTERS]}..."
        parts.append(f"{text} on {say_ranks(having)}")
    return ", ".join(_some(parts, _SHOWN_VALUES))


def _some(texts: Sequence[str], most: int) -> list[str]:
    """The first ``most`` of them, and how many more there are."""
    more = len(texts) - most
    return [*texts[:most], f"and {more} more"] if more > 0 else [*texts]


def of_another_rank(problem: BaseException) -> bool:
    """Whether a collective or the store failed, which has its reason in another rank."""
    words = (
        "gloo",
        "NCCL",
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "TCPStore",
    )
    return isinstance(problem, dist.DistError) or any(word in str(problem) for word in words)


def say_ranks(numbers: list[int]) -> str:
    """``rank 2``, ``ranks 0-3, 6``; with the hosts of the first four where there are several
    nodes.
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1] = [runs[-1][0], n]
        else:
            runs.append([n])
    texts = _some(["-".join(map(str, run)) for run in runs], 6)
    hosts = [*dict.fromkeys(where for n in numbers if (where := nodes.host_of(n)))]
    where = f" (host{'s' if len(hosts) > 1 else ''} {', '.join(_some(hosts, 4))})" if hosts else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}{where}"


def tell_torchrun(line: str) -> None:
    """Have torchrun, which ends with a summary of its own, repeat ``line`` there; nothing under
    other launchers.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": extra}}, file)
