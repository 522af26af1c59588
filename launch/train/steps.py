"""Micro-batches of a step and of an evaluation: one after the other, or over pipeline stages by
Megatron.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from launch.train import training_engine
from launch.train.data_source import Batch
from launch.train.memory_report import MemoryReport
from launch.train.plan import Plan


def steps_of(p: Plan, engine: Any, device: torch.device) -> MicroBatches | PipelineSteps:
    """The runner of a plan's micro-batches on its engine."""
    loss = training_engine.language_model_loss(p.args.tensor_parallel, device)
    if p.args.pipeline_parallel == 1:
        return MicroBatches(engine, loss, p.batch.accumulation, device)
    shape = {"seq_length": p.model.seq_length, "micro_batch_size": p.batch.micro}
    if p.eod is not None:  # a micro-batch is one sequence then
        shape = {"seq_length": p.model.seq_length * p.batch.micro, "micro_batch_size": 1}
    return PipelineSteps(engine, loss, shape, p.eod is not None)


def _nan_if_not_finite(loss: torch.Tensor) -> torch.Tensor:
    """The loss times exactly 1, or NaN where it is not finite: then the gradient norm, which
    DeepSpeed checks on all ranks before it changes anything, is NaN without a further
    synchronization.
    """
    return loss * (1 + 0 * loss.detach())


@dataclass
class MicroBatches:
    """Steps and evaluations of an engine that holds the whole model."""

    engine: Any
    loss: Callable[[Any, Batch], torch.Tensor]
    """Of :func:`launch.train.training_engine.language_model_loss`."""
    accumulation: int
    device: torch.device

    def step(self, batches: Iterator[Batch], memory: MemoryReport | None = None) -> torch.Tensor:
        """One optimizer step. The mean loss of its micro-batches, fp64, computed before the
        optimizer begins: it is read while the GPU still writes weights.

        Args:
            memory: measures the first forward pass, and the gradients.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(self.accumulation):
            batch = next(batches)
            watched = memory if index == 0 else None
            with contextlib.nullcontext() if watched is None else watched.forward():
                loss = self.loss(self.engine, batch)
            total += loss.detach().double() / self.accumulation
            self.engine.backward(_nan_if_not_finite(loss))
            if memory is not None and index == self.accumulation - 1:
                memory.backward_done()
            self.engine.step()
        return total

    def evaluate(self, batches: Iterator[Batch], count: int) -> torch.Tensor:
        """The mean loss of ``count`` micro-batches, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _ in range(count):
            total += self.loss(self.engine, next(batches))
        return total / count


@dataclass
class PipelineSteps:
    """Steps and evaluations of an engine that holds one stage, with the same results on all
    stages.
    """

    engine: Any
    loss: Callable[[Any, Batch | None], torch.Tensor]
    """As :class:`MicroBatches` has it."""
    shape: dict[str, int]
    """Of what stages send one another."""
    documents: bool
    """Whether every stage needs the batches, for where documents begin."""

    def step(self, batches: Iterator[Batch], memory: MemoryReport | None = None) -> torch.Tensor:
        """As :meth:`MicroBatches.step`."""
        from megatron_patches import train_batch

        watched = [memory]

        def forward(batches: Any, model: Any) -> Any:
            first = watched.pop() if watched else None
            with contextlib.nullcontext() if first is None else first.forward():
                output, same = self._forward(batches, model)
                if model.post_process:
                    output = _nan_if_not_finite(output)
            return output, same

        done = None if memory is None else memory.backward_done
        return train_batch(
            self.engine, self._read(batches), forward, before_step=done, **self.shape
        )

    def evaluate(self, batches: Iterator[Batch], count: int) -> torch.Tensor:
        """As :meth:`MicroBatches.evaluate`."""
        from megatron_patches import eval_batch

        return eval_batch(
            self.engine,
            self._read(batches),
            self._forward,
            num_microbatches=count,
            **self.shape,
        )

    def _forward(self, batches: Iterator[Batch] | None, model: Any) -> Any:
        """Megatron's form of the loss: it takes an iterator, and returns the stage's output and a
        function from it to the loss.
        """
        batch = None if batches is None else next(batches)
        return self.loss(model, batch), lambda output: output

    def _read(self, batches: Iterator[Batch]) -> Any:
        """``batches`` for each part of the model that needs them: the first one and the last
        one.
        """
        from megatron_patches.parallel.pipeline import chunks_of

        chunks = chunks_of(self.engine.module)
        needed = [
            bool(self.documents or chunk.pre_process or chunk.post_process) for chunk in chunks
        ]
        copies = iter(itertools.tee(batches, sum(needed)))
        read = [next(copies) if one else None for one in needed]
        return read if len(chunks) > 1 else read[0]
