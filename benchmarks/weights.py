"""Weights of one layer: quantized on every use or cached, and their gradient returned or added to main_grad.

python -m benchmarks.weights [--tokens 16384] [--hidden 4096] [--ffn 11008] [--output DIR]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import write_result
from benchmarks.optimizer import copy_bandwidth, timed
from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, weights
from coat_dist.formats import E4M3
from coat_dist.ops.quantize import quantize_tensor, transpose

ONE = TensorParallel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=11008)
    parser.add_argument("--output", default=None, help="folder of the JSON result (default: benchmarks/results)")
    arguments = parser.parse_args()
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
    settings = {k: v for k, v in vars(arguments).items() if k != "output"}
    write_result(
        "weights",
        {"settings": settings, "copy_bytes_per_second": bandwidth, "weights": rows, "layer": total},
        arguments.output,
    )


def one(shape: tuple[int, int], tokens: int, bandwidth: float) -> dict[str, float]:
    """Times of one weight ``[n, k]``, in microseconds."""
    parameter: Any = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
    modes = {mode: weights.Weight(parameter, ONE, ActivationConfig(wgrad=mode)) for mode in ("grad", "main_grad")}
    by_rows = weights.Weight(parameter, ONE, ActivationConfig(forward_scales="row"))
    w8, scale = modes["grad"].quantized()
    d8_t, x8_t = (quantize_tensor(torch.randn(n, tokens, device="cuda"), E4M3, scale) for n in shape)
    parameter.main_grad = torch.zeros(shape, device="cuda")

    def separate() -> None:
        """What Megatron does without fusion: a bf16 gradient, added by a hook."""
        gradient = modes["grad"].gradient(d8_t, x8_t)
        assert gradient is not None
        parameter.main_grad.add_(gradient)

    calls = {
        "on use: W8": modes["grad"].quantized,
        "on use: W8, row scales": by_rows.quantized,
        "on use: W8 transposed": lambda: modes["grad"].transposed(parameter, scale),
        "cached: W8 transposed": lambda: transpose(w8),
        "wgrad returned": lambda: modes["grad"].gradient(d8_t, x8_t),
        "wgrad returned, then added": separate,
        "wgrad into main_grad": lambda: modes["main_grad"].gradient(d8_t, x8_t),
    }
    return {f"{name}_us": 1e3 * timed(call) for name, call in calls.items()} | {
        "floor on use_us": parameter.numel() * 8 / bandwidth * 1e6,
        "floor cached_us": parameter.numel() * 2 / bandwidth * 1e6,
    }


if __name__ == "__main__":
    main()
