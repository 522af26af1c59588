"""What a training step sends: every collective of it with its group, its bytes and how often, from the run's settings.

Of tensor parallelism with sequence parallelism, a layer and micro-batch: six gathers of the residual stream (inputs of
qkv and fc1 forward and again in backward, gradients of the outputs of proj and fc2) and four reduce-scatters. With the
"coat" block and ``fp8_gather`` the gathers carry codes (a byte), forward's with a scale a row in the same collective;
ranks agree on a largest value for each gathered gradient, and with ``forward_scales: "tensor"`` for each input;
reduce-scatters stay BF16 (``benchmarks/speed/collectives.py`` counts the same). Full recomputation repeats forward's.
Without sequence parallelism, four all-reduces. Of DeepSpeed 0.19: ZeRO-1 and 2 all-reduce buckets of gradients
(twice what a reduce-scatter sends), ZeRO-1 once a step and 2 with every micro-batch, and gather BF16 parameters;
ZeRO-3 gathers them in forward and in backward and reduce-scatters; before a gather of codes it agrees on their scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from launch.planning.run import Run, parameters
from launch.planning.zero import states

from .links import share

__all__ = ["Part", "data_parallel", "pipeline", "sent", "tensor_parallel"]

_SCALE = 4
"""Bytes of a row's scale."""
_GATHER = 500_000_000
"""Elements of a gather of ZeRO-1 and 2 (DeepSpeed's ``allgather_bucket_size``)."""


@dataclass(frozen=True)
class Part:
    """One kind of message of a step."""

    name: str
    kind: str
    over: str
    """"tensor", "data" or "pipeline" ranks."""
    size: float
    """Bytes of one, as :mod:`launch.scale.links` counts them."""
    count: float
    """In a step."""
    wire: str
    """What is sent: "FP8", "BF16" or "FP32"."""
    hides: bool = False
    """Whether it can run beside computing."""


def sent(parts: list[Part], ranks: int) -> float:
    """Bytes that one rank of so many sends in a step."""
    return sum(one.size * one.count * share(one.kind, ranks) for one in parts)


def tensor_parallel(run: Run) -> list[Part]:
    """Of all layers of ``run`` and the output layer."""
    if run.tp == 1:
        return []
    h, tokens, layers = run.model.hidden_size, run.tokens, run.model.num_layers
    count = float(layers * run.accumulation)
    forwards = count * (2 if run.recompute.get("recompute_granularity") == "full" else 1)
    stream = 2.0 * h * tokens
    if run.shared == 1:
        return [Part("sums of the residual stream", "all_reduce", "tensor", stream, 2 * (forwards + count), "BF16")]
    flow = run.flow
    fp8 = flow is not None and flow.fp8_gather
    rows = flow is not None and flow.forward_scales == "row"
    wire, size = ("FP8", float(h * tokens)) if fp8 else ("BF16", stream)
    found = [
        Part(
            "gathers, forward",
            "all_gather",
            "tensor",
            size + (_SCALE * tokens if fp8 and rows else 0),
            2 * forwards,
            wire,
        ),
        Part("gathers, backward", "all_gather", "tensor", size, 4 * count, wire),
        Part("scatters, forward and backward", "reduce_scatter", "tensor", stream, 2 * (forwards + count), "BF16"),
        Part("output layer's gather", "all_gather", "tensor", stream, float(run.accumulation), "BF16"),
    ]
    if flow is not None:
        often = 2 * count + (0 if rows else 2 * forwards)
        found.append(Part("largest values", "all_reduce", "tensor", float(_SCALE), often, "FP32"))
    return found


def data_parallel(run: Run, fp8_weights: bool | None = None) -> list[Part]:
    """Of one rank's share of the model.

    Args:
        fp8_weights: ZeRO-3 gathers codes of the layers' matrices instead of BF16. None = as the block says.
    """
    if run.dp == 1:
        return []
    if fp8_weights is None:
        fp8_weights = run.flow is not None and run.flow.fp8_weight_gather
    found = states(run)
    elements, times = found.elements, run.accumulation
    buckets = max(1, ceil(elements / found.bucket))
    gradients = 2.0 * elements / buckets
    if run.stage < 3:
        often = float(buckets * (times if run.stage == 2 else 1))
        pieces = max(1, ceil(elements / _GATHER))
        return [
            Part("gradients", "all_reduce", "data", gradients, often, "BF16", hides=run.overlap),
            Part("parameters", "all_gather", "data", 2.0 * elements / pieces, float(pieces), "BF16"),
        ]
    layers = run.model.num_layers
    every = parameters(run)
    matrices = sum(p.numel for p in every if p.matrix and p.layer is not None)
    rows = layers * 4 * run.model.hidden_size  # about: outputs of four linears
    gathers = 2.0 * times * layers
    size = 2.0 * (elements - matrices) + (1.0 if fp8_weights else 2.0) * matrices
    wire = "FP8" if fp8_weights else "BF16"
    scales = Part("scales of weights", "all_reduce", "data", float(_SCALE * rows / layers), gathers, "FP32", hides=True)
    return [
        *([scales] if fp8_weights else []),
        Part("parameters, forward and backward", "all_gather", "data", size / layers, gathers, wire, hides=True),
        Part("gradients", "reduce_scatter", "data", gradients, float(buckets * times), "BF16", hides=run.overlap),
    ]


def pipeline(run: Run, pp: int, virtual: int = 1) -> list[Part]:
    """Of one stage: what it hands on, activations forward and gradients backward."""
    if pp == 1:
        return []
    size = 2.0 * run.model.hidden_size * run.tokens / run.shared
    return [Part("activations and gradients", "p2p", "pipeline", size, 2.0 * virtual * run.accumulation, "BF16")]
