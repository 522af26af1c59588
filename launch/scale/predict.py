"""Predicted step times on more ranks, from a measured run.

A step is computing, the update, and the part of its collectives that computing does not hide. A
collective takes ``hops * latency + sent / bandwidth``; ``sent`` are a ring's bytes. Pipelines and
experts are not predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import ceil, exp, log2
from typing import Any, NamedTuple

from coat_dist import CoatConfig
from launch.model.config import described_model
from launch.plan.run import Run, parameters
from launch.plan.zero import states

from .bench import share
from .tables import spread_of

__all__ = ["Link", "Network", "data_parallel", "network_of", "predictions"]

_CASES = ((0.0, 1.2), (0.5, 1.0), (1.0, 0.75))
"""Best, middle, worst: the part of hidden collectives that shows after all, and a factor of
links' bandwidths.
"""


class Link(NamedTuple):
    """Rate of one GPU in one direction, in bytes a second; seconds of a hop and of starting a
    collective.
    """

    bandwidth: float
    latency: float
    start: float = 0.0
    source: str = "assumed"

    def __str__(self) -> str:
        return (
            f"{self.bandwidth / 1e9:,.1f} GB/s and {1e6 * self.latency:.1f} µs a hop "
            f"({self.source})"
        )


_NVLINK = Link(240e9, 3e-6, 18e-6)
"""Within a node. Two H200s: an all-gather of 8192 x 4096 takes 161 us in BF16 and 91 us in FP8
(docs/flow.md).
"""
_NIC = Link(40e9, 8e-6, 18e-6)
"""Between nodes: a 400 Gb/s card for each GPU (data sheets of DGX H100 and ConnectX-7), 80 % of
it. Not measured.
"""


class Network(NamedTuple):
    """Nodes of ``gpus_per_node`` GPUs."""

    inside: Link
    between: Link
    gpus_per_node: int

    def seconds(
        self, kind: str, ranks: int, stride: int, size: float, faster: float = 1.0
    ) -> float:
        """One collective of ``size`` bytes over ``ranks`` ranks (2 or more), every ``stride``-th
        one.
        """
        a_node = max(1, min(ranks, self.gpus_per_node // stride))
        nodes = ceil(ranks / a_node)
        # All GPUs of a node send at once, each by its own card.
        rates = [self.inside.bandwidth] * (a_node > 1) + [a_node * self.between.bandwidth] * (
            nodes > 1
        )
        outer = hops(kind, nodes)
        latency = outer * self.between.latency + (hops(kind, ranks) - outer) * self.inside.latency
        start = (self.between if nodes > 1 else self.inside).start
        return start + latency + size * share(kind, ranks) / (min(rates) * faster)

    def describe(self) -> str:
        """The links for a reader."""
        return (
            f"nodes of {self.gpus_per_node}, within a node {self.inside}, between nodes "
            f"{self.between}"
        )


def hops(kind: str, ranks: int) -> int:
    """Messages that wait for one another: of a tree for all-reduces and of a ring for the
    others, as NCCL has them.
    """
    return 2 * ceil(log2(ranks)) if kind == "all_reduce" else ranks - 1


def network_of(records: Sequence[Mapping[str, Any]], gpus_per_node: int) -> Network:
    """Links by measured all-reduces, or assumed ones."""
    links = {"inside": _NVLINK, "between": _NIC}
    for where in links:
        samples = [
            sample
            for one in records
            if where
            == (
                "inside"
                if one["a_node"] == one["ranks"]
                else "between"
                if one["a_node"] == 1
                else ""
            )
            for sample in one.get("samples", ())
            if sample["kind"] == "all_reduce"
        ]
        if samples:
            rate = max(
                one["size"] * share("all_reduce", one["ranks"]) / one["seconds"] for one in samples
            )
            latency = min(one["seconds"] / hops("all_reduce", one["ranks"]) for one in samples)
            links[where] = Link(rate, latency, source="measured")
    return Network(**links, gpus_per_node=gpus_per_node)


class Message(NamedTuple):
    """Collectives of one kind in a step over data-parallel ranks; ``size`` bytes of the whole
    tensor.
    """

    kind: str
    size: float
    often: float
    hides: bool = False  # can run beside computing


def data_parallel(run: Run) -> list[Message]:
    """Collectives of DeepSpeed 0.19: stages 0 to 2 all-reduce gradients, stage 2 with every
    micro-batch.

    Stages 1 and 2 gather BF16 weights after the update. Stage 3 gathers them in forward and in
    backward, with ``fp8_weight_gather`` as codes after an all-reduce of about 4 h scales a layer,
    and reduce-scatters gradients.
    """
    if run.dp == 1:
        return []
    found, passes = states(run), run.accumulation
    buckets, size = max(1, ceil(found.elements / found.bucket)), 2.0 * found.elements
    if run.stage < 3:
        often = buckets * (passes if run.stage == 2 else 1)
        reduced = Message("all_reduce", size / buckets, often, run.overlap)
        gathers = max(1, ceil(size / 1e9))  # DeepSpeed's allgather_bucket_size is 5e8 elements
        return [reduced] + [Message("all_gather", size / gathers, gathers)] * bool(run.stage)
    layers, gathers = run.model.num_layers, 2 * passes * run.model.num_layers
    messages = [Message("reduce_scatter", size / buckets, buckets * passes, run.overlap)]
    if run.flow is not None and run.flow.fp8_weight_gather:
        size -= sum(p.numel for p in parameters(run) if p.matrix and p.layer is not None)
        messages.append(Message("all_reduce", 16.0 * run.model.hidden_size, gathers, True))
    return [*messages, Message("all_gather", size / layers, gathers, True)]


def _shown(run: Run, network: Network, shows: float, bandwidth: float, computing: float) -> float:
    """Seconds of a step's collectives that computing's backward, two thirds of it, does not
    hide.
    """
    total = 0.0
    for one in data_parallel(run):
        took = one.often * network.seconds(one.kind, run.dp, run.tp, one.size, bandwidth)
        total += took - (1 - shows) * min(took, computing * 2 / 3) * one.hides
    return total


def predictions(
    there: Mapping[str, Any], predict: Sequence[int] = (), gpus_per_node: int | None = None
) -> dict[str, Any]:
    """Weak scaling of ``measured.json`` to ``predict`` ranks; as a check, the most measured
    ranks from fewer.
    """
    identity, own_node = there["identity"], there["identity"]["gpus_per_node"]
    node = gpus_per_node or (own_node if identity["nodes"] > 1 else max(8, own_node))
    network, rows = network_of(there["records"], node), []
    training: dict[str, dict[int, dict[int, list[float]]]] = {}
    for one in there["records"]:
        if "steps" in one:
            seconds = {measured["accumulation"]: measured["seconds"] for measured in one["steps"]}
            training.setdefault(one["key"]["variant"], {})[one["ranks"]] = seconds
    for variant, own in training.items():
        *fewer, most = sorted(own)
        passes = identity["accumulation"]
        tokens = (
            identity["micro_batch"]
            * passes
            * identity["model"]["seq_length"]
            / identity["tensor_parallel"]
        )
        first = statistics.median(own[min(own)][passes])
        for start, ranks in [
            *((one, most) for one in fewer[-1:]),
            *((most, ranks) for ranks in predict),
        ]:
            steps = _steps(identity, variant, own[start], start, ranks, network)
            rows.append(
                {
                    "variant": variant,
                    "from": start,
                    "ranks": ranks,
                    "seconds": steps,
                    "tokens_per_second_per_gpu": [tokens / one for one in steps[::-1]],
                    "efficiency": [first / one for one in steps[::-1]],
                    "measured": statistics.median(own[most][passes]) if start != most else None,
                }
            )
    return {"rows": rows, "links": network.describe()}


def _steps(
    identity: Mapping[str, Any],
    variant: str,
    own: Mapping[int, list[float]],
    start: int,
    ranks: int,
    network: Network,
) -> list[float]:
    """A measured step of ``start`` ranks, with the update and the collectives of ``ranks`` in
    place of its own.
    """
    settings, passes, tp = (
        identity["settings"][variant],
        identity["accumulation"],
        identity["tensor_parallel"],
    )
    model, coat = described_model(identity["model"]), CoatConfig.from_deepspeed(settings)
    run = Run(
        model=model,
        settings=settings,
        coat=coat,
        tp=tp,
        micro=identity["micro_batch"],
        accumulation=passes,
    )
    once, twice = (statistics.median(own[count]) for count in (passes, 2 * passes))
    error, found = max(0.03, 2 * spread_of(own[passes])), []
    runs = [
        run.but(dp=ranks // tp),
        run.but(dp=start // tp),
        run.but(dp=start // tp, accumulation=2 * passes),
    ]
    for case, factor in zip(_CASES, (exp(-error), 1.0, exp(error)), strict=True):
        more, less, less2 = (
            _shown(one, network, *case, once * one.accumulation / passes) for one in runs
        )
        # Twice the micro-batches take less than twice the time by what a step does once: the
        # update, which ZeRO shares over ranks, and collectives. More than half of a step is noise.
        update = (
            min(once / 2, max(0.0, 2 * once - twice - (2 * less - less2))) if run.stage else 0.0
        )
        found.append(factor * (once - update * (1 - start / ranks) + more - less))
    return found
