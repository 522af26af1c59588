"""What the groups of cases share: checkpoints to disturb, and whether what is left of them resumes a run to the bit."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import disk
from .program import Run
from .ranks import Outcome, start

__all__ = ["STEPS", "Bench", "Case", "describe", "points", "short", "some"]

STEPS = 2
"""Between two checkpoints, and after resuming."""
LIMIT = 60.0


class Case(NamedTuple):
    """One row of the result."""

    group: str
    stage: int
    name: str
    what: str
    """What was seen."""
    passed: bool


class Bench:
    """One program under one ZeRO stage, with a checkpoint A after two steps and a checkpoint B after four."""

    def __init__(self, program: str, stage: int, work: Path) -> None:
        self.program, self.stage, self.work = program, stage, work
        self._known: dict[str, tuple[str, bool]] = {}
        self.a, self.both = work / "a", work / "both"
        self._reference()

    def run(
        self, actions: Sequence[Sequence[Any]], limit: float = LIMIT, hung: int | None = None, **settings: Any
    ) -> Outcome:
        """Run the program's ranks to their end; ``settings`` are those of :class:`Run`."""
        return start(Run(self.program, **{"stage": self.stage, **settings}, actions=actions), self.reports, limit, hung)

    @property
    def reports(self) -> Path:
        """Where ranks report to."""
        return self.work / "reports"

    def fresh(self, of: Path) -> Path:
        """A copy of a checkpoint folder to be disturbed."""
        copy = self.work / "case"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(of, copy)
        return copy

    def _reference(self) -> None:
        """The undisturbed run, whose states every other run is compared with."""
        folder = self.work / "case"
        steps: list[list[Any]] = [["train", STEPS], ["save", str(folder)], ["digest"]]
        out = self.run(steps)
        _succeeded(out)
        shutil.copytree(folder, self.a)
        again: list[list[Any]] = [
            ["load", str(folder)],
            ["train", STEPS],
            ["digest"],
            ["arm", str(folder), {}],
            ["save", str(folder)],
        ]
        after = self.run([*again, ["disarm"], ["train", STEPS], ["digest"]])
        _succeeded(after)
        shutil.copytree(folder, self.both)
        self.events = [after.events(rank) for rank in range(2)]
        whole = self.run([["train", STEPS], ["digest"]] * 3)
        _succeeded(whole)
        digests = whole.results("digest")
        self.states = {name: [d[i] for d in digests] for i, name in enumerate(("A", "B", "C"))}
        resumed = [
            [first[0], *rest] for first, rest in zip(out.results("digest"), after.results("digest"), strict=True)
        ]
        if resumed != digests:
            raise RuntimeError("an undisturbed run that saves and loads is not the run that does neither")

    def resume(self, folder: Path) -> tuple[str, bool]:
        """What fresh ranks make of a folder: a text, and whether they resume A or B to the bit.

        Folders that are equal to the byte, with all their names, are loaded once.
        """
        key = tree_digest(folder)
        if key not in self._known:
            self._known[key] = self._resume(folder)
        return self._known[key]

    def _resume(self, folder: Path) -> tuple[str, bool]:
        out = self.run([["load", str(folder)], ["digest"], ["train", STEPS], ["digest"]])
        digests = out.results("digest")
        for name, later in (("A", "B"), ("B", "C")):
            if digests == [[x, y] for x, y in zip(self.states[name], self.states[later], strict=True)]:
                return f"resumes {name}", True
        return f"does not resume: {describe(out)}", False


def describe(out: Outcome) -> str:
    """In a few words, why ranks did not do what they were asked for."""
    errors = out.errors()
    first = short(next(filter(None, errors), None))
    if all(errors):
        return first
    if None in out.status:
        return f"rank {out.status.index(None)} hangs" + (f", another: {first}" if first else "")
    if first:
        return f"only rank {[bool(e) for e in errors].index(True)} fails: {first}"
    if any(result and result[0] and result[0]["path"] is None for result in out.results("load")):
        return "nothing is loaded, training starts anew"
    if any(code not in (0, None) for code in out.status):
        return f"exit status {out.status}"
    return "loads other bytes than were saved, without an error"


def short(text: str | None) -> str:
    """The beginning of a message, on one line, without this machine's folders."""
    return re.sub(r"(/[\w.@+-]+)+/(?=[\w.@+-]+)", "", " ".join((text or "").split()))[:120]


def points(bench: Bench, a_file: int) -> list[tuple[str, int, int, int]]:
    """Moments of saving B: a text, rank, kind of fault, number of the event.

    Before each call and inside each write; of each rank and path at most ``a_file``, evenly, with the first and last.
    """
    found: dict[tuple[int, str], list[tuple[str, int, int, int]]] = {}
    for rank, events in enumerate(bench.events):
        for number, (what, path, size) in enumerate(events, 1):
            where = f"rank {rank}, {what} {number} ({path.lstrip('/') or 'folder'})"
            of_file = found.setdefault((rank, path), [])
            of_file.append((f"before {where}", rank, disk.KILL_BEFORE, number))
            if what == "write" and size > 1:
                of_file.append((f"inside {where}", rank, disk.KILL_INSIDE, number))
    return [point for of_file in found.values() for point in some(of_file, a_file)]


def some(items: list[Any], count: int) -> list[Any]:
    """``count`` of them, evenly, with the first and the last."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def tree_digest(folder: Path) -> str:
    """SHA-256 of all names and bytes below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\0{path.is_file()}\0".encode())
        if path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _succeeded(out: Outcome) -> None:
    if any(out.status) or None in out.status or any(out.errors()):
        raise RuntimeError(f"an undisturbed run failed: {out.status} {out.errors()}\n{out.screen(0)[-2000:]}")
