"""Predicted step times on more GPUs, from a measured run or, on paper, from the planner's rates.

A step is computing, the update, and the part of its collectives that computing does not hide. A collective takes
``hops * latency + sent / bandwidth``; ``sent`` are a ring's bytes. Pipelines and experts are not predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import ceil, exp, log2
from pathlib import Path
from typing import Any, NamedTuple

from coat_dist import CoatConfig, CoatConfigError
from launch.model.config import described_model
from launch.model.gpt import flops_per_token
from launch.plan.gpus import GPU, GPUS
from launch.plan.run import Run, parameters
from launch.plan.search import MARGIN, need
from launch.plan.speed import step_time
from launch.plan.zero import states

from .bench import share
from .measuring import runs_of
from .tables import between, spread_of, table

__all__ = ["Network", "data_parallel", "paper", "predictions", "tensor_parallel"]

SIZES = (8, 64, 512, 2048)
MODELS: dict[str, tuple] = {
    "llama2-7b": (SIZES, ()), "llama3-70b": (SIZES[1:], ()), "llama3.1-405b": (SIZES[2:], ("seq_length=8192",)),
}  # fmt: skip
"""Numbers of GPUs on paper, from the fewest that fit, and overrides of the model."""


class Link(NamedTuple):
    """What one GPU sends over in one direction: bytes a second, seconds of a hop and of starting a collective."""

    bandwidth: float
    latency: float
    start: float = 0.0
    source: str = "assumed"


NVLINK = Link(240e9, 3e-6, 18e-6)
"""Within a node. Two H200s: an all-gather of 8192 x 4096 takes 161 us in BF16 and 91 us in FP8 (docs/flow.md)."""
NIC = Link(40e9, 8e-6, 18e-6)
"""Between nodes: a 400 Gb/s card for each GPU (data sheets of DGX H100 and ConnectX-7), 80 % of it. Not measured."""


class Case(NamedTuple):
    """The part of hidden collectives that shows after all, factors of bandwidths and of the planner's times (20 %)."""

    shows: float
    bandwidth: float
    computing: float


CASES = (Case(0.0, 1.2, 0.8), Case(0.5, 1.0, 1.0), Case(1.0, 0.75, 1.2))


class Network(NamedTuple):
    """Nodes of ``gpus_per_node`` GPUs."""

    inside: Link
    between: Link
    gpus_per_node: int

    def seconds(self, kind: str, ranks: int, stride: int, size: float, faster: float = 1.0) -> float:
        """One collective of ``size`` bytes over ``ranks`` ranks (2 or more), every ``stride``-th one."""
        a_node = max(1, min(ranks, self.gpus_per_node // stride))
        nodes = ceil(ranks / a_node)
        rates = [self.inside.bandwidth] if a_node > 1 else []
        if nodes > 1:  # all GPUs of a node send at once, each by its own card
            rates.append(a_node * self.between.bandwidth)
        outer = hops(kind, nodes)
        latency = outer * self.between.latency + (hops(kind, ranks) - outer) * self.inside.latency
        start = (self.between if nodes > 1 else self.inside).start
        return start + latency + size * share(kind, ranks) / (min(rates) * faster)


def hops(kind: str, ranks: int) -> int:
    """Messages that wait for one another: of a tree for all-reduces and of a ring for the others, as NCCL has them."""
    return 2 * ceil(log2(ranks)) if kind == "all_reduce" else ranks - 1


class Message(NamedTuple):
    """Collectives of one kind in a step; ``over`` "tensor" or "data" ranks, ``size`` bytes of the whole tensor."""

    kind: str
    over: str
    size: float
    often: float
    hides: bool = False  # can run beside computing


def tensor_parallel(run: Run) -> list[Message]:
    """Collectives of tensor parallelism.

    With sequence parallelism a layer gathers the residual stream twice in forward and four times in backward, and
    scatters four times. ``fp8_gather`` gathers codes: forward's with a scale a row, the others after an all-reduce of
    their largest values. Without sequence parallelism a layer has four all-reduces. Full recomputation repeats forward.
    """
    if run.tp == 1:
        return []
    stream, count = 2.0 * run.model.hidden_size * run.tokens, float(run.model.num_layers * run.accumulation)
    forwards = count * (2 if run.recompute.get("recompute_granularity") == "full" else 1)
    if run.shared == 1:
        return [Message("all_reduce", "tensor", stream, 2 * (forwards + count))]
    rows, fp8 = run.flow is not None and run.flow.forward_scales == "row", run.flow is not None and run.flow.fp8_gather
    codes = stream / 2 if fp8 else stream
    found = [
        Message("all_gather", "tensor", codes + (4 * run.tokens if fp8 and rows else 0), 2 * forwards),
        Message("all_gather", "tensor", codes, 4 * count),
        Message("reduce_scatter", "tensor", stream, 2 * (forwards + count)),
        Message("all_gather", "tensor", stream, float(run.accumulation)),  # the output layer's
    ]
    return found + [Message("all_reduce", "tensor", 4, 2 * count + (not rows) * 2 * forwards)] * (run.flow is not None)


def data_parallel(run: Run) -> list[Message]:
    """Collectives of DeepSpeed 0.19: stages 0 to 2 all-reduce gradients, stage 2 with every micro-batch.

    Stages 1 and 2 gather BF16 weights after the update. Stage 3 gathers them in forward and in backward, with
    ``fp8_weight_gather`` as codes after an all-reduce of about 4 h scales a layer, and reduce-scatters gradients.
    """
    if run.dp == 1:
        return []
    found, passes = states(run), run.accumulation
    buckets, size = max(1, ceil(found.elements / found.bucket)), 2.0 * found.elements
    if run.stage < 3:
        often = buckets * (passes if run.stage == 2 else 1)
        reduced = Message("all_reduce", "data", size / buckets, often, run.overlap)
        gathers = max(1, ceil(size / 1e9))  # DeepSpeed's allgather_bucket_size is 5e8 elements
        return [reduced] + [Message("all_gather", "data", size / gathers, gathers)] * bool(run.stage)
    layers, gathers = run.model.num_layers, 2 * passes * run.model.num_layers
    messages = [Message("reduce_scatter", "data", size / buckets, buckets * passes, run.overlap)]
    if run.flow is not None and run.flow.fp8_weight_gather:
        size -= sum(p.numel for p in parameters(run) if p.matrix and p.layer is not None)
        messages.append(Message("all_reduce", "data", 16.0 * run.model.hidden_size, gathers, True))
    return [*messages, Message("all_gather", "data", size / layers, gathers, True)]


def _shown(run: Run, messages: Sequence[Message], network: Network, case: Case, computing: float) -> float:
    """Seconds of a step's collectives that computing's backward, two thirds of it, does not hide."""
    total = 0.0
    for one in messages:
        ranks, stride = (run.tp, 1) if one.over == "tensor" else (run.dp, run.tp)
        took = one.often * network.seconds(one.kind, ranks, stride, one.size, case.bandwidth)
        total += took - (1 - case.shows) * min(took, computing * 2 / 3) * one.hides
    return total


def network_of(records: Sequence[Any], given: Mapping[str, Link], node: int) -> tuple[Network, str]:
    """Links that were given, else those of measured all-reduces, else assumed ones; and what they are, for a reader."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for one in records:
        where = "inside" if one["a_node"] == one["ranks"] else "between" if one["a_node"] == 1 else ""
        for sample in one.get("samples", ()):
            if where and sample["kind"] == "all_reduce":
                each, sent = sample["seconds"], sample["size"] * share("all_reduce", sample["ranks"])
                seen.setdefault(where, []).append((sent / each, each / hops("all_reduce", sample["ranks"])))
    links = {"inside": NVLINK, "between": NIC, **given}
    for where in seen.keys() - given:
        links[where] = Link(max(r for r, _ in seen[where]), min(s for _, s in seen[where]), source="measured")
    said = [
        f"{where} {link.bandwidth / 1e9:,.1f} GB/s and {1e6 * link.latency:.1f} µs a hop ({link.source})"
        for where, link in (("within a node", links["inside"]), ("between nodes", links["between"]))
    ]
    return Network(**links, gpus_per_node=node), f"nodes of {node}, {', '.join(said)}"


def predictions(
    there: Mapping[str, Any],
    predict: Sequence[int] = (),
    given: Mapping[str, Link] | None = None,
    gpus_per_node: int | None = None,
    hold_out: int | None = None,
) -> dict[str, Any]:
    """Weak scaling of a measured run to ``predict`` ranks, and a measured size predicted from fewer ranks as a check.

    Raises:
        CoatConfigError: no training or no such size was measured; tensor parallelism does not divide the ranks.
    """
    identity = there["identity"]
    tp, passes, own_node = identity["tensor_parallel"], identity.get("accumulation"), identity["gpus_per_node"]
    node = gpus_per_node or (own_node if identity["nodes"] > 1 else max(8, own_node))
    network, said = network_of(there["records"], given or {}, node)
    training: dict[str, dict[int, dict[int, list[float]]]] = {}
    for one in there["records"]:
        if "steps" in one:
            seconds = {measured["accumulation"]: measured["seconds"] for measured in one["steps"]}
            training.setdefault(one["key"]["variant"], {})[one["ranks"]] = seconds
    sizes = sorted(set().union(*training.values()))
    if predict and (not sizes or any(ranks % tp for ranks in predict)):
        accepted = f"multiples of --tensor-parallel ({tp})" if sizes else "only of measured training; none is here"
        raise CoatConfigError(f"--predict: got {', '.join(map(str, predict))}, accepted: {accepted}")
    if hold_out is not None and hold_out not in sizes[1:]:
        raise CoatConfigError(f"--hold-out: got {hold_out}, accepted: a measured size but the smallest ({sizes[1:]})")
    rows = []
    for variant, own in training.items():
        held, first = hold_out or max(own), statistics.median(own[min(own)][passes])
        checked = [(max(ranks for ranks in own if ranks < held), held)] if held in own and held > min(own) else []
        for start, ranks in [*checked, *((max(own), ranks) for ranks in predict)]:
            steps = _steps(identity, variant, own[start], start, ranks, network)
            tokens = identity["micro_batch"] * passes * identity["model"]["seq_length"] / tp
            rows.append({
                "variant": variant, "from": start, "ranks": ranks, "seconds": steps,
                "tokens_per_second_per_gpu": [tokens / one for one in steps[::-1]],
                "efficiency": [first / one for one in steps[::-1]],
                "measured": statistics.median(own[held][passes]) if (start, ranks) in checked else None,
            })  # fmt: skip
    return {"rows": rows, "links": said}


def _steps(
    identity: Mapping[str, Any], variant: str, own: Mapping[int, list[float]], start: int, ranks: int, network: Network
) -> list[float]:
    """A measured step of ``start`` ranks, with the update and the collectives of ``ranks`` in place of its own."""
    settings, passes, tp = identity["settings"][variant], identity["accumulation"], identity["tensor_parallel"]
    run = Run(
        model=described_model(identity["model"], []), settings=settings, coat=CoatConfig.from_deepspeed(settings),
        tp=tp, sequence_parallel="--sequence-parallel" in identity["options"], micro=identity["micro_batch"],
        accumulation=passes,
    )  # fmt: skip
    once, twice = (statistics.median(own[count]) for count in (passes, 2 * passes))
    error, found = max(0.03, 2 * spread_of(own[passes])), []
    runs = [run.but(dp=ranks // tp), run.but(dp=start // tp), run.but(dp=start // tp, accumulation=2 * passes)]
    for case, factor in zip(CASES, (exp(-error), 1.0, exp(error)), strict=True):
        more, less, less2 = (_shown(r, data_parallel(r), network, case, once * r.accumulation / passes) for r in runs)
        # Twice the micro-batches take less than twice the time by what a step does once: the update, which ZeRO shares
        # over ranks, and collectives. More than half of a step is noise.
        update = min(once / 2, max(0.0, 2 * once - twice - (2 * less - less2))) if run.stage else 0.0
        found.append(factor * (once - update * (1 - start / ranks) + more - less))
    return found


def paper(args: Any, given: Mapping[str, Link]) -> str:
    """The table of the fastest layout that fits, for each model and number of GPUs."""
    gpu, (network, said), rows = GPUS[args.gpu], network_of((), given, args.gpus_per_node or 8), []
    for name, (sizes, overrides) in (MODELS if args.model is None else {args.model: (SIZES, ())}).items():
        for variant, run in runs_of(args, name, overrides).items():
            planned = _rows(run, args.predict or sizes, gpu, network)
            rows += [(Path(name).name.removesuffix(".json"), variant, *cells) for cells in planned]
    head = ["model", "variant", "GPUs", "TPxDP", "micro-batch", "GiB"]
    head += ["step, s", "tokens/s/GPU", "TFLOP/s/GPU", "efficiency, %"]
    return "\n".join([f"The fastest layouts that fit on {gpu.name}: {said}.", "", *table(head, rows)])


def _rows(run: Run, sizes: Sequence[int], gpu: GPU, network: Network) -> Iterator[tuple[str, ...]]:
    """Cells for each number of GPUs; efficiency is against the fewest that fit."""
    first = 0.0
    for gpus in sizes:
        # 4 Mi tokens a step up to 512 GPUs and 16 Mi above, as Llama 3's training had on 16 384.
        every = _layouts(run, gpus, 2**22 if gpus <= 512 else 2**24, network.gpus_per_node)
        timed = sorted(((planned_steps(one, gpu, network), one) for one in every), key=lambda pair: pair[0][1])
        steps, one = next((pair for pair in timed if _memory(pair[1], gpu) <= gpu.memory), ([], run))
        if not steps:
            yield f"{gpus:,}", "none fits", *("-",) * 6
            continue
        speed = one.tokens * one.accumulation / one.tp / steps[1]
        first = first or speed
        layout = f"{one.tp}x{one.dp}, ZeRO-{one.stage}" + (", recomputed" if one.recompute else "")
        batch, gib = f"{one.micro}x{one.accumulation}", f"{_memory(one, gpu) / 2**30:.0f}"
        flops = f"{speed * flops_per_token(one.model, one.model.seq_length) / 1e12:,.0f}"
        ends = f"{speed:,.0f}", flops, f"{100 * speed / first:.0f}"
        yield f"{gpus:,}", layout, batch, gib, between(steps, digits=2), *ends


def _layouts(run: Run, gpus: int, tokens: int, gpus_per_node: int) -> Iterator[Run]:
    """Tensor parallelism within a node, ZeRO over the rest, micro-batches that divide the batch."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    m, samples, zero = run.model, tokens // run.model.seq_length, run.settings.get("zero_optimization") or {}
    shared = (m.num_attention_heads, m.kv_heads, m.ffn_hidden_size, m.seq_length, gpus)
    for tp in (2**k for k in range(10) if 2**k <= gpus_per_node and not any(size % 2**k for size in shared)):
        for micro, stage in product((1, 2, 4), (1, 2, 3)):
            if samples % (gpus // tp * micro) == 0:
                one = run.but(
                    settings={**run.settings, "zero_optimization": {**zero, "stage": stage}}, tp=tp, dp=gpus // tp,
                    sequence_parallel=tp > 1, micro=micro, accumulation=samples // (gpus // tp * micro),
                )  # fmt: skip
                yield from (one, one.but(recompute=full))


def planned_steps(run: Run, gpu: GPU, network: Network) -> list[float]:
    """Seconds of a step, low, middle and high."""
    parts = step_time(run.but(accumulation=1), gpu).parts
    computing = run.accumulation * sum(parts.get(name, 0.0) for name in ("layers", "host", "loss", "gradients"))
    sent = [*tensor_parallel(run), *data_parallel(run)]
    once = computing + parts["step"]
    return [case.computing * once + _shown(run, sent, network, case, computing) for case in CASES]


def _memory(run: Run, gpu: GPU) -> int:
    """Bytes that a GPU needs; of ZeRO-3 without what building the model takes, as a large one is built in shards."""
    known = need(run, gpu)
    training = max(size for phase, size in known.peak.other_peaks.items() if phase != "building the engine")
    return int(training * (1 + MARGIN)) + known.not_torchs if run.stage == 3 else known.total
