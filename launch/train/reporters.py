"""Where the records of steps go: lines, ``metrics.jsonl``, TensorBoard, Weights & Biases, a
profile. On rank 0.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import write_text
from coat_dist.ranks import on_rank_0
from launch.common.log_level import say
from launch.train.memory_report import MemoryReport
from launch.train.metrics import (
    Summary,
    format_line,
    format_summary,
    put_aside,
    read_metrics,
    truncate_metrics,
)
from launch.train.pretrain_options import PretrainOptions

__all__ = ["Files", "Lines", "Reporters", "TensorBoard", "open_reporters", "step_profiler"]


class Reporter:
    """A destination of a run's records. Each of the methods may do nothing."""

    option = "output"
    """What asked for it, for errors."""
    earlier: Sequence[Mapping[str, Any]] = ()
    """Records that the run continues from."""

    def step(self, record: Mapping[str, Any]) -> None:
        """One step; a number that is None was not finite."""

    def memory(self, report: MemoryReport) -> None:
        """What the first step was measured to hold."""

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        """The run has ended."""

    def close(self) -> None:
        """Release what is open, whatever has happened."""


class Lines(Reporter):
    """Readable lines, with the time until ``end``, where this process stops (default: the last
    step of the run).
    """

    def __init__(self, total_steps: int, end: int | None = None) -> None:
        self._total, self._end = total_steps, end or total_steps
        self._unit = "GPU" if torch.cuda.is_available() else "rank"
        self._recent: deque[float] = deque(maxlen=20)

    def step(self, record: Mapping[str, Any]) -> None:
        self._recent.append(record.get("step_time", 0.0))
        eta = (self._end - record["step"]) * sum(self._recent) / len(self._recent)
        say(format_line(record, self._total, eta, self._unit))

    def memory(self, report: MemoryReport) -> None:
        say(report.table())

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        say(format_summary(summary, self._unit))


class Files(Reporter):
    """``metrics.jsonl``, ``memory.json`` and ``summary.json`` in the folder of a run.

    A run that ``continues`` drops records beyond ``start_step``, which are repeated. Files of
    another run are renamed.
    """

    def __init__(self, folder: Path, start_step: int, continues: bool) -> None:
        self._folder, path = folder, folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        if continues:
            truncate_metrics(path, start_step)
            folder.joinpath("summary.json").unlink(missing_ok=True)  # of a run that goes on
        else:
            put_aside(path)
            put_aside(folder / "summary.json")
        self.earlier = read_metrics(path) if path.exists() else []
        self._file = path.open("a", encoding="utf-8")

    def step(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def memory(self, report: MemoryReport) -> None:
        write_text(self._folder / "memory.json", json.dumps(report.to_dict(), indent=1) + "\n")

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        write_text(self._folder / "summary.json", json.dumps(summary, indent=1) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard(Reporter):
    """TensorBoard events; ``start_step`` hides what an interrupted run wrote beyond the
    checkpoint.
    """

    option = "tensorboard"

    def __init__(self, folder: str, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(folder, purge_step=start_step + 1)

    def step(self, record: Mapping[str, Any]) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self._board.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases(Reporter):
    """A run at Weights & Biases. A run that ``continues`` is the one whose id is in ``wandb.json``
    of ``--output``.

    Raises:
        CoatConfigError: W&B refuses, most often because nobody is logged in; or its package cannot
            be imported.
    """

    def __init__(self, a: PretrainOptions, continues: bool, identity: Mapping[str, Any]) -> None:
        config = {**identity, "arguments": {k: v for k, v in vars(a).items() if k != "local_rank"}}
        given = {
            "name": a.wandb_name,
            "entity": a.wandb_entity,
            "mode": a.wandb_mode,
            "dir": a.output,
        }
        kept = None if a.output is None else Path(a.output, "wandb.json")
        if continues and kept is not None and kept.exists():
            given |= {"id": json.loads(kept.read_text(encoding="utf-8"))["id"], "resume": "allow"}
        try:
            import wandb

            self._run = wandb.init(
                project=a.wandb, config=config, **{k: v for k, v in given.items() if v is not None}
            )
        except Exception as problem:  # its own classes, which other ranks cannot unpickle
            reason = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
            raise CoatConfigError(
                f"--wandb: got {a.wandb}, accepted: a project that W&B starts ({reason})"
            ) from problem
        self._finished = False
        if kept is not None:
            write_text(kept, json.dumps({"id": str(self._run.id), "project": a.wandb}) + "\n")

    def step(self, record: Mapping[str, Any]) -> None:
        """Of steps that are repeated after a restart W&B keeps the first."""
        numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        self._run.log(numbers, step=record["step"])

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        for key, value in summary.items():
            if value is not None:
                self._run.summary[key] = value
        self._run.finish(exit_code=int(failed))
        self._finished = True

    def close(self) -> None:
        if not self._finished:
            self._run.finish(exit_code=1)


class Reporters:
    """All reporters of rank 0; other ranks have none.

    Raises:
        CoatConfigError: from all methods but ``close``, a file that cannot be written.
    """

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters
        self._summary, self._began = Summary(), time.monotonic()
        for record in (record for reporter in reporters for record in reporter.earlier):
            self._summary.add(record)

    def step(self, record: Mapping[str, Any]) -> None:
        """Report one step. Numbers that are not finite are None from here on: NaN is not JSON."""
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        self._summary.add(clean)
        self._each(lambda reporter: reporter.step(clean))

    def memory(self, report: MemoryReport) -> None:
        """Report what a step holds."""
        self._each(lambda reporter: reporter.memory(report))

    def finish(self, ended: str, step: int, checkpoint: Any, failed: bool = False) -> None:
        """Report the summary of the run: how it ended, the last step and the last checkpoint, if
        there is one.
        """
        wall, ranks = time.monotonic() - self._began, dist.get_world_size()
        summary = {
            "ended": ended,
            "step": step,
            **self._summary.to_dict(wall_seconds=wall, ranks=ranks),
        }
        summary["checkpoint"] = None if checkpoint is None else str(checkpoint)
        self._each(lambda reporter: reporter.finish(summary, failed))

    def close(self) -> None:
        """Close all of them; errors of writing have been raised before."""
        for reporter in self._reporters:
            with suppress(OSError):
                reporter.close()

    def _each(self, do: Callable[[Reporter], None]) -> None:
        for reporter in self._reporters:
            with _one_line(reporter.option):
                do(reporter)


@contextmanager
def _one_line(option: str) -> Iterator[None]:
    """Turn a failed write into the error of the option that asked for it."""
    try:
        yield
    except OSError as problem:
        raise CoatConfigError(f"--{option}: cannot write ({problem})") from problem


def open_reporters(
    a: PretrainOptions, start_step: int, continues: bool, identity: Mapping[str, Any]
) -> Reporters:
    """The reporters that the options request; collective.

    Args:
        start_step: last step that was done before.
        continues: whether the files in ``--output`` are this run's.
        identity: plain values that describe the run; for W&B.

    Raises:
        CoatConfigError: on every rank; a file that cannot be written, or W&B refuses.
    """
    made: list[Reporter] = []

    def make() -> None:  # returns nothing: a result would be sent to the other ranks
        made.append(Lines(a.train_steps, a.stop_at_step))
        if a.output is not None:
            with _one_line("output"):
                made.append(Files(Path(a.output), start_step, continues))
        if a.tensorboard is not None:
            with _one_line("tensorboard"):
                made.append(TensorBoard(a.tensorboard, start_step))
        if a.wandb is not None:
            made.append(WeightsAndBiases(a, continues, identity))

    on_rank_0(make)
    return Reporters(*made)


def step_profiler(steps: tuple[int, int], start_step: int, folder: str) -> Any:
    """torch's profiler around the steps ``steps``; in its context, ``step()`` follows each step.

    It writes ``trace-steps10-12.json`` into ``folder``, for chrome://tracing or Perfetto; of a run
    that continues within these steps, from its first one.
    """
    from torch.profiler import ProfilerAction, profile

    first, last = max(steps[0], start_step + 1), steps[1]

    def action(step: int) -> ProfilerAction:
        if not first <= step <= last:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.RECORD

    path = Path(folder, f"trace-steps{first}-{last}.json")

    def write(profiled: Any) -> None:
        if profiled.step_num > first:  # else the run has ended before the first of them was done
            profiled.export_chrome_trace(str(path))

    made: Any = profile(schedule=action, on_trace_ready=write)
    made.step_num = start_step + 1  # instead of 0: the trace has "ProfilerStep#10"
    made.current_action = action(made.step_num)
    return made
