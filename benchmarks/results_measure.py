"""Starts what measures the results that docs/results.md lacks; ``results_page.py --measure``."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_peers
from benchmarks.common import RESULTS, gpus
from benchmarks.guard import start
from benchmarks.results_tables import PEERS, TABLES, Table, is_current, read

__all__ = ["cases_left", "measure", "to_measure"]

SHORTEST = 30
"""Seconds below which nothing is started."""
END = 60
"""Seconds before the end at which ``whole.py`` is to start no other case: the last one goes on for half of them."""

ENDINGS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def to_measure(tables: Sequence[str], again: bool = False, peers: bool = False) -> list[tuple[str, str]]:
    """Results that are missing, of other code or, with ``peers``, lack those; and their commands."""
    found = []
    for name in tables:
        for result, commands in TABLES[name].results.items():
            have, table = read(result), TABLES[name]
            for command in commands:
                alone = peers and f"{PEERS}?" in command and have is not None and not _has_peers(have)
                if again or alone or have is None or _outdated(table, command, have):
                    found.append((result, command))
    return found


def _outdated(table: Table, command: str, have: dict[str, Any]) -> bool:
    return _goes_on(command, have) if table.goes_on else not is_current(have, table.code)


def _goes_on(command: str, have: dict[str, Any]) -> bool:
    """Whether cases of ``whole.py`` are left; asked here, since its processes take a while to find out."""
    from benchmarks.speed import whole

    return bool(whole.wanted(whole.parse(words_of(command, "anywhere")[2:]), have["cases"], lambda text: None))


def cases_left(table: Table, results: Path = RESULTS) -> list[str]:
    """Lines that name the cases of ``whole.py`` that a table asks for and its results lack, one for each model and its
    GPUs; none if there is no result at all."""
    if not table.goes_on:
        return []
    from benchmarks.speed import whole

    left: dict[str, list[str]] = {}
    for result, commands in table.results.items():
        if (have := read(result, results)) is None:
            return []
        known = {whole.key_of(one) for one in have["cases"]}
        for command in commands:
            arguments = whole.parse(words_of(command, "anywhere")[2:])
            for case in whole.cases_of(arguments):
                if whole.key_of(case) not in known:
                    memory = "" if case["gpu_memory"] is None else f", {case['gpu_memory']:g} GiB of each"
                    where = " ".join([case["model"], *case["override"], f"on {case['ranks']} x {table.on}{memory}"])
                    left.setdefault(f"{where}, ZeRO-{case['stage']}", []).append(case["variant"])
            for where, variants in left.items():
                if variants == arguments.variants:
                    left[where] = ["all variants"]
    return [f"Not measured yet, of {where}: {'; '.join(variants)}." for where, variants in left.items()]


def _has_peers(have: dict[str, Any]) -> bool:
    """Whether runs of Transformer Engine are among a result's."""
    return any(one["config"].startswith("TE") for one in have.get("runs", ()))


def table_of(result: str) -> Table:
    """The table that a result is for."""
    return next(table for table in TABLES.values() if result in table.results)


def why_not(result: str, command: str, peers: str | None, here: Sequence[str]) -> str | None:
    """Why a command cannot be started on the GPUs ``here``; None if it can."""
    on = table_of(result).on
    needed = int(found[1]) if (found := re.search(r"--(?:ranks|nproc_per_node) (\d+)", command)) else 1
    if len(here) < needed:
        return f"needs {needed} GPUs, {len(here)} here"
    if on not in here[0]:
        return f"is about {on}, not {here[0]}"
    if PEERS in command.split() and peers is None:
        return "needs --peers"
    return None


def words_of(command: str, peers: str | None) -> list[str]:
    """What follows ``python``."""
    given = "" if peers is None else f"--peers {shlex.quote(peers)}"
    return shlex.split(command.replace(f"{PEERS}?", given).replace(PEERS, given))


@contextmanager
def signals() -> Iterator[list[int]]:
    """The signals that told this process to end, in this block: what runs is ended first, then the process."""
    told: list[int] = []
    before = {sign: signal.signal(sign, lambda number, _: told.append(number)) for sign in ENDINGS}
    try:
        yield told
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def measure(arguments: argparse.Namespace) -> None:
    """Start commands, until there are none or time is over. One that fails is named, and the next is started; one that
    would not be through is left for the next call, where it may be the first and have all the time.

    Raises:
        ValueError: ``--peers`` has no Transformer Engine.
        SystemExit: a signal came; nothing runs any more.
    """
    if arguments.peers is not None:
        check_peers(arguments.peers)
    end, here, begun = time.monotonic() + arguments.seconds, gpus(), False
    with ExitStack() as stack:
        told = stack.enter_context(signals())
        peers = arguments.peers
        for result, command in to_measure(arguments.only or list(TABLES), arguments.again, peers is not None):
            if told:
                break
            if (reason := why_not(result, command, peers, here)) is not None:
                print(f"left out, {reason}: {result}", flush=True)
                continue
            if peers is not None and PEERS in command and peers == arguments.peers:  # unpacked once for all
                from benchmarks.speed.te_layer import unpack

                peers = str(unpack(peers, stack.enter_context(tempfile.TemporaryDirectory())))
            left = end - time.monotonic()
            if left < (table_of(result).seconds if begun else SHORTEST):
                print(
                    f"not started, {max(0.0, left):.0f} of {arguments.seconds:g} seconds are left: {result}", flush=True
                )
                continue
            begun, words = True, words_of(command, peers)
            if words[1].endswith(".whole"):  # it starts cases of its own
                words += ["--seconds", f"{max(float(SHORTEST), left - END):.0f}"]
                words += ["--again"] if arguments.again else []
            print(f"== {result}: {command}", flush=True)
            if (status := start(words, left, lambda: bool(told))) and not told:
                print(f"{result}: ended with {status}", flush=True)
        if told:
            print(f"stopped by {signal.Signals(told[0]).name}; the same command goes on", flush=True)
            sys.exit(128 + told[0])
