"""Where rank 0 sends the records of steps: lines on stdout, files in ``--output``, TensorBoard.

TensorBoard's events are torch's own (``torch.utils.tensorboard``). Other services read those
(``wandb sync --sync-tensorboard DIR``), or DeepSpeed's monitor writes to them: blocks ``wandb``,
``comet`` and ``csv_monitor`` of the DeepSpeed file.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

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


@dataclass(kw_only=True)
class Reporters:
    """The reports of a run. Ranks other than 0 have neither files nor a board, and print nothing.

    Raises:
        CoatConfigError: from all methods but ``close``, a file that cannot be written.
    """

    total_steps: int
    end: int | None = None
    """Step at which this process stops, for the time that is left (default: the last one)."""
    folder: Path | None = None
    """``--output``: gets ``metrics.jsonl``, ``memory.json`` and ``summary.json``."""
    file: TextIO | None = None
    """``metrics.jsonl``, open."""
    board: Any = None
    """A ``SummaryWriter``."""
    summary: Summary = field(default_factory=Summary)
    _began: float = field(default_factory=time.monotonic)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    """Seconds of the last steps."""

    def __post_init__(self) -> None:
        self._unit = "GPU" if torch.cuda.is_available() else "rank"

    def step(self, record: Mapping[str, Any]) -> None:
        """Report one step. Numbers that are not finite become None: NaN is not JSON."""
        clean = dict(record)
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                clean[key] = None
        self.summary.add(clean)
        self._recent.append(clean.get("step_time", 0.0))
        left = (self.end or self.total_steps) - clean["step"]
        eta = left * sum(self._recent) / len(self._recent)
        say(format_line(clean, self.total_steps, eta, self._unit))
        if self.file is not None:
            with _one_line("output"):
                self.file.write(json.dumps(clean) + "\n")
                self.file.flush()
        if self.board is not None:
            with _one_line("tensorboard"):
                for key, value in clean.items():
                    if key != "step" and isinstance(value, int | float):
                        self.board.add_scalar(key, value, clean["step"])

    def memory(self, report: MemoryReport) -> None:
        """Report what the first step was measured to hold."""
        say(report.table())
        self._write("memory.json", report.to_dict())

    def finish(self, ended: str, step: int, checkpoint: Any) -> None:
        """Report the summary of the run: how it ended, the last step and the last checkpoint, if
        there is one.
        """
        wall, ranks = time.monotonic() - self._began, dist.get_world_size()
        numbers = self.summary.to_dict(wall_seconds=wall, ranks=ranks)
        last = None if checkpoint is None else str(checkpoint)
        summary = {"ended": ended, "step": step, **numbers, "checkpoint": last}
        say(format_summary(summary, self._unit))
        self._write("summary.json", summary)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        if self.folder is not None:
            with _one_line("output"):
                write_text(self.folder / name, json.dumps(content, indent=1) + "\n")

    def close(self) -> None:
        """Close what is open; errors of writing have been raised before."""
        for one in (self.file, self.board):
            if one is not None:
                with suppress(OSError):
                    one.close()


@contextmanager
def _one_line(option: str) -> Iterator[None]:
    """Turn a failed write into the error of the option that asked for it."""
    try:
        yield
    except OSError as problem:
        raise CoatConfigError(f"--{option}: cannot write ({problem})") from problem


def open_reporters(a: PretrainOptions, start_step: int, continues: bool) -> Reporters:
    """The reporters that the options request; collective.

    A run that continues drops records beyond ``start_step`` from ``metrics.jsonl``, because it
    repeats these steps; TensorBoard hides them. Files of another run are renamed.

    Args:
        start_step: last step that was done before.
        continues: whether the files in ``--output`` are this run's.

    Raises:
        CoatConfigError: on every rank; a file that cannot be written.
    """
    reporters = Reporters(total_steps=a.train_steps, end=a.stop_at_step)

    def make() -> None:  # returns nothing: a result would be sent to the other ranks
        if a.output is not None:
            with _one_line("output"):
                _open_files(reporters, Path(a.output), start_step, continues)
        if a.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            with _one_line("tensorboard"):
                reporters.board = SummaryWriter(a.tensorboard, purge_step=start_step + 1)

    on_rank_0(make)
    return reporters


def _open_files(reporters: Reporters, folder: Path, start_step: int, continues: bool) -> None:
    path, summary = folder / "metrics.jsonl", folder / "summary.json"
    folder.mkdir(parents=True, exist_ok=True)
    if continues:
        truncate_metrics(path, start_step)
        summary.unlink(missing_ok=True)  # of a run that goes on
    else:
        put_aside(path)
        put_aside(summary)
    for record in read_metrics(path) if path.exists() else []:
        reporters.summary.add(record)
    reporters.folder, reporters.file = folder, path.open("a", encoding="utf-8")


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
