"""A run on a cluster, on paper: tensor x pipeline x data parallelism, its memory, its step's time, what links carry.

Memory and computing are the planner's (:mod:`launch.planning`), of the stage that needs most. A pipeline of P stages
with V chunks each takes (m + (P - 1) / V) times a stage's micro-batch for m micro-batches: the bubble is
(P - 1) / (V m + P - 1) of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from coat_dist import CoatConfigError
from launch.model.config import ModelConfig
from launch.model.gpt import flops_per_token
from launch.planning.gpus import GPU
from launch.planning.run import Run
from launch.planning.search import MARGIN, need
from launch.planning.speed import step_time
from launch.planning.timeline import kept_for_backward

from .links import Group, Network, Range
from .traffic import Part, data_parallel, pipeline, sent, tensor_parallel

__all__ = ["FULL", "Layout", "layouts"]

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_COMPUTING = Range(0.8, 1.0, 1.2)
"""How well the planner knows times (docs/memory.md)."""
_HIDDEN = Range(1.0, 0.5, 0.0)
"""Part that is hidden of what runs beside computing: the best, as the planner takes it, the worst."""


@dataclass(frozen=True)
class Layout:
    """One way to run a model on ``run.tp * run.dp * pp`` GPUs."""

    run: Run
    """The whole model's; ``accumulation`` are the micro-batches of a step on each pipeline."""
    pp: int = 1
    virtual: int = 1
    fp8_weights: bool | None = None
    """ZeRO-3 gathers FP8 codes of the layers' matrices. None = as the block says."""

    @property
    def gpus(self) -> int:
        return self.run.tp * self.run.dp * self.pp

    @property
    def tokens(self) -> int:
        """Of a step, on all GPUs."""
        return self.run.tokens * self.run.accumulation * self.run.dp

    @cached_property
    def stage(self) -> Run:
        """One stage as a run: its layers, and the embedding or the output layer."""
        if self.pp == 1:
            return self.run
        layers = ceil(self.run.model.num_layers / self.pp)
        model = self.run.model.model_copy(update={"num_layers": layers, "tie_embeddings": True})
        return self.run.but(model=model)

    @property
    def bubble(self) -> float:
        """Part of a step in which a stage waits for others."""
        return (self.pp - 1) / (self.virtual * self.run.accumulation + self.pp - 1)

    def memory(self, gpu: GPU) -> int:
        """Bytes of the first stage, which holds the most micro-batches at a time: P of them with 1F1B.

        Of ZeRO-3 without what building the engine takes: a model of this size is built in shards.
        """
        known = need(self.stage, gpu)
        needed = known.total
        if self.run.stage == 3:
            peaks = known.peak.other_peaks.items()
            training = max(size for phase, size in peaks if phase != "building the engine")
            needed = int(training * (1 + MARGIN)) + known.not_torchs
        if self.pp == 1:
            return needed
        held = float(self.pp)
        if self.virtual > 1:
            held = (2 * (self.pp - 1) + (self.virtual - 1) * self.pp + 1) / self.virtual
        more = min(held, float(self.run.accumulation)) - 1
        return needed + int(max(0.0, more) * kept_for_backward(self.stage) * (1 + MARGIN))

    def groups(self, network: Network) -> dict[str, Group]:
        """Ranks are numbered as Megatron does: tensor, then data, then pipeline."""
        tp, dp = self.run.tp, self.run.dp
        return {
            "tensor": network.group(tp),
            "data": network.group(dp, stride=tp),
            "pipeline": Group(2, 2 if tp * dp < network.gpus_per_node else 1),
        }

    def parts(self) -> list[Part]:
        """Everything that a rank sends in a step."""
        return [
            *tensor_parallel(self.stage),
            *pipeline(self.run, self.pp, self.virtual),
            *data_parallel(self.stage, self.fp8_weights),
        ]

    def carried(self, network: Network) -> dict[str, float]:
        """Bytes a step that each link of a GPU sends: "inside" its node, and "between" nodes by its network card."""
        found, groups = {"inside": 0.0, "between": 0.0}, self.groups(network)
        for part in self.parts():
            group = groups[part.over]
            total = sent([part], group.ranks)
            # Around a ring each node sends once what each rank sends; its ranks' cards share that.
            crossing = total / group.a_node if group.nodes > 1 else 0.0
            found["between"] += crossing
            found["inside"] += total if group.nodes == 1 else total - crossing
        return found

    def seconds(self, gpu: GPU, network: Network) -> dict[str, Range]:
        """The parts of a step."""
        time = step_time(self.stage.but(accumulation=1), gpu).parts
        micro = sum(time.get(name, 0.0) for name in ("layers", "host", "loss", "gradients"))
        passes = self.run.accumulation
        waits = (self.pp - 1) / self.virtual / passes  # of a micro-batch each
        groups = self.groups(network)
        found = {
            "computing": Range(*(micro * passes * factor for factor in _COMPUTING)),
            "update": Range(*(time["step"] * factor for factor in _COMPUTING)),
        }
        for part in self.parts():
            took = network.seconds(part.kind, groups[part.over], part.size).times(part.count)
            if part.hides:
                behind = micro * passes * 2 / 3
                took = Range(*(t - o * min(t, behind) for t, o in zip(took, _HIDDEN, strict=True)))
            name = f"{part.over} parallelism"
            found[name] = found.get(name, Range(0.0, 0.0, 0.0)).plus(took)
        if self.pp > 1:
            once = found["computing"].plus(found.get("tensor parallelism", Range(0.0, 0.0, 0.0)))
            found["bubble"] = once.times(waits)
        return found

    def step(self, gpu: GPU, network: Network) -> Range:
        """Seconds of a step."""
        total = Range(0.0, 0.0, 0.0)
        for one in self.seconds(gpu, network).values():
            total = total.plus(one)
        return total

    def flops(self, seconds: float) -> float:
        """Operations of the model a second and GPU; what is computed again does not count."""
        return flops_per_token(self.run.model, self.run.model.seq_length) * self.tokens / seconds / self.gpus

    def name(self) -> str:
        """For a table."""
        chunks = f" ({self.virtual} chunks)" if self.virtual > 1 else ""
        again = ", recomputed" if self.run.recompute else ""
        return f"{self.run.tp} x {self.pp}{chunks} x {self.run.dp}, ZeRO-{self.run.stage}{again}"


def layouts(
    model: ModelConfig, settings: Mapping[str, Any], coat: Any, gpus: int, tokens: int, gpus_per_node: int
) -> Iterator[Layout]:
    """Those that are worth a look: TP within a node, stages of equal layers, micro-batches that divide the batch.

    Args:
        tokens: of a step, on all GPUs.
    """
    samples = tokens // model.seq_length
    for tp in (2**k for k in range(10) if 2**k <= min(gpus, gpus_per_node)):
        try:
            model.check_parallel(tp, tp > 1)
        except CoatConfigError:
            continue
        for pp in (2**k for k in range(6) if tp * 2**k <= gpus and 2**k <= model.num_layers):
            dp = gpus // (tp * pp)
            each = ceil(model.num_layers / pp)
            if gpus % (tp * pp) or samples % dp or each * pp > 1.07 * model.num_layers:
                continue
            for micro in (1, 2, 4):
                if samples % (dp * micro):
                    continue
                passes = samples // (dp * micro)
                run = Run(
                    model=model, settings=settings, coat=coat, dp=dp, tp=tp, sequence_parallel=tp > 1, micro=micro,
                    accumulation=passes,
                )  # fmt: skip
                for stage in (1, 2, 3) if pp == 1 else (1,):
                    zero = {**settings["zero_optimization"], "stage": stage}
                    one = run.but(settings={**settings, "zero_optimization": zero})
                    for again in ({}, FULL):
                        found = Layout(one.but(recompute=again), pp)
                        yield found
                        if pp > 1 and passes % pp == 0:
                            yield from (replace(found, virtual=v) for v in (2, 4) if each % v == 0)
