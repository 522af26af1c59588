"""Transformer layers over tensor-parallel ranks with sequence parallelism: time as BF16, patched,
and of a peer.

    torchrun --nproc_per_node 2 -m benchmarks.speed.tp_layer [--presets llama2-13b llama3-8b] \\
        [--peers DIR]

As ``layer.py`` measures them on one GPU; the slowest rank counts. Everything is measured in one
process, several rounds in turn, and medians of rounds are compared. With ``--peers`` Transformer
Engine's layers are among it: DIR has the package ``transformer_engine``, or an archive of it, which
is unpacked into a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import argument_parser, check_multiples, check_peers, one_line
from benchmarks.common import options, show, write_result
from benchmarks.speed import te_layer
from benchmarks.speed.collectives import TP_VARIANTS, start_ranks, variant
from benchmarks.speed.layer import SEQUENCE, flops, stack
from benchmarks.timing import median, stages_ms
from launch.model.gpt import ModelConfig, load_model_config

Run = tuple[Callable[[], torch.Tensor], torch.nn.Module, torch.Tensor, Any]
"""A function that runs the layers, the layers, their input, and a context in which to call it."""


def saved_bytes(
    forward: Callable[[], torch.Tensor], x: torch.Tensor, gpt: torch.nn.Module
) -> tuple[float, float]:
    """Bytes that this rank's allocator holds between forward and backward, and the peak of both."""
    forward().sum().backward()
    x.grad = None
    gpt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = forward()
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    y.sum().backward()
    return saved, torch.cuda.max_memory_allocated() - before


def times(forward: Callable[[], torch.Tensor], repeats: int) -> list[float]:
    """Median milliseconds of forward and of backward, of the slowest rank."""
    dy = torch.randn_like(forward())
    for _ in range(2):
        forward().backward(dy)
    outputs: list[torch.Tensor] = []
    dist.barrier()
    found = stages_ms(
        (lambda: outputs.append(forward()), lambda: outputs.pop().backward(dy)), repeats
    )
    slowest = torch.tensor(found, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


@contextmanager
def runs(
    model: ModelConfig, tokens: int, variants: Sequence[str], te: Any
) -> Iterator[dict[str, Run]]:
    """What is measured, by name."""
    forward, gpt, x = stack(model, tokens, dist.get_world_size())
    found: dict[str, Run] = {"bf16": (forward, gpt, x, nullcontext)}
    found |= {name: (forward, gpt, x, partial(variant, gpt, name)) for name in variants}
    for name, recipe in te_layer.RECIPES.items() if te is not None else ():
        found[name] = (*te_layer.stack(te, model, tokens, recipe, SEQUENCE), nullcontext)
    yield found
    found.clear()
    del forward, gpt, x
    torch.cuda.empty_cache()


def measure(
    model: ModelConfig, tokens: int, variants: Sequence[str], te: Any, arguments
) -> dict[str, dict[str, Any]]:
    """Milliseconds, bytes saved a token of the whole sequence, and peak, a layer and rank, by
    name.
    """
    result: dict[str, dict[str, Any]] = {}
    with runs(model, tokens, variants, te) as found:
        for name, (forward, module, x, context) in found.items():
            with context():
                saved, peak = saved_bytes(forward, x, module)
            result[name] = {
                "saved_bytes_per_token": saved / model.num_layers / tokens,
                "peak_bytes": peak,
                "rounds": [],
            }
        for _ in range(arguments.rounds):
            for name, (forward, _, _, context) in found.items():
                with context():
                    result[name]["rounds"].append(
                        [t / model.num_layers for t in times(forward, arguments.repeats)]
                    )
    for one in result.values():
        rounds = one.pop("rounds")
        one["forward_ms"] = median([forward for forward, _ in rounds])
        one["backward_ms"] = median([backward for _, backward in rounds])
        sums = sorted(map(sum, rounds))
        one["ms"] = median(sums)
        one["fastest_round_ms"], one["slowest_round_ms"] = sums[0], sums[-1]
    return result


def report(preset: str, model: ModelConfig, tokens: int, found: dict[str, dict[str, Any]]) -> None:
    """Print one shape's results, and add ratios to them."""
    ranks, te = dist.get_world_size(), found.get("TE fp8 delayed")
    print(f"== {preset}, {tokens} tokens, {ranks} ranks")
    for name, one in found.items():
        one["ratio_to_bf16"] = one["ms"] / found["bf16"]["ms"]
        one["ratio_to_te_fp8"] = one["ms"] / te["ms"] if te else None
        one["tflops"] = flops(model, tokens) / ranks / one["ms"] / 1e9
        show(
            name,
            one,
            forward_ms=".3f",
            backward_ms=".3f",
            ms=".3f",
            ratio_to_bf16=".3f",
            ratio_to_te_fp8=".3f",
            tflops=".0f",
            saved_bytes_per_token=",.0f",
            fastest_round_ms=".2f",
            slowest_round_ms=".2f",
        )


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        presets=["llama2-13b", "llama3-8b"],
        tokens=[16384],
        layers=4,
        rounds=3,
        repeats=8,
        name="tp-layer",
        peers=None,
    )
    parser.add_argument("--variants", nargs="+", default=["coat"], choices=TP_VARIANTS)
    arguments = parser.parse_args(given)
    check_multiples(parser, "--tokens", arguments.tokens, SEQUENCE)
    return arguments


def main() -> None:
    arguments = parse()
    with one_line():
        models = {}
        for preset in arguments.presets:
            models[preset] = load_model_config(preset, [f"num_layers={arguments.layers}"])
            if arguments.peers is not None:
                te_layer.check(preset, models[preset])
        if arguments.peers is not None:
            check_peers(arguments.peers)
    ranks = start_ranks()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        te = te_layer.load(te_layer.unpack(arguments.peers, folder)) if arguments.peers else None
        for preset, model in models.items():
            for tokens in arguments.tokens:
                found = measure(model, tokens, arguments.variants, te, arguments)
                with nullcontext() if dist.get_rank() == 0 else redirect_stdout(None):
                    report(preset, model, tokens, found)
                results.append({"preset": preset, "tokens": tokens, "runs": found})
    if dist.get_rank() == 0:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        settings = options(arguments) | {"ranks": ranks, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
        path = write_result(
            f"speed/{arguments.name}", {"settings": settings, "results": results}, arguments.output
        )
        print("wrote", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
