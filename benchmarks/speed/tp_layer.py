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
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import check_peers, one_line, positive_int, preset_name
from benchmarks.common import ROOT, argument_parser, options, write_result
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
    """By name what is measured."""
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
        one["forward_ms"], one["backward_ms"] = (
            median(stage) for stage in zip(*rounds, strict=True)
        )
        sums = sorted(map(sum, rounds))
        one["ms"], one["fastest_round_ms"], one["slowest_round_ms"] = (
            median(sums),
            sums[0],
            sums[-1],
        )
    return result


def report(preset: str, model: ModelConfig, tokens: int, found: dict[str, dict[str, Any]]) -> None:
    """Print one shape's results, and add ratios to them."""
    if dist.get_rank() == 0:
        print(f"== {preset}, {tokens} tokens, {dist.get_world_size()} ranks")
    for name, one in found.items():
        one["ratio_to_bf16"] = one["ms"] / found["bf16"]["ms"]
        one["ratio_to_te_fp8"] = (
            one["ms"] / found["TE fp8 delayed"]["ms"] if "TE fp8 delayed" in found else None
        )
        one["tflops"] = flops(model, tokens) / dist.get_world_size() / one["ms"] / 1e9
        if dist.get_rank() == 0:
            to_te = one["ratio_to_te_fp8"] or float("nan")
            print(
                f"{name:<20} forward {one['forward_ms']:7.3f} backward {one['backward_ms']:7.3f} "
                f"total {one['ms']:7.3f} ms  {one['ratio_to_bf16']:.3f} x bf16  {to_te:.3f} x TE "
                "fp8  "
                f"{one['tflops']:4.0f} TFLOP/s/GPU  saved {one['saved_bytes_per_token']:,.0f} "
                "B/token  "
                f"rounds {one['fastest_round_ms']:.2f} to {one['slowest_round_ms']:.2f}",
                flush=True,
            )


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--presets",
        type=preset_name,
        nargs="+",
        default=["llama2-13b", "llama3-8b"],
        help="names in configs/models",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=positive_int, default=[16384], help=f"multiples of {SEQUENCE}"
    )
    parser.add_argument("--variants", nargs="+", default=["coat"], choices=TP_VARIANTS)
    parser.add_argument("--layers", type=positive_int, default=4)
    parser.add_argument(
        "--rounds", type=positive_int, default=3, help="how often each is measured, in turn"
    )
    parser.add_argument("--repeats", type=positive_int, default=8, help="passes of one round")
    parser.add_argument("--name", default="tp-layer", help="of the JSON result")
    parser.add_argument("--peers", help="folder with Transformer Engine, or with an archive of it")
    arguments = parser.parse_args(given)
    for tokens in arguments.tokens:
        if tokens <= 0 or tokens % SEQUENCE:
            parser.error(f"--tokens: got {tokens}, accepted: a multiple of {SEQUENCE}")
    return arguments


def main() -> None:
    arguments = parse()
    with one_line():
        models = {
            preset: load_model_config(
                ROOT / f"configs/models/{preset}.json", [f"num_layers={arguments.layers}"]
            )
            for preset in arguments.presets
        }
        if arguments.peers is not None:
            for preset, model in models.items():
                te_layer.check(preset, model)
            check_peers(arguments.peers)
    ranks = start_ranks()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        te = te_layer.load(te_layer.unpack(arguments.peers, folder)) if arguments.peers else None
        for preset, model in models.items():
            for tokens in arguments.tokens:
                found = measure(model, tokens, arguments.variants, te, arguments)
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
