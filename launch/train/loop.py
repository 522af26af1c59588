"""The training loop: steps, evaluation, what to do with non-finite numbers and with signals."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from coat_dist.deepspeed.step.step import norm_known
from coat_dist.flow.graphs.graph_pool import pool_bytes
from launch.train.data_source import Progress, TokenData
from launch.train.memory_report import MemoryReport
from launch.train.metrics import peak_memory_bytes
from launch.train.plan import Schedule
from launch.train.pretrain_options import PretrainOptions
from launch.train.reporters import Reporters
from launch.train.runtime import StopSignal, mean_over_ranks
from launch.train.steps import MicroBatches, PipelineSteps


class BadSteps(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient norm."""


@dataclass(kw_only=True)
class Loop:
    """Trains an engine to the last step of ``options``."""

    engine: Any
    """DeepSpeed's."""
    steps: MicroBatches | PipelineSteps
    """Runs the engine's micro-batches."""
    data: TokenData
    schedule: Schedule
    reporters: Reporters
    options: PretrainOptions
    """How many steps, when to evaluate, save and stop."""
    progress: Progress
    device: torch.device
    samples_per_step: int
    tokens_per_step: int
    flops_per_token: float
    save: Callable[[], Any] | None = None
    """Writes a checkpoint and returns its path."""
    more: Callable[[], Mapping[str, torch.Tensor]] | None = None
    """Further numbers of a step that is done, by name, of this rank; their means over all ranks
    are recorded.
    """
    memory: MemoryReport | None = None
    """Measures the first step that changes the weights."""
    profiler: Any = None
    """``torch.profiler.profile``, in whose context the loop runs."""
    stop: StopSignal | None = None
    last_checkpoint: Any = None
    doing: str = "before the first step"
    """For the message of a run that is out of memory."""
    _measured: bool = field(default=False, init=False)
    """Whether ``memory`` has been reported."""
    _train: Any = field(default=None, init=False)
    """Batches of the training split, from where the run is."""
    _numbers: Any = field(default=None, init=False)
    """The stream of :meth:`_beside_the_optimizer`."""

    def run(self) -> str | None:
        """Train to the last step and evaluate on the valid and test splits.

        Returns:
            None when all steps are done, else the reason of an earlier end ("SIGTERM",
            "--stop-at-step", ...).

        Raises:
            BadSteps: after ``max_bad_steps`` in a row; nothing was saved since ``last_checkpoint``.
        """
        a, progress = self.options, self.progress
        if a.eval_only:
            self.reporters.step({"step": progress.step, **self._held_out("valid", "test")})
            return "--eval-only"
        saved_step = progress.step if self.last_checkpoint else -1
        # Reached before: the same command was started again.
        reached = a.stop_at_step is not None and progress.step >= a.stop_at_step < a.train_steps
        why = "--stop-at-step" if reached else None
        self._train = self.data.batches("train", progress.consumed_samples)
        while progress.step < a.train_steps and why is None:
            record = self._step()
            if self.profiler is not None:
                self.profiler.step()
            step, at_end = progress.step, progress.step == a.train_steps
            if at_end:
                record |= self._held_out("valid", "test")
            elif a.eval_interval and step % a.eval_interval == 0:
                record |= self._held_out("valid")
            stopping = record.pop("stopping")
            self.reporters.step(record)
            self._check_bad(record)
            if stopping and not at_end:
                why = (self.stop.name if self.stop else None) or "a signal on another rank"
            elif step == a.stop_at_step and not at_end:
                why = "--stop-at-step"
            if why or (a.save_interval and step % a.save_interval == 0):
                saved_step = self._save()
        if saved_step != progress.step:
            self._save()
        return why

    def _save(self) -> int:
        """Write a checkpoint, if the run is to; the step it is of."""
        if self.save is not None:
            self.doing = f"while the checkpoint of step {self.progress.step} was written"
            self.last_checkpoint = self.save()
        return self.progress.step

    def _step(self) -> dict[str, Any]:
        """One optimizer step; advances ``progress`` and returns the record, with ``stopping``
        added.
        """
        progress = self.progress
        self.doing = f"in step {progress.step + 1}"
        lr = self.schedule(progress.step + 1)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        # Before the step: in the one that makes them, torch counts what they take.
        graphs = pool_bytes(self.device)
        began = time.perf_counter()
        loss = self.steps.step(self._train, None if self._measured else self.memory)
        applied = bool(self.engine.was_step_applied())
        requested = 1.0 if self.stop is not None and self.stop.requested() else 0.0
        with self._beside_the_optimizer():
            norm = float(self.engine.get_global_grad_norm())
            more = self.more() if self.more is not None else {}
            mean_loss, stopping, *means = mean_over_ranks(
                [loss, requested, *more.values()], self.device
            )
        took = time.perf_counter() - began

        progress.step += 1
        progress.consumed_samples += self.samples_per_step
        progress.loss = mean_loss if math.isfinite(mean_loss) else None
        speed = self.tokens_per_step / took
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
            "stopping": stopping > 0,
        }
        if self.memory is not None and applied and not self._measured:
            self.memory.step_done()
            self.reporters.memory(self.memory)
            self._measured = True
        if not applied:
            progress.skipped_steps += 1
            record["skipped"] = (
                "non-finite loss" if not math.isfinite(mean_loss) else "non-finite gradient norm"
            )
        progress.bad_in_a_row = 0 if applied else progress.bad_in_a_row + 1
        return record

    @contextlib.contextmanager
    def _beside_the_optimizer(self) -> Iterator[None]:
        """Read a step's numbers while the GPU still writes weights, so that the next step follows
        without a pause: on a stream of their own, which waits for what was computed before the
        optimizer began.
        """
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
        if (bad := self.progress.bad_in_a_row) >= self.options.max_bad_steps:
            last = self.last_checkpoint or "none was saved (--save, --save-interval)"
            raise BadSteps(
                f"{bad} steps in a row, up to step {record['step']}, had a {record['skipped']}; "
                "last good checkpoint: "
                f"{last}"
            )

    def _held_out(self, *splits: str) -> dict[str, float]:
        """Losses of those splits that there are, by their keys in a record."""
        losses = {f"{split}_loss": self.evaluate(split) for split in splits}
        return {key: loss for key, loss in losses.items() if loss is not None}

    @torch.no_grad()
    def evaluate(self, split: str) -> float | None:
        """Mean loss over ``eval_steps`` micro-batches of every rank; None where there is no such
        split.
        """
        if (batches := self.data.batches(split)) is None:
            return None
        self.doing = f"in the evaluation after step {self.progress.step}"
        self.engine.eval()
        mean = self.steps.evaluate(batches, self.options.eval_steps)
        self.engine.train()
        return mean_over_ranks([mean], self.device)[0]
