"""What the FP8 flow does to the loss, seen from one state: branches of a BF16 run, in BF16 and in
the flow's variants.

    python -m benchmarks.convergence.branches --per-gpu 2 \\
        --budget 560 [--runs bf16:0 "row scales:0" ...]
    python -m benchmarks.convergence.branches --tiny

Whole runs part by chaos while the first structure is learnt, and keep some tenths of a percent of
that: more than what is to be seen. Here a BF16 run of each seed, the trunk, goes to a checkpoint
past that phase (``--branch-at``), which `launch/to_universal.py` converts; every branch continues
it with `launch/pretrain.py`: the same weights and fp32 moments, data in the same order, the same
schedule of the learning rate. A Llama-shaped GPT of 64 M parameters reads Python source as bytes,
32 768 tokens a step, AdamW in all runs; `flow.py` has the model, the text and the variants.
VARIANT:SEED:REPEAT is a branch of the trunk of that seed. One that fails is shown with the end of
its log, and the others go on.

**What a branch leaves out**: all that a variant does before the branch point, in the first quarter
of the default run, where the learning rate is largest, weights move farthest and whole runs
differed most. Whole runs have it.

Each branch gives four held-out losses: of the last weights, and of the mean of the weights after
each of the last ``--average`` steps; each as trained and in BF16 layers. The gap of a variant is
the mean over trunks of the difference to BF16 of the same trunk, each a mean over repeats; it has
two errors:

- ``gaps_by_trunk``: from the spread of the trunks' own gaps. Valid always; needs several seeds, but
  no repeats.
- ``gaps``: from the spread of all repeats, pooled. It is too small where repeats hardly part:
  ``distance`` is how far the last weights are from those of the trunk's first BF16 branch, divided
  by how far that branch went, and that of BF16's repeats should be about that of the variants.
  ``--nudge`` is by how much the learning rate of repeat r is larger, times r.

With ``--budget`` no branch begins that would not end. Writes `convergence/branches.json` (with
``--tiny`` `convergence/branches-tiny.json`) after every branch; an earlier result stays until one
has come to its end. ``--extend`` begins with the branches of such a file. A trunk is known by a
digest of its weights, and compared are branches of one trunk only. So give a later call other
seeds, or ``--folder DIR``, where text and trunks stay for calls on the same machine (0.8 GB for a
trunk of 64 M parameters).

What a call costs, from times of earlier runs (H200, three runs to a GPU): 55 ms of a GPU for a step
in BF16, 43 ms in the flow. So 30 s for a trunk of 500 steps, and 85 s or 65 s for a branch of 1500.
Processes need 10 to 20 s more to start, which overlap where two share a GPU. Two GPUs with two runs
each: eight branches and their four trunks, the default, in some eight minutes; later calls with
``--folder`` eight to twelve branches in ten.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import one_line, positive_float, positive_int
from benchmarks.common import argument_parser
from benchmarks.convergence import runs
from benchmarks.convergence.branch_report import KEYS, PAIR, by_trunk, gaps, noise, report
from benchmarks.convergence.flow import (
    BF16,
    FULL,
    NEEDED,
    NUDGE,
    SAME,
    TINY,
    VARIANTS,
    Job,
    earlier,
    prepare,
    pretrain,
    settings,
)
from benchmarks.convergence.runs import RunFailed, launched, measured, torchrun

RUNS = [Job(v, s, 0) for v in (BF16, "row scales") for s in range(4)]
TINY_RUNS = [Job(BF16, 0, 0), Job(BF16, 0, 1), Job("row scales", 0, 0)]
DEFAULTS = {
    "steps": (2000, 12),
    "branch_at": (500, 5),
    "average": (200, 4),
    "runs": (RUNS, TINY_RUNS),
}
"""Of options, without and with ``--tiny``."""


class Study(runs.Study):
    """Branches, and the trunks that they need."""

    name = "convergence/branches"
    variants = VARIANTS
    sizes = (replace(FULL, evaluation=120), TINY)  # nearly all of the held-out text

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept = self.folder
        """Where trunks are and stay."""
        self._trunks: dict[int, Path | RunFailed] = {}
        self._making: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        # of the branches of this call, see _fill_in_distances
        self._movements: dict[tuple[Any, ...], torch.Tensor] = {}
        self._shortest: dict[str, float] = {}  # seconds of a branch of this call, by variant

    def train(self, job: Job, gpu: str) -> dict[str, Any]:
        trunk, left, needed = (
            self.trunk(job.seed, gpu),
            self.left(),
            self._shortest.get(job.variant),
        )
        if left is not None and left < (needed or 1.0):
            raise RunFailed(
                f"not started: {left:.0f} s of --budget are left"
                + f", of {needed:.0f}" * bool(needed)
            )
        config, out, log, found = (
            self.folder / f"{job.file_name}{end}" for end in (".json", "", ".log", ".pt")
        )
        config.write_text(json.dumps(settings(job.variant, self.size)))
        line = [
            "--average",
            str(self.arguments.average),
            "--result",
            str(found),
            "--",
            "--load",
            str(trunk),
        ]
        line += pretrain(
            job, self.size, self.data, config, out, self.arguments, self.arguments.nudge
        )
        result = measured(
            torchrun("benchmarks/convergence/branch_run.py", *line), out, log, gpu, left
        )
        if not found.exists():
            raise RunFailed(f"stopped by --budget after {result['steps']} steps")
        self._shortest[job.variant] = min(result["seconds"], needed or result["seconds"])
        after = torch.load(found)
        result = {**job._asdict(), **result, "steps": self.arguments.branch_at + result["steps"]}
        with self._lock:
            self._movements[after["trunk"], *job] = after.pop("movement")
        theirs = {r[PAIR] for r in (self.extended or {"runs": ()})["runs"] if r["seed"] == job.seed}
        if theirs and after[PAIR] not in theirs:
            print(
                f"{job}: this trunk has other bits than that of --extend, so they are not compared",
                flush=True,
            )
        return {**result, **after, "distance": None}

    def trunk(self, seed: int, gpu: str) -> Path:
        """The universal checkpoint that branches of a seed begin with; made where it is not there.

        Raises:
            RunFailed: it cannot be made; said again to every branch.
        """
        with self._making[seed]:
            if seed not in self._trunks:
                try:
                    self._trunks[seed] = self._make_trunk(seed, gpu)
                except RunFailed as problem:
                    self._trunks[seed] = RunFailed(f"trunk: {problem}")
            found = self._trunks[seed]
        if isinstance(found, RunFailed):
            raise found
        return found

    def _make_trunk(self, seed: int, gpu: str) -> Path:
        a = self.arguments
        # What it was made with is in its name, so that a kept one of other settings is not taken
        # for it.
        name = (
            f"trunk-{seed}-{a.branch_at}-of-{a.steps}-lr-{a.lr:g}-{self.text['tokens']}"
            + "-tiny" * a.tiny
        )
        final, out, saved, config, log = (
            self.kept / f"{name}{end}" for end in ("", "-run", "-saved", "-config.json", "-log.txt")
        )
        if (final / "latest").exists():
            return final
        for unfinished in (final, out, saved):
            shutil.rmtree(unfinished, ignore_errors=True)
        config.write_text(json.dumps(settings(BF16, self.size)))
        line = pretrain(Job(BF16, seed, 0), self.size, self.data, config, out, a)
        line += ["--stop-at-step", str(a.branch_at), "--save", str(saved)]
        made = measured(torchrun("launch/pretrain.py", *line), out, log, gpu, self.left())
        if made["steps"] < a.branch_at:
            raise RunFailed(f"stopped by --budget after {made['steps']} steps")
        convert = [
            sys.executable,
            "launch/to_universal.py",
            "--load",
            str(saved),
            "--output",
            str(final),
        ]
        start, status = time.monotonic(), None
        with launched(convert, log, "") as process, suppress(subprocess.TimeoutExpired):
            status = process.wait(self.left())
        shutil.rmtree(saved, ignore_errors=True)
        if status != 0:
            raise RunFailed(f"to_universal.py: exit {status}\n{log.read_text()[-3000:]}")
        print(
            f"trunk of seed {seed}: {made['seconds']:.0f} s, converted in "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
        return final

    def _fill_in_distances(self, runs: list[dict[str, Any]]) -> None:
        """Of this call's branches to the first BF16 branch of their trunk, once that is there."""
        for run in runs:
            trunk = run[PAIR]
            mine = self._movements.get((trunk, run["variant"], run["seed"], run["repeat"]))
            bases = sorted(key for key in self._movements if key[:2] == (trunk, BF16))
            if mine is not None and bases:
                base = self._movements[bases[0]]
                run["distance"] = ((mine - base).norm() / base.norm()).item()

    def compared(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        steps = self.arguments.steps
        self._fill_in_distances(runs)
        compared = gaps(runs, steps)
        return {
            "gaps": compared,
            "gaps_by_trunk": by_trunk(runs, steps),
            "noise": noise(runs, steps),
        }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", nargs="+", type=Job.parse, metavar="VARIANT:SEED:REPEAT")
    parser.add_argument(
        "--extend",
        type=Path,
        metavar="JSON",
        help="a result whose branches count with the new ones",
    )
    parser.add_argument(
        "--steps", type=positive_int, help="of trunk and branch together (default: 2000)"
    )
    parser.add_argument(
        "--branch-at",
        type=positive_int,
        metavar="STEP",
        help="the trunk's last step (default: 500)",
    )
    parser.add_argument(
        "--average",
        type=positive_int,
        metavar="STEPS",
        help="the last, whose weights are averaged (200)",
    )
    parser.add_argument("--lr", type=positive_float, default=6e-4)
    parser.add_argument(
        "--nudge", type=float, default=NUDGE, help="of the learning rate, from repeat to repeat"
    )
    parser.add_argument(
        "--per-gpu", type=positive_int, default=1, metavar="N", help="runs that share a GPU"
    )
    parser.add_argument(
        "--budget",
        type=positive_float,
        metavar="SECONDS",
        help="stop what still runs after so many",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of 0.1 M parameters, to try the program"
    )
    parser.add_argument(
        "--data", default=None, help="prefix of prepared data (default: prepared here)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where text and trunks stay for a later call (default: nowhere)"
    )
    arguments = parser.parse_args(given)
    for name, values in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, values[arguments.tiny])
    if not 0 < arguments.branch_at < arguments.steps:
        parser.error(
            f"--branch-at: got {arguments.branch_at}, accepted: 1 to --steps - 1 "
            f"({arguments.steps - 1})"
        )
    if not 0 < arguments.average <= arguments.steps - arguments.branch_at:
        most = arguments.steps - arguments.branch_at
        parser.error(
            f"--average: got {arguments.average}, accepted: 1 to the steps of a branch ({most})"
        )
    return arguments


def main() -> None:
    arguments = parse()
    start, extended, there = time.monotonic(), None, set()
    if arguments.extend:
        same, needed = (*SAME, "branch_at", "average"), (*NEEDED, *KEYS, PAIR)
        with one_line():
            extended = earlier(arguments.extend, vars(arguments), VARIANTS, same, needed)
        there = {(r["variant"], r["seed"], r["repeat"]) for r in extended["runs"]}
    # Repeat by repeat, so that every seed soon has something to compare.
    todo = sorted(
        (job for job in dict.fromkeys(arguments.runs) if job not in there),
        key=lambda job: job.repeat,
    )
    with nullcontext() if arguments.folder else tempfile.TemporaryDirectory() as temporary:
        kept = Path(temporary or arguments.folder).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        data = arguments.data or prepare(kept, TINY if arguments.tiny else FULL)
        with tempfile.TemporaryDirectory(dir=kept) as scratch:
            with one_line():
                study = Study(todo, extended, data, Path(scratch), arguments)
            study.kept = kept
            study.began = start
            print(f"data in {time.monotonic() - start:.0f} s", flush=True)
            study.work_on_all()
    report(study.runs, study.failed, arguments.steps)
    if (why := study.nothing()) is not None:
        sys.exit(why)


if __name__ == "__main__":
    main()
