"""What a run says of its steps: a printed line each, ``metrics.jsonl``, TensorBoard. Everything happens on rank 0."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import write_text
from launch.log_level import shows
from launch.training.rank_times import THRESHOLD
from launch.training.summary import Summary
from launch.training.wandb_log import WandbLog

__all__ = ["MetricsLog", "format_line", "peak_memory_bytes", "put_aside", "read_metrics", "truncate_metrics"]


def peak_memory_bytes() -> int:
    """Peak bytes of this rank: tensors on the GPU since the step began, or the process's memory without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a ``metrics.jsonl`` (or of the folder that holds one), in order. A last line cut by a kill is left
    out.

    Raises:
        CoatConfigError: a line that is not a JSON object, named by its number.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line else None
        except json.JSONDecodeError:
            if number == len(lines):  # no newline behind it: the writer was killed
                break
            raise CoatConfigError(
                f"{path}:{number}: not JSON, accepted: one object a line (mend or remove the line, or rename the file)"
            ) from None
        if record is None:
            continue
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise CoatConfigError(f'{path}:{number}: got {line[:60]!r}, accepted: an object with an integer "step"')
        records.append(record)
    return records


def truncate_metrics(path: Path, step: int) -> None:
    """Keep records up to ``step``: what came later is about to be repeated. The file is replaced in one go."""
    if path.exists():
        write_text(path, "".join(json.dumps(r) + "\n" for r in read_metrics(path) if r["step"] <= step))


def put_aside(path: Path) -> None:
    """Rename a file, if it is there and holds anything, to the first free of ``NAME.1``, ``NAME.2``, ..."""
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, aside)


def format_line(record: Mapping[str, Any], total_steps: int, eta_seconds: float, unit: str) -> str:
    """One readable line for one step; ``unit`` is what a rank is called ("GPU", "rank")."""

    def number(key: str, digits: str) -> str:
        value = record.get(key)
        return "non-finite" if value is None else format(value, digits)

    parts = [
        f"step {record['step']:>{len(str(total_steps))}}/{total_steps}",
        f"loss {number('loss', '.4f')}",
        f"lr {record['lr']:.3e}",
        f"grad norm {number('grad_norm', '.3f')}",
        f"{record['tokens_per_second_per_gpu']:,.0f} tokens/s/{unit}",
        f"{record['tflops_per_gpu']:.3g} TFLOP/s/{unit}",
        f"peak {record['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"ETA {duration(eta_seconds)}",
    ]
    if record.get("slowest_rank_time_ratio", 1.0) >= THRESHOLD:
        parts.append(f"slowest rank {record['slowest_rank']}: {record['slowest_rank_time_ratio']:.2f} x")
    parts += [f"{name} loss {number(f'{name}_loss', '.4f')}" for name in ("valid", "test") if f"{name}_loss" in record]
    if record.get("skipped"):
        parts.append(f"SKIPPED: {record['skipped']}")
    return " | ".join(parts)


def format_summary(summary: Mapping[str, Any], unit: str) -> str:
    """The line of a run that has ended; ``unit`` as for :func:`format_line`."""
    parts = [
        f"summary: step {summary['step']}",
        f"{summary['tokens']:,} tokens in {duration(summary['seconds'])}",
        f"peak {summary['peak_memory_bytes'] / 2**30:.2f} GiB",
    ]
    if summary["tokens_per_second"] is not None:
        each = summary["tokens_per_second_per_gpu"]
        parts.insert(2, f"{summary['tokens_per_second']:,.0f} tokens/s ({each:,.0f} a {unit})")
    if summary["best_valid_loss"] is not None:
        parts.append(f"best valid loss {summary['best_valid_loss']:.4f} at step {summary['best_valid_step']}")
    if summary["test_loss"] is not None:
        parts.append(f"test loss {summary['test_loss']:.4f}")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, 2:03 or 0:03, days in front where there are any."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {clock}" if days else clock


@contextmanager
def _written(option: str, path: Path) -> Iterator[None]:
    """One line that names option and file for an error of writing to it."""
    try:
        yield
    except OSError as problem:
        raise CoatConfigError(f"--{option}: cannot write {path} ({problem.strerror or problem})") from problem


class MetricsLog:
    """Writes one record a step; does nothing on other ranks than 0.

    Args:
        folder: ``metrics.jsonl`` goes here; None = no file.
        tensorboard: folder of TensorBoard events; None = none.
        start_step: records beyond this step are dropped from an existing file (they are about to be repeated).
        total_steps: last step of the run.
        stop_at_step: where this process stops, if that is before; for the ETA.
        active: whether this rank writes: rank 0.
        continues: whether an existing file is this run's; another's is renamed.
        wandb: also gets every record.

    Raises:
        CoatConfigError: from here and from all methods, a file that cannot be written.
    """

    def __init__(
        self,
        folder: str | None,
        tensorboard: str | None,
        *,
        start_step: int,
        total_steps: int,
        stop_at_step: int | None = None,
        active: bool,
        continues: bool = True,
        wandb: WandbLog | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._active, self._total, self._stream = active, total_steps, stream or sys.stdout
        self._end = total_steps if stop_at_step is None else stop_at_step
        self._folder = Path(folder) if folder is not None and active else None
        self._unit = "GPU" if torch.cuda.is_available() else "rank"
        self._recent: deque[float] = deque(maxlen=20)
        self._file: TextIO | None = None
        self._board: Any = None
        self._wandb = wandb
        self._summary, self._began = Summary(), time.monotonic()
        if not active:
            return
        if self._folder is not None:
            path = self._folder / "metrics.jsonl"
            with _written("output", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if continues:
                    truncate_metrics(path, start_step)
                    self._summary = Summary(read_metrics(path) if path.exists() else ())
                    self._folder.joinpath("summary.json").unlink(missing_ok=True)  # of a run that goes on
                else:
                    put_aside(path)
                    put_aside(self._folder / "summary.json")
                self._file = path.open("a", encoding="utf-8")
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            with _written("tensorboard", Path(tensorboard)):
                # purge_step hides what an interrupted run wrote beyond the checkpoint.
                self._board = SummaryWriter(tensorboard, purge_step=start_step + 1)

    def step(self, record: Mapping[str, Any]) -> None:
        """Print and write one step. Numbers that are not finite are written as null: NaN is not JSON."""
        if not self._active:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._recent.append(record["step_time"])
        eta = (self._end - record["step"]) * sum(self._recent) / len(self._recent)
        self._summary.add(clean)
        self.note(format_line(clean, self._total, eta, self._unit))
        if self._file is not None:
            with _written("output", Path(self._file.name)):
                self._file.write(json.dumps(clean) + "\n")
                self._file.flush()
        if self._board is not None:
            with _written("tensorboard", Path(self._board.log_dir)):
                for key, value in clean.items():
                    if key != "step" and isinstance(value, int | float):
                        self._board.add_scalar(key, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(clean)

    def finish(self, ended: str, step: int, checkpoint: Any, failed: bool = False) -> None:
        """Say what the run was, and write ``summary.json``.

        Args:
            ended: how, in words.
            step: the last one.
            checkpoint: the last one, or None.
            failed: what W&B is told.
        """
        if not self._active:
            return
        wall, ranks = time.monotonic() - self._began, dist.get_world_size()
        summary = {"ended": ended, "step": step, **self._summary.to_dict(wall_seconds=wall, ranks=ranks)}
        summary["checkpoint"] = None if checkpoint is None else str(checkpoint)
        self.note(format_summary(summary, self._unit))
        self.write_json("summary.json", summary)
        if self._wandb is not None:
            self._wandb.finish(summary, failed)
            self._wandb = None

    def note(self, text: str) -> None:
        """Print something that is not a step's line."""
        if self._active and shows("info"):
            print(text, file=self._stream, flush=True)

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write ``data`` as a file of its own beside ``metrics.jsonl``."""
        if self._folder is not None:
            with _written("output", self._folder / name):
                write_text(self._folder / name, json.dumps(data, indent=1) + "\n")

    def close(self) -> None:
        for sink in (self._file, self._board):
            if sink is not None:
                with suppress(OSError):  # what could not be written before has been raised
                    sink.close()
        if self._wandb is not None:
            self._wandb.finish({}, failed=True)
        self._file = self._board = self._wandb = None
