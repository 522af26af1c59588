"""The training loop: steps, evaluation, what to do with non-finite numbers and with signals."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from coat_dist.deepspeed.step import norm_known
from coat_dist.flow.graph_pool import pool_bytes
from launch.training.memory import MemoryReport
from launch.training.metrics import MetricsLog, peak_memory_bytes
from launch.training.pipeline import PipelineSteps, nan_if_not_finite
from launch.training.profile import StepProfiler
from launch.training.rank_times import RankTimes
from launch.training.runtime import StopSignal, mean_and_each, mean_over_ranks
from launch.training.schedule import Schedule

__all__ = ["BadSteps", "Loop", "Progress"]

Batch = dict[str, torch.Tensor]


class BadSteps(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient norm."""


@dataclass
class Progress:
    """Where a run is; saved with every checkpoint."""

    step: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    loss: float | None = None
    """Of the last step, None if not finite: tells whose ``metrics.jsonl`` it is."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(kw_only=True)
class Loop:
    """Everything :meth:`run` needs; plain callables where a test wants to interfere.

    ``loss(engine, batch)`` is the mean loss of a micro-batch, fp32 scalar. ``valid`` and ``test`` make a new iterator
    over their split each time they are called. ``save()`` writes a checkpoint and returns its path.
    """

    engine: Any
    loss: Callable[[Any, Batch], torch.Tensor]
    train: Iterator[Batch]
    schedule: Schedule
    log: MetricsLog
    progress: Progress
    total_steps: int
    accumulation: int
    samples_per_step: int
    samples: int | None = None
    """Of the whole run, where they end: the last step may have fewer than the others."""
    tokens: Callable[[int, int], int]
    """Of the samples from one up to another, of all ranks; padding is none."""
    flops_per_token: float
    device: torch.device
    stop_at_step: int | None = None
    valid: Callable[[], Iterator[Batch]] | None = None
    test: Callable[[], Iterator[Batch]] | None = None
    eval_interval: int = 0
    """Steps between evaluations on ``valid``; the last step is followed by one wherever they fall."""
    eval_steps: int = 1
    save: Callable[[], Any] | None = None
    save_interval: int = 0
    max_bad_steps: int = 5
    stop: StopSignal | None = None
    memory: MemoryReport | None = None
    """Measures the first step that changes the weights; its table is printed once."""
    times: RankTimes
    last_checkpoint: Any = None
    more: Callable[[], Mapping[str, torch.Tensor]] | None = None
    """Further numbers of a step that is done, by name, of this rank; their means over all ranks are recorded."""
    profiler: StepProfiler | None = None
    pipeline: PipelineSteps | None = None
    """Runs micro-batches where the model is divided over stages; ``loss`` is not used then."""
    doing: str = "before the first step"
    """What is going on, for messages."""
    _numbers: Any = field(default=None, init=False)
    """The stream of :meth:`_beside_the_optimizer`."""

    def run(self) -> str | None:
        """Train to the last step and evaluate on the valid and test splits.

        Returns:
            None when all steps are done, else why it ended before ("SIGTERM", "--stop-at-step", ...).

        Raises:
            BadSteps: after ``max_bad_steps`` in a row; nothing was saved since ``last_checkpoint``.
        """
        saved_step = self.progress.step if self.last_checkpoint else -1
        why: str | None = None
        if self.stop_at_step is not None and self.progress.step >= self.stop_at_step < self.total_steps:
            why = "--stop-at-step"  # reached before: the same command was started again
        while self.progress.step < self.total_steps and why is None:
            with self.profiler.around(self.progress.step + 1) if self.profiler else contextlib.nullcontext():
                record = self._step()
            step = self.progress.step
            at_end = step == self.total_steps
            if self.valid is not None and (at_end or (self.eval_interval and step % self.eval_interval == 0)):
                record["valid_loss"] = self.evaluate(self.valid())
            if self.test is not None and at_end:
                record["test_loss"] = self.evaluate(self.test())
            stopping = record.pop("stopping")
            self.log.step(record)
            self._check_bad(record)
            if stopping and step < self.total_steps:
                why = (self.stop.name if self.stop else None) or "a signal on another rank"
            elif step == self.stop_at_step and step < self.total_steps:
                why = "--stop-at-step"
            if self.save is not None and (
                why or step == self.total_steps or (self.save_interval and step % self.save_interval == 0)
            ):
                self.last_checkpoint, saved_step = self._saved(self.save), step
        if self.profiler is not None:
            self.profiler.close()
        if self.save is not None and saved_step != self.progress.step:
            self.last_checkpoint = self._saved(self.save)
        return why

    def _saved(self, save: Callable[[], Any]) -> Any:
        self.doing = f"while the checkpoint of step {self.progress.step} was written"
        return save()

    def _step(self) -> dict[str, Any]:
        """One optimizer step; advances ``progress`` and returns the record, with ``stopping`` added."""
        progress = self.progress
        self.doing = f"in step {progress.step + 1}"
        lr = self.schedule(progress.step + 1)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        graphs = pool_bytes(self.device)  # before the step: in the one that makes them, torch counts what they take
        began = time.perf_counter()
        if self.pipeline is None:
            losses, count = self._micro_batches(), self.accumulation
        else:
            losses, count = self.pipeline.step(self.train, self.memory), 1
        applied = bool(self.engine.was_step_applied())
        requested = 1.0 if self.stop is not None and self.stop.requested() else 0.0
        with self._beside_the_optimizer():
            norm = float(self.engine.get_global_grad_norm())
            more = self.more() if self.more is not None else {}
            (mean_loss, stopping, *means), seconds = mean_and_each(
                [losses / count, requested, *more.values()], self.times.seconds(), self.device
            )
        took = time.perf_counter() - began

        progress.step += 1
        began_at = progress.consumed_samples
        consumed = began_at + self.samples_per_step
        progress.consumed_samples = consumed if self.samples is None else min(consumed, self.samples)
        progress.loss = mean_loss if math.isfinite(mean_loss) else None
        speed = self.tokens(began_at, began_at + self.samples_per_step) / took
        record: dict[str, Any] = {
            "step": progress.step,
            "loss": mean_loss,
            "lr": lr,
            "grad_norm": norm,
            **dict(zip(more, means, strict=True)),
            "tokens_per_second": speed,
            "tokens_per_second_per_gpu": speed / dist.get_world_size(),
            "tflops_per_gpu": speed * self.flops_per_token / dist.get_world_size() / 1e12,
            "step_time": took,
            "peak_memory_bytes": peak_memory_bytes() + graphs,
            "consumed_samples": progress.consumed_samples,
            **self.times.judge(seconds, progress.step, took),
            "stopping": stopping > 0,
        }
        if self.memory is not None and applied:
            self.memory.step_done()
            self.log.note(self.memory.table())
            self.log.write_json("memory.json", self.memory.to_dict())
            self.memory = None
        if not applied:
            progress.skipped_steps += 1
            record["skipped"] = "non-finite loss" if not math.isfinite(mean_loss) else "non-finite gradient norm"
        progress.bad_in_a_row = 0 if applied else progress.bad_in_a_row + 1
        return record

    def _micro_batches(self) -> torch.Tensor:
        """Forward and backward of a step's micro-batches, and the engine's step. The sum of their losses, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(self.accumulation):
            self.times.begin()
            batch = next(self.train)
            self.times.batch_is_there()
            watched = self.memory if index == 0 else None
            with contextlib.nullcontext() if watched is None else watched.forward(batch["tokens"].numel()):
                loss = self.loss(self.engine, batch)
            self.times.forward_done()
            total += loss.detach()
            self.engine.backward(nan_if_not_finite(loss))
            if self.memory is not None and index == self.accumulation - 1:
                self.memory.backward_done()
            self.engine.step()
        return total

    @contextlib.contextmanager
    def _beside_the_optimizer(self) -> Iterator[None]:
        """Where a step's numbers are read while a GPU still writes weights, so that the next step follows without a
        pause: on a stream of their own, which waits for what was computed before the optimizer began."""
        known = norm_known(self.engine)
        if known is None:
            yield
            return
        if self._numbers is None:
            self._numbers = torch.cuda.Stream()
        self._numbers.wait_event(known)
        with torch.cuda.stream(self._numbers):
            yield

    def _check_bad(self, record: dict[str, Any]) -> None:
        if self.progress.bad_in_a_row >= self.max_bad_steps:
            raise BadSteps(
                f"{self.progress.bad_in_a_row} steps in a row, up to step {self.progress.step}, had a "
                f"{record['skipped']}; "
                f"last good checkpoint: {self.last_checkpoint or 'none was saved (--save, --save-interval)'}"
            )

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch]) -> float:
        """Mean loss over ``eval_steps`` micro-batches of every rank."""
        self.doing = f"in the evaluation after step {self.progress.step}"
        self.engine.eval()
        if self.pipeline is not None:
            mean = self.pipeline.evaluate(batches, self.eval_steps)
        else:
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for _ in range(self.eval_steps):
                total += self.loss(self.engine, next(batches))
            mean = total / self.eval_steps
        self.engine.train()
        return mean_over_ranks([mean], self.device)[0]
