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

Each branch gives two held-out losses of its last weights: as trained, and in BF16 layers. The gap
of a variant is the mean over trunks of the difference to BF16 of the same trunk, each a mean over
repeats; it has two errors:

- ``gaps_by_trunk``: from the spread of the trunks' own gaps. Valid always; needs several seeds, but
  no repeats.
- ``gaps``: from the spread of all repeats, pooled. It is too small where repeats hardly part.
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
from queue import Empty, Queue
from typing import Any

from benchmarks.arguments import argument_parser, one_line, positive_float, positive_int
from benchmarks.common import options, result_path, write_result
from benchmarks.convergence.branch_report import by_trunk, gaps, noise, report
from benchmarks.convergence.flow import (
    BF16,
    FULL,
    NUDGE,
    TINY,
    VARIANTS,
    Job,
    earlier,
    prepare,
    pretrain,
    settings,
    tokens,
)
from benchmarks.convergence.runs import RunFailed, devices, launched, measured, torchrun

RUNS = [Job(v, s, 0) for v in (BF16, "row scales") for s in range(4)]
TINY_RUNS = [Job(BF16, 0, 0), Job(BF16, 0, 1), Job("row scales", 0, 0)]
DEFAULTS = {"steps": (2000, 12), "branch_at": (500, 5), "runs": (RUNS, TINY_RUNS)}
"""Defaults of options, without and with ``--tiny``."""


class Study:
    """Branches that wait, are done and have failed, and the trunks that they need. Threads take one
    branch after the other, and write the result after each.

    Args:
        todo: The branches of this call.
        data: Prefix of the prepared text.
        kept: Folder where trunks are and stay.
        folder: Folder of this call's runs.
        began: When this call began, by ``time.monotonic()``.

    Raises:
        ValueError: ``--extend`` names no result with the settings of this call.
    """

    def __init__(
        self,
        todo: Sequence[Job],
        data: str,
        kept: Path,
        folder: Path,
        arguments: argparse.Namespace,
        began: float,
    ) -> None:
        self.data, self.kept, self.folder = data, kept, folder
        self.arguments, self.began = arguments, began
        self.size = TINY if arguments.tiny else replace(FULL, evaluation=120)  # nearly all held out
        self.text = tokens(data, self.size, arguments.steps)
        self.extended: dict[str, Any] = {"runs": []}
        if arguments.extend:
            self.extended = earlier(Path(arguments.extend), vars(arguments), self.text)
        self.runs: list[dict[str, Any]] = list(self.extended["runs"])
        self.failed: list[dict[str, Any]] = []
        there = {(run["variant"], run["seed"], run["repeat"]) for run in self.runs}
        self._queue: Queue[Job] = Queue()
        # Repeat by repeat, so that every seed soon has something to compare.
        for job in sorted(dict.fromkeys(todo), key=lambda job: job.repeat):
            if job not in there:
                self._queue.put(job)
        self.asked, self.finished = self._queue.qsize(), 0
        """Runs of this call, and how many came to their last step."""
        self.name = "convergence/branches" + "-tiny" * arguments.tiny
        self._earlier = result_path(self.name, arguments.output).exists()
        self._lock = threading.Lock()
        self._trunks: dict[int, Path | RunFailed] = {}
        self._making: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._shortest: dict[str, float] = {}  # seconds of a branch of this call, by variant

    def left(self) -> float | None:
        """Seconds of ``--budget`` that are left; None without one."""
        if self.arguments.budget is None:
            return None
        return max(0.0, self.arguments.budget - (time.monotonic() - self.began))

    def train(self, job: Job, gpu: str) -> dict[str, Any]:
        """Make a branch on one GPU.

        Raises:
            RunFailed: it left nothing to compare.
        """
        trunk, left = self.trunk(job.seed, gpu), self.left()
        needed = self._shortest.get(job.variant, 1.0)
        if left is not None and left < needed:
            raise RunFailed(f"not started: {left:.0f} s of --budget are left, of {needed:.0f}")
        out = self.folder / job.file_name
        config, log, found = (out.with_suffix(end) for end in (".json", ".log", ".found"))
        config.write_text(json.dumps(settings(job.variant, self.size)))
        line = ["--result", str(found), "--", "--load", str(trunk)]
        line += pretrain(
            job, self.size, self.data, config, out, self.arguments, self.arguments.nudge
        )
        program = torchrun("benchmarks/convergence/branch_run.py", *line)
        result = measured(program, out, log, gpu, left)
        if not found.exists():
            raise RunFailed(f"stopped by --budget after {result['steps']} steps")
        shortest = self._shortest.get(job.variant, result["seconds"])
        self._shortest[job.variant] = min(result["seconds"], shortest)
        steps = self.arguments.branch_at + result["steps"]
        return {**job._asdict(), **result, "steps": steps, **json.loads(found.read_text())}

    def trunk(self, seed: int, gpu: str) -> Path:
        """The universal checkpoint that branches of a seed begin with; made where it is not there.

        Raises:
            RunFailed: it cannot be made; every branch of it fails.
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
        # The name has the settings, so that a kept trunk of other settings is not taken for it.
        name = f"trunk-{seed}-{a.branch_at}-of-{a.steps}-lr-{a.lr:g}-{self.text['tokens']}"
        name += "-tiny" * a.tiny
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
        convert = [sys.executable, "launch/to_universal.py"]
        convert += ["--load", str(saved), "--output", str(final)]
        status = None
        with launched(convert, log, "") as process, suppress(subprocess.TimeoutExpired):
            status = process.wait(self.left())
        shutil.rmtree(saved, ignore_errors=True)
        if status != 0:
            raise RunFailed(f"to_universal.py: exit {status}\n{log.read_text()[-3000:]}")
        print(f"trunk of seed {seed}: {made['seconds']:.0f} s", flush=True)
        return final

    def work(self, gpu: str) -> None:
        """Do runs on one GPU until none is left."""
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                return
            try:
                run = self.train(job, gpu)
            except Exception as problem:  # whatever it is, the other runs go on
                text = str(problem) if isinstance(problem, RunFailed) else repr(problem)
                with self._lock:
                    self.failed.append({**job._asdict(), "why": text.splitlines()[0]})
                    print(f"{job}: {text}", flush=True)
            else:
                with self._lock:
                    self.runs.append(run)
                    self.finished += run["steps"] == self.arguments.steps
                    print(
                        f"{job}: {run['seconds']:.0f} s, held-out loss {run['held_out_loss']}",
                        flush=True,
                    )
            with self._lock:
                self.write()

    def work_on_all(self) -> None:
        """Do all runs, ``--per-gpu`` of them at a time on every GPU, or without one on the CPU."""
        gpus = devices()
        print(f"{self.asked} runs on {len(gpus)} devices; text: {self.text}", flush=True)
        # Slot by slot, so that the first runs spread over the GPUs.
        workers = [
            threading.Thread(target=self.work, args=(gpu,))
            for _ in range(self.arguments.per_gpu)
            for gpu in gpus
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def write(self) -> None:
        """Write the result as it is now. One of an earlier call stays until there is a run to
        compare.
        """
        if self._earlier and not self.finished:
            return
        order = list(VARIANTS)
        runs = sorted(self.runs, key=lambda r: (order.index(r["variant"]), r["seed"], r["repeat"]))
        steps = self.arguments.steps
        found = {
            "settings": options(self.arguments, "runs"),
            "data": self.text,
            "gaps": gaps(runs, steps),
            "gaps_by_trunk": by_trunk(runs, steps),
            "noise": noise(runs, steps),
            "runs": runs,
            "failed": self.failed,
        }
        if self.arguments.extend:
            kept = ("environment", "settings", "note", "extended")
            found["extended"] = {k: self.extended[k] for k in kept if k in self.extended}
        write_result(self.name, found, self.arguments.output)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__, lr=6e-4, nudge=NUDGE, per_gpu=1, tiny=False, data=None, folder=None, extend=None
    )
    parser.add_argument("--runs", nargs="+", type=Job.parse, metavar="VARIANT:SEED:REPEAT")
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
        "--budget",
        type=positive_float,
        metavar="SECONDS",
        help="stop what still runs after so many",
    )
    arguments = parser.parse_args(given)
    for name, values in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, values[arguments.tiny])
    if arguments.branch_at >= arguments.steps:
        parser.error(
            f"--branch-at: got {arguments.branch_at}, accepted: 1 to --steps - 1 "
            f"({arguments.steps - 1})"
        )
    return arguments


def main() -> None:
    arguments, began = parse(), time.monotonic()
    with nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory() as to:
        kept = Path(to).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        data = arguments.data or prepare(kept, TINY if arguments.tiny else FULL)
        with tempfile.TemporaryDirectory(dir=kept) as scratch:
            with one_line():
                study = Study(arguments.runs, data, kept, Path(scratch), arguments, began)
            study.work_on_all()
    report(study.runs, study.failed, arguments.steps)
    if study.asked and not study.finished:
        sys.exit(f"error: none of {study.asked} runs was finished")


if __name__ == "__main__":
    main()
