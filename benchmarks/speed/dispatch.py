"""Tokens to experts of other ranks: the all-to-all in BF16, and FP8 codes and row scales as patched layers send them.

    torchrun --nproc_per_node 2 -m benchmarks.speed.dispatch [--tokens 4096 16384] [--hidden 4096] [--topk 2]

Every rank sends as many rows to each rank. Forward includes quantizing and reading back; the median of ``--repeats``,
timed with events on a GPU. Bytes are those that one rank hands to the collectives, its own share included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, options, write_result
from coat_dist.config import ActivationConfig
from coat_dist.flow import dispatch_rows
from launch.training.runtime import start

__all__ = ["main"]


class _BF16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        dx = torch.empty_like(dy)
        dist.all_to_all_single(dx, dy.contiguous())
        return dx


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of ``run``; the slowest rank's."""
    taken = []
    for _ in range(repeats + 2):
        dist.barrier()
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            taken.append(first.elapsed_time(last))
        else:
            began = time.perf_counter()
            run()
            taken.append((time.perf_counter() - began) * 1e3)
    slowest = torch.tensor([statistics.median(taken[2:])], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def measure(rows: int, hidden: int, device: torch.device, repeats: int) -> dict[str, dict[str, float]]:
    """By variant: milliseconds and bytes of forward and backward for ``rows`` rows a rank."""
    world = dist.get_world_size()
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    dy, splits = torch.randn_like(x), [rows // world] * world
    group = dist.distributed_c10d._get_default_group()
    both = ActivationConfig(expert_dispatch_grad="fp8")
    variants: dict[str, tuple[Callable[..., torch.Tensor], int, int]] = {
        "bf16": (_BF16.apply, 2 * hidden, 2 * hidden),
        "fp8": (lambda t: dispatch_rows(t, group, splits, splits, ActivationConfig()), hidden + 4, 2 * hidden),
        "fp8, gradients too": (lambda t: dispatch_rows(t, group, splits, splits, both), hidden + 4, hidden + 4),
    }
    found = {}
    for name, (send, forward, backward) in variants.items():
        leaf = x.clone().requires_grad_()
        y = send(leaf)
        found[name] = {
            "forward_ms": milliseconds(partial(send, leaf), device, repeats),
            "backward_ms": milliseconds(partial(torch.autograd.grad, y, leaf, dy, retain_graph=True), device, repeats),
            "forward_bytes": rows * forward,
            "backward_bytes": rows * backward,
        }
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", nargs="+", type=positive_int, default=[4096, 16384], help="of a rank")
    parser.add_argument("--hidden", type=positive_int, default=4096)
    parser.add_argument("--topk", type=positive_int, default=2, help="experts of a token")
    parser.add_argument("--repeats", type=positive_int, default=20)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print a table on rank 0 and write the result."""
    arguments = parse(given)
    device = start(None)
    world, results = dist.get_world_size(), []
    for tokens in arguments.tokens:
        rows = tokens * arguments.topk // world * world
        runs = measure(rows, arguments.hidden, device, arguments.repeats)
        results.append({"tokens": tokens, "rows": rows, "runs": runs})
        for name, one in runs.items() if dist.get_rank() == 0 else ():
            total = one["forward_ms"] + one["backward_ms"]
            base = runs["bf16"]["forward_ms"] + runs["bf16"]["backward_ms"]
            print(
                f"{tokens:>6} tokens  {name:<19} forward {one['forward_ms']:7.3f} ms {one['forward_bytes'] / 1e6:7.1f} "
                f"MB  backward {one['backward_ms']:7.3f} ms {one['backward_bytes'] / 1e6:7.1f} MB  "
                f"{total / base:.2f} x bf16",
                flush=True,
            )
    if dist.get_rank() == 0:
        found = {"settings": options(arguments) | {"ranks": world}, "results": results}
        print("wrote", write_result("speed/dispatch", found, arguments.output))


if __name__ == "__main__":
    main()
