"""8 to 16 384 GPUs on paper: the fastest layout that fits, what its links carry, where FP8 on the wire pays.

Everything that is computed here is an estimate. Its assumptions are the constants below, the planner's rates and, in
place of the links below, ``--link``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, write_text
from launch.log_level import say
from launch.model.config import ModelConfig
from launch.model.gpt import load_model_config
from launch.planning.gpus import GPU, GPUS
from launch.planning.run import Run
from launch.planning.search import with_block, without_block
from launch.training.settings import load_settings

from .arguments import links
from .layout import FULL, Layout, layouts
from .links import Group, Link, Network
from .paper_tables import markdown
from .traffic import sent

__all__ = ["MODELS", "SIZES", "best_layout", "network_of", "paper"]

MODELS = {"llama2-7b": (), "llama3-70b": (), "llama3.1-405b": ("seq_length=8192",)}
SIZES = (8, 64, 512, 2048, 16384)
NVLINK = Link("nvlink", 240e9, 3e-6, start=18e-6, best=450 / 240, worst=0.85)
"""Two H200s: an all-gather of 8192 x 4096 takes 161 us in BF16 and 91 us in FP8, so 240 GB/s and 21 us; at best the 450
GB/s each way of NVLink 4's data sheet."""
NIC = Link("nic", 40e9, 8e-6, start=18e-6, best=1.2, worst=0.75)
"""A 400 Gb/s card for each GPU (data sheets of DGX H100 and ConnectX-7): 50 GB/s, of which 80 % are taken to arrive, 60
to 96 % at worst and best. Not measured, as its latency is not."""


def batch_tokens(gpus: int) -> int:
    """Tokens of a step: 4 Mi up to 512 GPUs, 16 Mi above, as Llama 3's training had on 16 384."""
    return 2**22 if gpus <= 512 else 2**24


def network_of(args: Any) -> Network:
    """The links above, or those that were given."""
    given = links(args)
    return Network(given.get("inside", NVLINK), given.get("between", NIC), args.gpus_per_node or 8)


def best_layout(run: Run, gpus: int, gpu: GPU, network: Network) -> Layout | None:
    """The fastest layout of ``run``'s model and settings that fits; None where none does."""
    every = layouts(run.model, run.settings, run.coat, gpus, batch_tokens(gpus), network.gpus_per_node)
    for one in sorted(every, key=lambda one: one.step(gpu, network).middle):
        if one.memory(gpu) <= gpu.memory:
            return one
    return None


def _runs(args: Any) -> dict[str, dict[str, Run]]:
    """Of each model, with the block and without."""
    settings, coat = load_settings(args.deepspeed_config, tp=1)
    chosen: Mapping[str, Sequence[str]] = MODELS if args.model is None else {args.model: ()}
    found = {}
    for name, overrides in chosen.items():
        model: ModelConfig = load_model_config(name, [*overrides, *args.model_override])
        model = model if args.vocab_size is None else model.with_vocab(args.vocab_size)
        if model.vocab_size is None:
            raise CoatConfigError("model.vocab_size: got null, accepted: a number, or --vocab-size")
        run = Run(model=model, settings=settings, coat=coat)
        found[Path(name).name.removesuffix(".json")] = {"coat": with_block(run), "bf16": without_block(run)}
    return found


def paper(args: Any) -> None:
    """Print the tables; with ``--output`` also write them, as Markdown and JSON.

    Raises:
        CoatConfigError: a setting that cannot be planned.
        OSError: ``--output`` cannot be written.
    """
    gpu, network = GPUS[args.gpu], network_of(args)
    sizes = args.predict or SIZES
    rows: list[dict[str, Any]] = []
    for name, variants in _runs(args).items():
        for gpus in sizes:
            for variant, run in variants.items():
                found = best_layout(run, gpus, gpu, network)
                rows.append({"model": name, "gpus": gpus, "variant": variant, **_row(found, gpu, network)})
    answer = {
        "gpu": gpu.name,
        "rows": rows,
        "wire": _wire(network),
        "zero3": _zero3(args, gpu, network, sizes),
        "published": [] if args.model is not None else _published(gpu, network),
    }
    text = markdown(answer)
    say(text)
    if args.output is not None:
        place = Path(args.output)
        make_folder(place)
        write_text(place / "paper.json", json.dumps(answer, indent=1))
        write_text(place / "paper.md", text)


def _row(one: Layout | None, gpu: GPU, network: Network) -> dict[str, Any]:
    if one is None:
        return {"layout": None}
    step = one.step(gpu, network)
    speed = [one.tokens / seconds / one.gpus for seconds in (step.high, step.middle, step.low)]
    run = one.run
    return {
        "layout": one.name(),
        "tensor": run.tp,
        "pipeline": one.pp,
        "virtual": one.virtual,
        "data": run.dp,
        "zero_stage": run.stage,
        "micro_batch": run.micro,
        "micro_batches": run.accumulation,
        "tokens": one.tokens,
        "memory_bytes": one.memory(gpu),
        "bubble": one.bubble,
        "seconds": step._asdict(),
        "parts": {name: part.middle for name, part in one.seconds(gpu, network).items()},
        "tokens_per_second_per_gpu": dict(zip(("low", "middle", "high"), speed, strict=True)),
        "model_flops": one.flops(step.middle),
        "carried_bytes": one.carried(network),
        "carried_without": _plain(one).carried(network),
    }


def _plain(one: Layout) -> Layout:
    """The same layout without the block: what its links would carry in BF16."""
    return replace(one, run=without_block(one.run), fp8_weights=None)


_WIRE_GROUPS = (
    ("2 GPUs of a node", Group(2, 2)),
    ("8 GPUs of a node", Group(8, 8)),
    ("8 nodes, all GPUs", Group(64, 8)),
    ("8 nodes, a GPU each", Group(8, 1)),
    ("256 nodes, a GPU each", Group(256, 1)),
)


def _wire(network: Network) -> list[dict[str, Any]]:
    """Gathers of BF16, of FP8 codes, and of FP8 codes after the all-reduce by which ranks agree on their scales."""
    found = []
    for name, group in _WIRE_GROUPS:
        scales = network.seconds("all_reduce", group, 0).middle
        for size in (2**20, 2**24, 2**26, 2**28):
            wide, narrow = (network.seconds("all_gather", group, size / part).middle for part in (1, 2))
            found.append(
                {"group": name, "bytes": size, "bf16": wide, "fp8": narrow, "fp8_after_scales": narrow + scales}
            )
    return found


def _zero3(args: Any, gpu: GPU, network: Network, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """ZeRO-3 alone, gathers of weights in BF16 and in FP8; a sample a rank and step."""
    found = []
    for name, variants in _runs(args).items():
        run = variants["coat"]
        zero = {**run.settings["zero_optimization"], "stage": 3}
        for gpus in (size for size in sizes if size <= 512):
            one = Layout(run.but(settings={**run.settings, "zero_optimization": zero}, dp=gpus, micro=1))
            if one.memory(gpu) > gpu.memory:
                one = replace(one, run=one.run.but(recompute=FULL))
            both = {}
            for kind, fp8 in (("bf16", False), ("fp8", True)):
                way = replace(one, fp8_weights=fp8)
                gathers = [part for part in way.parts() if part.kind == "all_gather"]
                both[kind] = {"seconds": way.step(gpu, network)._asdict(), "gathered_bytes": sent(gathers, gpus)}
            found.append(
                {
                    "model": name,
                    "gpus": gpus,
                    "memory_bytes": one.memory(gpu),
                    "recomputed": bool(one.run.recompute),
                    **both,
                }
            )
    return found


def _published(gpu: GPU, network: Network) -> list[dict[str, Any]]:
    """The layout in which Llama 3.1 405B was trained on 16 384 H100s, in BF16, at 400 TFLOP/s a GPU (arXiv 2407.21783,
    Table 4); with 4 chunks a stage, which are not said there."""
    settings, coat = load_settings("zero1", tp=1)
    model = load_model_config("llama3.1-405b", ["seq_length=8192"])
    run = Run(model=model, settings=settings, coat=coat, dp=128, tp=8, sequence_parallel=True, accumulation=16)
    found = []
    for variant, one in (("bf16", without_block(run)), ("coat", with_block(run))):
        layout = Layout(one, pp=16, virtual=4)
        step = layout.step(gpu, network)
        flops = dict(zip(("low", "middle", "high"), (layout.flops(s) for s in step[::-1]), strict=True))
        found.append({"variant": variant, "layout": layout.name(), "flops": flops, "memory_bytes": layout.memory(gpu)})
    return found
