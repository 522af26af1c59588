"""From measurements to tables: weak and strong scaling, fits, a size that is held out, larger clusters."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from coat_dist import CoatConfig, CoatConfigError
from launch.model.config import described_model
from launch.planning.run import Run

from .links import Link, Range
from .network import Measured, of_records
from .steps import Cost, Point, StepFit, fit_steps, spread_of
from .traffic import data_parallel

__all__ = ["analyse"]


def analyse(
    there: Mapping[str, Any],
    predict: Sequence[int] = (),
    links: Mapping[str, Link] | None = None,
    gpus_per_node: int | None = None,
    hold_out: int | None = None,
) -> dict[str, Any]:
    """Everything that is said of measurements, as plain values; times in seconds, bandwidths in bytes a second.

    Args:
        there: what ``measured.json`` holds.
        hold_out: ranks that are predicted from fewer and compared; None = the most, if three sizes were measured.

    Raises:
        CoatConfigError: ``hold_out`` was not measured; ``predict`` where no training was; either needs a link that
            nobody knows.
    """
    identity, good = there["identity"], [one for one in there["records"] if "failed" not in one]
    node = gpus_per_node or (identity["gpus_per_node"] if identity["nodes"] > 1 else max(8, identity["gpus_per_node"]))
    collectives = [one for one in good if one["key"]["what"] == "collectives"]
    training = [one for one in good if one["key"]["what"] == "training"]
    network = of_records(collectives, node, links or {})
    sizes = sorted({one["ranks"] for one in (training or collectives)})
    if hold_out is not None and (hold_out not in sizes or hold_out == sizes[0]):
        raise CoatConfigError(
            f"--hold-out: got {hold_out}, accepted: a measured number of ranks that has smaller ones beside it "
            f"({', '.join(map(str, sizes[1:])) or 'none here'})"
        )
    if predict and not training:
        raise CoatConfigError(
            f"--predict: got {', '.join(map(str, predict))}, accepted: only of measured training steps; none is here"
        )
    held = hold_out or (sizes[-1] if len(sizes) > 2 else None)
    found: dict[str, Any] = {
        "identity": identity,
        "gpus_per_node": node,
        "collectives": _collectives(network),
        "steps": _steps(training, identity),
        "fits": {},
        "held_out": [],
        "predictions": [],
        "failed": [
            {**one["key"], "ranks": one["ranks"], "why": one["failed"]} for one in there["records"] if "failed" in one
        ],
        "missing": {kind: why for one in collectives for kind, why in one["missing"].items()},
        "left_out": {},
    }
    if held is not None:
        found["held_out"] += _held_collectives(collectives, held, node)
    for variant in dict.fromkeys(one["key"]["variant"] for one in training):
        own = [one for one in training if one["key"]["variant"] == variant]
        if held is not None and any(one["ranks"] < held for one in own):
            known = of_records([one for one in collectives if one["ranks"] < held], node, links or {})
            try:
                fitted = _fit([one for one in own if one["ranks"] < held], there, variant, known)
                found["held_out"] += _held_steps([one for one in own if one["ranks"] == held], fitted, variant)
            except CoatConfigError as problem:  # collectives were not measured, or failed
                if hold_out is not None:
                    raise
                found["left_out"][f"{variant}, the check on {held} ranks"] = str(problem)
        try:
            fitted = _fit(own, there, variant, network)
        except CoatConfigError as problem:
            if predict:
                raise
            found["left_out"][f"{variant}, what steps are made of"] = str(problem)
            continue
        found["fits"][variant] = {
            "micro_batch": fitted.micro,
            "update": fitted.update,
            "shows": fitted.shows,
            "shows_error": fitted.shows_error,
        }
        found["predictions"] += _predictions(fitted, variant, predict, found["steps"], identity)
    return found


def _collectives(network: Measured) -> list[dict[str, Any]]:
    found = []
    for where in ("inside", "between"):
        for kind, one in getattr(network, where).items():
            hidden = network.overlap.get(kind)
            found.append(
                {
                    "kind": kind,
                    "where": where,
                    "ranks": one.ranks,
                    "shape": one.shape,
                    "shapes": [other.shape for other in one.fits],
                    "latency": one.latency,
                    "latency_error": one.latency_error,
                    "bandwidth": one.bandwidth if isfinite(one.bandwidth) else None,
                    "bandwidth_error": one.bandwidth_error if isfinite(one.bandwidth_error) else None,
                    "scatter": one.best.scatter,
                    "overlap": None if hidden is None else hidden.part,
                    "overlap_error": None if hidden is None else hidden.error,
                    "overlap_lost": None if hidden is None else hidden.lost,
                    "samples": one.samples,
                }
            )
    return found


def _tokens(identity: Mapping[str, Any], ranks: int, accumulation: int) -> int:
    dp = ranks // identity["tensor_parallel"]
    return identity["micro_batch"] * accumulation * dp * identity["model"]["seq_length"]


def _steps(training: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the tables of weak and strong scaling, each with its efficiency against the fewest ranks."""
    rows = []
    largest = max((one["key"]["most"] for one in training), default=0)
    for one in training:
        most = one["key"]["most"]
        for measured in one["steps"]:
            accumulation, seconds = measured["accumulation"], statistics.median(measured["seconds"])
            modes = ["weak"] if accumulation == identity["accumulation"] else []
            # Of an earlier call with fewer ranks at most, the batch of strong scaling was another.
            if (
                one["key"]["strong"]
                and most == largest
                and accumulation * one["ranks"] == identity["accumulation"] * most
            ):
                modes.append("strong")
            for mode in modes:
                tokens = _tokens(identity, one["ranks"], accumulation)
                rows.append(
                    {
                        "variant": one["key"]["variant"],
                        "mode": mode,
                        "ranks": one["ranks"],
                        "accumulation": accumulation,
                        "seconds": seconds,
                        "spread": spread_of(measured["seconds"]),
                        "tokens_per_second": tokens / seconds,
                        "tokens_per_second_per_gpu": tokens / seconds / one["ranks"],
                        "peak_memory_bytes": one["peak_memory_bytes"],
                    }
                )
    rows.sort(key=lambda row: (row["mode"] != "weak", row["variant"] != "coat", row["ranks"]))
    for row in rows:
        first = next(r for r in rows if (r["variant"], r["mode"]) == (row["variant"], row["mode"]))
        row["efficiency"] = row["tokens_per_second_per_gpu"] / first["tokens_per_second_per_gpu"]
    return rows


def _run(there: Mapping[str, Any], variant: str, ranks: int, accumulation: int) -> Run:
    identity = there["identity"]
    settings = identity["settings"][variant]
    return Run(
        model=described_model(identity["model"], []),
        settings=settings,
        coat=CoatConfig.from_deepspeed(settings),
        tp=identity["tensor_parallel"],
        dp=ranks // identity["tensor_parallel"],
        sequence_parallel="--sequence-parallel" in identity["options"],
        micro=identity["micro_batch"],
        accumulation=accumulation,
    )


def _fit(own: Sequence[Mapping[str, Any]], there: Mapping[str, Any], variant: str, network: Measured) -> StepFit:
    identity = there["identity"]
    tp = identity["tensor_parallel"]
    points = [
        Point(
            one["ranks"], m["accumulation"], statistics.median(m["seconds"]), spread_of(m["seconds"]), len(m["seconds"])
        )
        for one in own
        for m in one["steps"]
    ]

    def cost(ranks: int, accumulation: int) -> Cost:
        total = Range(0.0, 0.0, 0.0)
        if ranks > tp:
            group = network.group(ranks // tp, stride=tp)
            for part in data_parallel(_run(there, variant, ranks, accumulation)):
                total = total.plus(network.seconds(part.kind, group, part.size).times(part.count))
        crowded = 1.0
        if identity["device"] == "cpu":  # ranks of a node share its cores
            crowded = max(1.0, min(ranks, identity["gpus_per_node"]) * identity["threads"] / identity["cores"])
        return Cost(ranks / tp, total, Range(1.0, crowded, crowded))

    return fit_steps(points, cost)


def _held_steps(held: Sequence[Mapping[str, Any]], fitted: StepFit, variant: str) -> list[dict[str, Any]]:
    found = []
    for one in held:
        for measured in one["steps"]:
            said = fitted.seconds(one["ranks"], measured["accumulation"])
            seconds = statistics.median(measured["seconds"])
            found.append(
                {
                    "what": f"step, {variant}, {measured['accumulation']} micro-batches",
                    "ranks": one["ranks"],
                    "low": said.low,
                    "predicted": said.middle,
                    "high": said.high,
                    "measured": seconds,
                    "inside": said.holds(seconds),
                }
            )
    return found


def _held_collectives(collectives: Sequence[Mapping[str, Any]], held: int, node: int) -> list[dict[str, Any]]:
    """Each kind's largest message on the ranks that are held out."""
    known = of_records([one for one in collectives if one["ranks"] < held], node, {})
    found = []
    for record in collectives:
        if record["ranks"] != held or record["a_node"] != held:
            continue
        largest = {one["kind"]: one for one in sorted(record["samples"], key=lambda one: one["size"])}
        for kind, one in largest.items():
            if kind not in known.inside or one["ranks"] != held:
                continue
            said = known.inside[kind].seconds(one["ranks"], one["size"])
            found.append(
                {
                    "what": f"{kind}, {one['size']} bytes",
                    "ranks": held,
                    "low": said.low,
                    "predicted": said.middle,
                    "high": said.high,
                    "measured": one["seconds"],
                    "inside": said.holds(one["seconds"]),
                }
            )
    return found


def _predictions(
    fitted: StepFit,
    variant: str,
    predict: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    identity: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Weak scaling on more ranks."""
    found, accumulation = [], identity["accumulation"]
    first = next(row for row in rows if row["variant"] == variant and row["mode"] == "weak")
    for ranks in predict:
        if ranks % identity["tensor_parallel"]:
            raise CoatConfigError(
                f"--predict: got {ranks}, accepted: multiples of --tensor-parallel ({identity['tensor_parallel']})"
            )
        said = fitted.seconds(ranks, accumulation)
        tokens = _tokens(identity, ranks, accumulation)
        each = Range(*(tokens / ranks / seconds for seconds in (said.high, said.middle, said.low)))
        found.append(
            {
                "variant": variant,
                "ranks": ranks,
                "seconds": said._asdict(),
                "tokens_per_second": each.times(ranks)._asdict(),
                "tokens_per_second_per_gpu": each._asdict(),
                "efficiency": each.times(1 / first["tokens_per_second_per_gpu"])._asdict(),
            }
        )
    return found
