"""Weights of one layer: quantized on every use or cached, and their gradient returned or added to main_grad.

python -m benchmarks.speed.weights [--tokens 16384] [--hidden 4096] [--ffn 11008] [--output DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, options, write_result
from benchmarks.timing import copy_bandwidth, graph_ms
from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, weights
from coat_dist.formats import E4M3, QuantizedTensor
from coat_dist.ops import amax, quantize_tensor, tensor_scale, transpose

ONE = TensorParallel()
DEVICE = "cuda"
CACHE = 2**28
"""Bytes of weights that take turns: more than the 50 MiB of an H200's cache."""


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=positive_int, default=16384)
    parser.add_argument("--hidden", type=positive_int, default=4096)
    parser.add_argument("--ffn", type=positive_int, default=11008)
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    h, f = arguments.hidden, arguments.ffn
    shapes = {"qkv": (3 * h, h), "proj": (h, h), "fc1": (2 * f, h), "fc2": (h, f)}
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = [
        {"weight": name, **one(shape, arguments.tokens, bandwidth)} for name, shape in shapes.items()
    ]
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key.endswith("_us")}
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, {arguments.tokens} tokens; us a micro-batch")
    for row in [*rows, {"weight": "layer", **total}]:
        print(f"{row['weight']:<6}", "  ".join(f"{k[:-3]} {row[k]:8.1f}" for k in total), flush=True)
    found = {"settings": options(arguments), "copy_bytes_per_second": bandwidth, "weights": rows, "layer": total}
    print("wrote", write_result("speed/weights", found, arguments.output))


def one(shape: tuple[int, int], tokens: int, bandwidth: float) -> dict[str, float]:
    """Times of one weight ``[n, k]`` in microseconds of GPU work.

    So many copies of the weight take turns that they do not fit into the cache together.
    """
    d8_t, x8_t = (operand(n, tokens) for n in shape)
    elements = shape[0] * shape[1]
    copies = [calls(shape, d8_t, x8_t) for _ in range(-(-CACHE // (2 * elements)))]
    return {f"{name}_us": 1e3 * graph_ms([c[name] for c in copies]) for name in copies[0]} | {
        # On use, two bytes in and one out for each order; one scale for all takes another pass of reading before.
        "floor on use, tensor scale_us": elements * 8 / bandwidth * 1e6,
        "floor on use, row scales_us": elements * 6 / bandwidth * 1e6,
        "floor cached, tensor scale_us": elements * 2 / bandwidth * 1e6,
    }


def operand(rows: int, columns: int) -> QuantizedTensor:
    """Normal random numbers with the scale of their amax: products of other codes take another time."""
    x = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    return quantize_tensor(x, E4M3, tensor_scale(amax(x), E4M3))


def calls(shape: tuple[int, int], d8_t: QuantizedTensor, x8_t: QuantizedTensor) -> dict[str, Callable[[], Any]]:
    """What is timed, by name, on a weight that no other call uses."""
    parameter: Any = torch.nn.Parameter(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02)
    parameter.main_grad = torch.zeros(shape, device=DEVICE)
    settings = {mode: ActivationConfig(wgrad=mode, forward_scales="tensor") for mode in ("grad", "main_grad")}
    modes = {mode: weights.Weight(parameter, ONE, s) for mode, s in settings.items()}
    by_rows = weights.Weight(parameter, ONE, ActivationConfig(forward_scales="row"))
    w8, scale = modes["grad"].quantized()

    def separate() -> None:
        """What Megatron does without fusion: a bf16 gradient, added by a hook."""
        gradient = modes["grad"].gradient(d8_t, x8_t)
        assert gradient is not None
        parameter.main_grad.add_(gradient)

    return {
        "on use: W8, tensor scale": modes["grad"].quantized,
        "on use: W8, row scales": by_rows.quantized,
        "on use: W8 transposed": lambda: modes["grad"].transposed(parameter, scale),
        "cached: W8 transposed, tensor scale": lambda: transpose(w8),
        "wgrad returned": lambda: modes["grad"].gradient(d8_t, x8_t),
        "wgrad returned, then added": separate,
        "wgrad into main_grad": lambda: modes["main_grad"].gradient(d8_t, x8_t),
    }


if __name__ == "__main__":
    main()
