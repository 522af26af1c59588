"""Output layer and loss, forward and backward: all logits against chunks of the vocabulary. Time, peak memory, kernels.

python -m benchmarks.speed.loss [--tokens 16384] [--hidden 4096] [--vocabulary 32000 128256] [--output DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, write_result
from benchmarks.timing import copy_bandwidth, timed
from coat_dist.flow import TensorParallel, linear_cross_entropy, vocab_parallel_cross_entropy
from coat_dist.kernels import cross_entropy

ONE = TensorParallel()
DEVICE = "cuda"


def peak(call: Callable[[], Any]) -> int:
    """Bytes that a call needs at most beyond what is allocated before it; the second of two calls counts."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def losses(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> list[dict[str, Any]]:
    """Time and peak of forward and backward, for each way to compute the loss."""
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch, fp32 logits": lambda: F.cross_entropy(F.linear(x, weight).float(), labels, reduction="none"),
        "plain": lambda: vocab_parallel_cross_entropy(F.linear(x, weight), labels, ONE),
        "chunked": lambda: linear_cross_entropy(x, weight, labels, ONE),
        **{
            f"chunked, {c} entries": lambda c=c: linear_cross_entropy(x, weight, labels, ONE, chunk=c)  # type: ignore[misc]
            for c in (2048, 4096, 8192, 16384)
        },
    }
    rows = []
    for name, loss in ways.items():

        def step(loss: Callable[[], torch.Tensor] = loss) -> None:
            torch.autograd.grad(loss().mean(), [x, weight])

        with torch.no_grad():
            forward = timed(loss, 10)
        both, size = timed(step, 10), peak(step)
        rows.append({"loss": name, "forward_ms": forward, "ms": both, "peak_bytes": size})
        print(f"{name:<24} {forward:8.2f} {both:8.2f} ms  {size / 2**20:9.1f} MiB", flush=True)
    return rows


def kernels(logits: torch.Tensor, labels: torch.Tensor, bandwidth: float) -> list[dict[str, Any]]:
    """The two kernels on logits of the whole vocabulary, against the bandwidth of a copy."""
    stats = cross_entropy.logit_stats(logits, labels, 0)
    rest = labels, 0, stats.exponent, stats.total.reciprocal().float(), None, torch.ones_like(stats.exponent)
    rows = []
    for name, call, size in (
        ("logit_stats", lambda: cross_entropy.logit_stats(logits, labels, 0), logits.nbytes),
        ("logit_grad", lambda: cross_entropy.logit_grad(logits, *rest, out=logits), 2 * logits.nbytes),
    ):
        ms = timed(call)
        rows.append({"kernel": name, "us": 1e3 * ms, "fraction_of_copy_bandwidth": size / (ms * 1e-3) / bandwidth})
        print(f"{name:<24} {1e3 * ms:8.1f} us  {rows[-1]['fraction_of_copy_bandwidth']:6.1%}", flush=True)
    return rows


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=positive_int, default=16384)
    parser.add_argument("--hidden", type=positive_int, default=4096)
    parser.add_argument("--vocabulary", nargs="+", type=positive_int, default=[32000, 128256])
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    bandwidth = copy_bandwidth()
    results = [one(arguments.tokens, arguments.hidden, v, bandwidth) for v in arguments.vocabulary]
    found = {"copy_bytes_per_second": bandwidth, "results": results}
    print("wrote", write_result("speed/loss", found, arguments.output))


def one(tokens: int, hidden: int, vocabulary: int, bandwidth: float) -> dict[str, Any]:
    """Losses and kernels of one shape."""
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    print(f"{tokens} tokens, h {hidden}, vocabulary {vocabulary}: forward, forward and backward, peak")
    result = losses(x, weight, labels)
    with torch.no_grad():
        of_kernels = kernels(F.linear(x, weight), labels, bandwidth)
    shape = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
    return {**shape, "losses": result, "kernels": of_kernels}


if __name__ == "__main__":
    main()
