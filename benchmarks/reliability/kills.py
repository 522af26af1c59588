"""SIGKILL of one rank at every call that changes something on disk while a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator

from .bench import STEPS, Bench, Case, points, some

__all__ = ["cases"]

A_FILE = 5
"""Moments of each file and rank."""


def cases(bench: Bench, few: int | None) -> Iterator[Case]:
    """A is complete, training goes on, and the save of B is killed. Fresh ranks must resume one of the two."""
    every = points(bench, A_FILE)
    for name, rank, kind, number in every if few is None else some(every, few):
        folder = bench.fresh(bench.a)
        arm = ["arm", str(folder), {str(rank): [kind, number]}]
        out = bench.run([["load", str(folder)], ["train", STEPS], arm, ["save", str(folder)]], timeout=20)
        if out.status[rank] != -9:
            yield Case("kill", bench.stage, name, f"was not killed: exit status {out.status}", False)
        elif None in out.status:
            yield Case("kill", bench.stage, name, f"rank {out.status.index(None)} hangs", False)
        else:
            what, passed = bench.resume(folder)
            yield Case("kill", bench.stage, name, what, passed)
