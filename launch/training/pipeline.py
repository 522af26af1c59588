"""Steps and evaluations of a run over pipeline stages, by Megatron's schedules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from launch.training.memory import MemoryReport

__all__ = ["PipelineSteps", "nan_if_not_finite", "steps"]


def nan_if_not_finite(loss: torch.Tensor) -> torch.Tensor:
    """The loss times exactly 1, or NaN where it is not finite.

    The gradient norm, which all ranks share and DeepSpeed checks before it changes anything, then tells everybody
    without a further synchronization.
    """
    return loss * (1 + 0 * loss.detach())


def steps(p: Any, engine: Any, forward_step: Callable[..., Any]) -> PipelineSteps | None:
    """What runs the micro-batches of a plan with several stages; None with one.

    Args:
        forward_step: of :func:`launch.training.build.forward_step`.
    """
    if p.args.pipeline_parallel == 1:
        return None
    shape = {"seq_length": p.model.seq_length, "micro_batch_size": p.batch.micro}
    if p.eod is not None:  # a micro-batch is one sequence then
        shape = {"seq_length": p.model.seq_length * p.batch.micro, "micro_batch_size": 1}
    return PipelineSteps(engine, forward_step, shape, p.eod is not None)


@dataclass
class PipelineSteps:
    """Steps and evaluations of an engine that holds one stage. What it returns is the same on all stages."""

    engine: Any
    forward_step: Callable[..., Any]
    shape: dict[str, int]
    """Of what stages send one another."""
    documents: bool
    """Whether every stage needs the batches: where documents begin."""

    def step(self, batches: Iterator[Any], memory: MemoryReport | None = None) -> torch.Tensor:
        """One optimizer step. The mean loss of its micro-batches, fp64.

        Args:
            memory: measures the first forward pass of this stage, and the gradients.
        """
        from megatron_patches import train_batch

        watched = [memory]

        def forward(batches: Any, model: Any) -> Any:
            first = watched.pop() if watched else None
            with contextlib.nullcontext() if first is None else first.forward():
                output, loss_of = self.forward_step(batches, model)
                if not model.post_process:
                    return output, loss_of
                loss = nan_if_not_finite(loss_of(output))
            return loss, lambda loss: loss

        done = None if memory is None else memory.backward_done
        return train_batch(self.engine, self._read(batches), forward, before_step=done, **self.shape)

    def evaluate(self, batches: Iterator[Any], count: int) -> torch.Tensor:
        """The mean loss of ``count`` micro-batches, fp64."""
        from megatron_patches import eval_batch

        return eval_batch(self.engine, self._read(batches), self.forward_step, num_microbatches=count, **self.shape)

    def _read(self, batches: Iterator[Any]) -> Any:
        """``batches`` for each part of the model that needs them: the first one and the last one."""
        from megatron_patches.pipeline import chunks_of

        chunks = chunks_of(self.engine.module)
        needed = [bool(self.documents or chunk.pre_process or chunk.post_process) for chunk in chunks]
        copies = iter(itertools.tee(batches, sum(needed)))
        read = [next(copies) if one else None for one in needed]
        return read if len(chunks) > 1 else read[0]
