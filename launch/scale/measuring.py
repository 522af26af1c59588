"""The measurements of a run of ``scaling.py``, one after another: those that are not done yet."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coat_dist import CoatConfig, CoatConfigError
from launch.log_level import say
from launch.model.gpt import load_model_config
from launch.plan.run import Run
from launch.plan.search import with_block, without_block
from launch.train.settings import MICRO, STEPS, load_settings

from .crew import Crew, Failed
from .records import Records
from .train import plan_of

__all__ = ["check", "identity_of", "jobs", "machine", "measure", "runs_of"]

VOCABULARY = 32_000
"""Llama 2's, of a model that names none: its tokens are random anyway."""


def identity_of(args: Any) -> dict[str, Any]:
    """What is trained, as plain values, without the machine; checked.

    Raises:
        CoatConfigError: settings that cannot be used.
    """
    if args.only == "collectives":
        return {
            "model_name": None,
            "model": None,
            "settings": {},
            "options": [],
            "tensor_parallel": args.tensor_parallel,
        }
    runs = runs_of(args, args.model)
    settings = runs["coat"].settings
    micro = args.micro_batch or settings.get(MICRO)
    if not isinstance(micro, int) or isinstance(micro, bool) or micro < 1:
        raise CoatConfigError(f"{MICRO}: got {micro!r}, accepted: an integer >= 1, or --micro-batch")
    options = ["--tensor-parallel", str(args.tensor_parallel)]
    options += ["--sequence-parallel"] if args.sequence_parallel else []
    for name in ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"):
        value = getattr(args, name)
        if value is not None:
            options += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    accumulation = args.accumulation or settings.get(STEPS) or 1
    return {
        "model_name": args.model,
        "model": runs["coat"].model.model_dump(exclude_defaults=True, mode="json"),
        "settings": {name: dict(runs[name].settings) for name in args.variants},
        "options": options,
        "tensor_parallel": args.tensor_parallel,
        "micro_batch": micro,
        "accumulation": accumulation,
    }


def runs_of(args: Any, model_name: str, overrides: Sequence[str] = ()) -> dict[str, Run]:
    """The run with the "coat" block and without.

    Raises:
        CoatConfigError: settings that cannot be used.
    """
    settings, coat = load_settings(args.deepspeed_config, tp=args.tensor_parallel)
    model = load_model_config(model_name, [*overrides, *args.model_override])
    if args.vocab_size is not None or model.vocab_size is None:
        model = model.with_vocab(args.vocab_size or VOCABULARY)
    run = Run(model=model, settings=settings, coat=coat, tp=args.tensor_parallel)
    return {"coat": with_block(run), "bf16": without_block(run)}


def jobs(args: Any, identity: Mapping[str, Any], sizes: list[int], nodes: list[str]) -> Iterator[dict[str, Any]]:
    """What is to be measured, the quick things first; ``group`` are the ranks."""
    most = max(sizes)
    shared = {"timeout": 60 * args.timeout_minutes}
    if args.only != "training":
        groups = [list(range(size)) for size in sizes if size > 1]
        firsts = [nodes.index(node) for node in dict.fromkeys(nodes[:most])]
        groups += [firsts[:size] for size in (2**k for k in range(1, 20)) if size <= len(firsts)]
        for group in dict.fromkeys(map(tuple, groups)):
            yield {"what": "collectives", "sizes": list(args.message_sizes or ()), "group": list(group), **shared}
    if args.only == "collectives":
        return
    for size in sizes:
        for variant in args.variants:
            yield {
                "what": "training",
                "variant": variant,
                "group": list(range(size)),
                "most": most,
                "strong": not args.no_strong,
                "settings": identity["settings"][variant],
                "model": identity["model"],
                "options": identity["options"],
                "micro": identity["micro_batch"],
                "accumulations": _accumulations(identity["accumulation"], size, most, not args.no_strong),
                "warmup": args.warmup,
                "steps": args.steps,
                **shared,
            }


def _accumulations(weak: int, size: int, most: int, strong: bool) -> list[int]:
    """Weak scaling's; twice that, to tell computing from the update; strong scaling's, where it is whole."""
    found = {weak, 2 * weak}
    if strong and weak * most % size == 0:
        found.add(weak * most // size)
    return sorted(found)


def check(args: Any, identity: Mapping[str, Any], sizes: list[int]) -> None:
    """Whether every training that will be measured can be: before anything is started.

    Raises:
        CoatConfigError: names what cannot be used.
    """
    for job in jobs(args, identity, sizes, ["here"] * max(sizes)):
        if job["what"] == "training":
            plan_of(job, len(job["group"]))
            Run(
                model=load_model_config(args.model, args.model_override),
                settings=job["settings"],
                coat=CoatConfig.from_deepspeed(job["settings"]),
            )


_KEY = ("what", "variant", "group", "most", "strong", "accumulations", "warmup", "steps", "sizes")


def measure(args: Any, crew: Crew, identity: Mapping[str, Any], sizes: list[int], records: Records) -> int:
    """Do what is not done; how many measurements failed."""
    nodes = [one.node for one in crew.members]
    failed = 0
    for job in jobs(args, identity, sizes, nodes):
        key = {name: job[name] for name in _KEY if name in job}
        group = job.pop("group")
        name = f"{job['what']}{', ' + job['variant'] if 'variant' in job else ''} on {len(group)} of {len(nodes)} ranks"
        if records.done(key):
            say(f"{name}: measured before")
            continue
        among = [nodes[rank] for rank in group]
        about = {"ranks": len(group), "a_node": max(among.count(node) for node in among)}
        try:
            found = crew.measure(job, group)
            say(f"{name}: {_said(found)}")
        except Failed as problem:
            failed += 1
            found = {"failed": str(problem)}
            say(f"{name}: failed: {problem}", "warning")
        records.add(key, {**about, **found})
    return failed


def _said(found: Mapping[str, Any]) -> str:
    if "steps" in found:
        return ", ".join(
            f"{1e3 * statistics.median(one['seconds']):.1f} ms a step of {one['accumulation']}"
            for one in found["steps"]
        )
    kinds = len({one["kind"] for one in found["samples"]})
    return f"{kinds} kinds, {len(found['samples'])} times"


def machine(crew: Crew) -> dict[str, Any]:
    """What is measured on."""
    import torch

    nodes = [one.node for one in crew.members]
    gpu = torch.cuda.is_available()
    return {
        "world": len(nodes),
        "nodes": len(set(nodes)),
        "gpus_per_node": max(nodes.count(node) for node in nodes),
        "device": _gpu_name() if gpu else "cpu",
        "backend": "nccl" if gpu else "gloo",
        "cores": len(os.sched_getaffinity(0)),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or 1),
        "versions": {"torch": torch.__version__},
    }


def _gpu_name() -> str:
    """Asked in a process of its own: this one must not hold memory of a GPU that others measure."""
    asked = "import torch; print(torch.cuda.get_device_name())"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "GPU"
