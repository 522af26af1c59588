"""Disks that are full or read-only while a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import disk
from .bench import STEPS, Bench, Case, describe, short, some

__all__ = ["cases"]

SAYS = {
    disk.NO_SPACE: ("full from", "No space left on device"),
    disk.NO_SYNC: ("full, which is noticed at", "No space left on device"),
    disk.READ_ONLY: ("read-only from", "Read-only file system"),
}


def cases(bench: Bench, few: int | None) -> Iterator[Case]:
    """Saving must raise on every rank and say why and where, A must stay, and a save with space again must succeed."""
    every = []
    for rank, events in enumerate(bench.events):
        writes = [n for n, event in enumerate(events, 1) if event[0] in ("write", "open")]
        syncs = [n for n, event in enumerate(events, 1) if event[0] in ("fsync", "fdatasync")]
        every += [(rank, disk.NO_SPACE, n) for n in some(writes, 3)]
        every += [(rank, disk.NO_SYNC, n) for n in some(syncs, 1)]
        every += [(rank, disk.READ_ONLY, 1)]
    for rank, kind, number in every if few is None else some(every, few):
        where, text = SAYS[kind]
        what, path, _ = bench.events[rank][number - 1]
        name = f"{where} rank {rank}'s {what} {number} ({path.lstrip('/') or 'folder'})"
        yield Case("full disk", bench.stage, name, *_one(bench, rank, kind, number, text))


def _one(bench: Bench, rank: int, kind: int, number: int, text: str) -> tuple[str, bool]:
    folder = bench.fresh(bench.a)
    arm: list[Any] = ["arm", str(folder), {str(rank): [kind, number]}]
    saving: list[list[Any]] = [["load", str(folder)], ["train", STEPS], arm, ["save", str(folder)], ["disarm"]]
    out = bench.run(saving, timeout=15)
    errors = out.errors()
    if not all(errors):
        return describe(out), False
    silent = [r for r, e in enumerate(errors) if e and (text not in e or str(folder) not in e)]
    if silent:
        return f"rank {silent[0]} does not say so: {short(errors[silent[0]])}", False
    resumed, right = bench.resume(folder)
    if not right:
        return resumed, False
    folder = bench.fresh(bench.a)
    again = bench.run([["load", str(folder)], ["train", STEPS], arm, *saving[-2:], ["save", str(folder)]], timeout=15)
    if len(again.results("save")[0]) != 2 or again.results("save")[0][1] is not None:
        return f"a later save fails: {describe(again)}", False
    later, right = bench.resume(folder)
    return f"every rank says so; {resumed}; a later save {later}", right
