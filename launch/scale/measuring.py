"""The measurements of a run of ``scaling.py``, one after another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import write_text
from launch.common.command_line import RunOptions
from launch.common.log_level import say
from launch.common.settings import MICRO, STEPS, load_settings
from launch.model.gpt import load_model_config

from .crew import Crew
from .scaling_options import ScalingOptions
from .timed_steps import plan_of

__all__ = ["FILE", "identity_of", "jobs", "measure"]

FILE = "measured.json"
_VOCABULARY = 32_000  # Llama 2's, of a model that names none: its tokens are random anyway


def identity_of(args: ScalingOptions, crew: Crew) -> dict[str, Any]:
    """What is trained and on what, as plain values; CoatConfigError names settings that cannot
    be used.
    """
    found: dict[str, Any] = {
        "tensor_parallel": args.tensor_parallel,
        "world": crew.world,
        "nodes": crew.nodes,
        "gpus_per_node": crew.per_node,
        # Until a measurement names it: this process must not hold memory of a GPU.
        "device": "unknown",
        "versions": {"torch": torch.__version__},
        "settings": {},
    }
    if args.only == "collectives":
        return found
    model = load_model_config(str(args.model), args.model_override)
    if args.vocab_size is not None or model.vocab_size is None:
        model = model.with_vocab(args.vocab_size or _VOCABULARY)
    variants = {
        Path(given).stem: load_settings(given, tp=args.tensor_parallel)[0]
        for given in args.deepspeed_config
    }
    first, *_ = variants.values()
    micro = args.micro_batch or first.get(MICRO)
    if not isinstance(micro, int):
        raise CoatConfigError(
            f"{MICRO}: got {micro!r}, accepted: an integer >= 1, or --micro-batch"
        )
    return found | {
        "model_name": args.model,
        "model": model.model_dump(exclude_defaults=True, mode="json"),
        "settings": variants,
        "options": {one.name: getattr(args, one.name) for one in fields(RunOptions)},
        "micro_batch": micro,
        "accumulation": args.accumulation or first.get(STEPS) or 1,
    }


def jobs(
    args: ScalingOptions, identity: Mapping[str, Any], sizes: Sequence[int], crew: Crew
) -> list[dict[str, Any]]:
    """What is to be measured on the first ``nodes`` and ``a_node`` ranks of each;
    CoatConfigError names what cannot.
    """
    found: list[dict[str, Any]] = []
    shapes = [(max(1, size // crew.per_node), min(size, crew.per_node)) for size in sizes]
    if args.only != "training":
        apart = [(2**k, 1) for k in range(1, 20) if 2**k <= crew.nodes]  # the link between nodes
        for nodes, a_node in dict.fromkeys(shapes + apart):
            if nodes * a_node > 1:
                found.append(
                    {
                        "what": "collectives",
                        "nodes": nodes,
                        "a_node": a_node,
                        "sizes": args.message_sizes,
                    }
                )
    most, strong = max(sizes), not args.no_strong
    for size, (nodes, a_node) in zip(sizes, shapes, strict=True):
        for variant in identity["settings"]:
            weak = identity["accumulation"]
            passes = {weak}
            if strong and weak * most % size == 0:
                passes.add(weak * most // size)
            job = {
                "what": "training",
                "nodes": nodes,
                "a_node": a_node,
                "variant": variant,
                "most": most,
            }
            job |= {
                "strong": strong,
                "accumulations": sorted(passes),
                "warmup": args.warmup,
                "steps": args.steps,
            }
            plan_of({**job, "identity": identity}, size)
            found.append(job)
    return [{**job, "timeout": 60 * args.timeout_minutes} for job in found]


def measure(
    crew: Crew, identity: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, Any]:
    """Run this node's part of the jobs; on node 0 what :data:`FILE` holds, which is written
    after every measurement.
    """
    there: dict[str, Any] = {"format": 1, "identity": dict(identity), "records": []}
    for number, job in enumerate(jobs):
        found, ranks = (
            crew.measure(number, {**job, "identity": identity}),
            job["nodes"] * job["a_node"],
        )
        if crew.node:
            continue
        name = (
            f"{job['what']}{', ' + job['variant'] if 'variant' in job else ''} on {ranks} of "
            f"{crew.world} ranks"
        )
        if "failed" in found:
            say(f"{name}: failed: {found['failed']}", "warning")
        else:
            say(f"{name}: measured")
            there["identity"]["device"] = found["device"]
        there["records"].append({"key": job, "ranks": ranks, "a_node": job["a_node"], **found})
        write_text(folder / FILE, json.dumps(there, indent=1))
    return there
