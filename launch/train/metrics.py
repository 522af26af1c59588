"""Records of a run's steps: ``metrics.jsonl``, a line for each, and the summary of them all."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import write_text


def peak_memory_bytes() -> int:
    """Peak bytes of this rank: tensors on the GPU since the step began, or the process's memory
    without a GPU.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a ``metrics.jsonl`` (or of the folder that holds one), in order. A last line cut
    by a kill is left out.

    Raises:
        CoatConfigError: a line that is no record, named by its number.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            record["step"] + 0
        except (ValueError, TypeError, KeyError):
            if number == len(lines):  # no newline behind it: the writer was killed
                break
            accepted = (
                'one JSON object a line, with an integer "step" (remove the line, or rename '
                "the file)"
            )
            raise CoatConfigError(
                f"{path}:{number}: got {line[:60]!r}, accepted: {accepted}"
            ) from None
        records.append(record)
    return records


def truncate_metrics(path: Path, step: int) -> None:
    """Keep records up to ``step``: what came later is about to be repeated. The file is replaced
    in one go.
    """
    if path.exists():
        write_text(
            path, "".join(json.dumps(r) + "\n" for r in read_metrics(path) if r["step"] <= step)
        )


def put_aside(path: Path) -> None:
    """Rename a file, if it is there and holds anything, to the first free of ``NAME.1``,
    ``NAME.2``, ...
    """
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, aside)


def format_line(record: Mapping[str, Any], total_steps: int, eta_seconds: float, unit: str) -> str:
    """The line of one step; ``unit`` is what a rank is called ("GPU", "rank")."""

    def number(key: str, digits: str) -> str:
        return "non-finite" if record.get(key) is None else format(record[key], digits)

    held_out = [
        f"{name} loss {number(f'{name}_loss', '.4f')}"
        for name in ("valid", "test")
        if f"{name}_loss" in record
    ]
    step = f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"
    if "loss" not in record:  # --eval-only
        return " | ".join([step, *held_out])
    parts = [
        step,
        f"loss {number('loss', '.4f')}",
        f"lr {record['lr']:.3e}",
        f"grad norm {number('grad_norm', '.3f')}",
        f"{record['tokens_per_second_per_gpu']:,.0f} tokens/s/{unit}",
        f"{record['tflops_per_gpu']:.3g} TFLOP/s/{unit}",
        f"peak {record['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"ETA {_duration(eta_seconds)}",
        *held_out,
    ]
    return " | ".join(
        [*parts, *([f"SKIPPED: {record['skipped']}"] if record.get("skipped") else [])]
    )


def format_summary(summary: Mapping[str, Any], unit: str) -> str:
    """The line of a run that has ended; ``unit`` as for :func:`format_line`."""
    parts = [f"summary: step {summary['step']}"]
    if summary["tokens_per_second"] is not None:
        each = summary["tokens_per_second_per_gpu"]
        parts += [
            f"{summary['tokens']:,} tokens in {_duration(summary['seconds'])}",
            f"{summary['tokens_per_second']:,.0f} tokens/s ({each:,.0f} a {unit})",
            f"peak {summary['peak_memory_bytes'] / 2**30:.2f} GiB",
        ]
    if summary["best_valid_loss"] is not None:
        parts.append(
            f"best valid loss {summary['best_valid_loss']:.4f} at step {summary['best_valid_step']}"
        )
    if summary["test_loss"] is not None:
        parts.append(f"test loss {summary['test_loss']:.4f}")
    return " | ".join(parts)


def _duration(seconds: float) -> str:
    """Seconds as 0:02:03."""
    return str(timedelta(seconds=round(seconds)))


@dataclass
class Summary:
    """A few numbers of a run, from the records of its steps."""

    recorded_steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    loss: float | None = None
    best_valid_loss: float | None = None
    best_valid_step: int | None = None
    test_loss: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one step; a number that is None was not finite."""
        seconds, valid = record.get("step_time") or 0.0, record.get("valid_loss")
        self.recorded_steps += 1
        self.seconds += seconds
        self.tokens += seconds * (record.get("tokens_per_second") or 0.0)
        peak = record.get("peak_memory_bytes") or 0
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak)
        self.loss = record.get("loss")
        self.test_loss = record.get("test_loss", self.test_loss)
        best = self.best_valid_loss
        if valid is not None and (best is None or valid < best):
            self.best_valid_loss, self.best_valid_step = valid, record["step"]

    def to_dict(self, *, wall_seconds: float, ranks: int) -> dict[str, Any]:
        """The numbers. ``wall_seconds``: of this start, evaluation and saving included."""
        speed = self.tokens / self.seconds if self.seconds else None
        return asdict(self) | {
            "tokens": round(self.tokens),
            "wall_seconds": wall_seconds,
            "tokens_per_second": speed,
            "tokens_per_second_per_gpu": None if speed is None else speed / ranks,
        }
