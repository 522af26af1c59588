"""Element-wise kernels of the flow on one layer's tensors: time, and bytes moved against copy
bandwidth.

Times are of GPU work alone, from a CUDA graph, and include every kernel of a call (where an amax is
taken, also the one that sets it to zero first). Each tensor is larger than the cache.

    python -m benchmarks.speed.flow_kernels [--tokens 16384] [--hidden 4096] [--ffn 11008] \\
        [--output DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.arguments import argument_parser, check_multiples
from benchmarks.common import options, show, write_result
from benchmarks.timing import copy_bandwidth, graph_ms
from coat_dist.formats import E3M4, E4M3, INT8
from coat_dist.kernels import activation, norm, quantize, rope
from coat_dist.reference.rope import Heads, rope_table


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program. A head has 128 elements."""
    parser = argument_parser(__doc__, tokens=16384, hidden=4096, ffn=11008)
    arguments = parser.parse_args(given)
    check_multiples(parser, "--tokens", [arguments.tokens], 4)
    check_multiples(parser, "--hidden", [arguments.hidden], 128)
    return arguments


def main() -> None:
    arguments = parse()
    m, h, f = arguments.tokens, arguments.hidden, arguments.ffn
    x, dy = (torch.randn(m, h, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(h, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(m, 2 * f, device="cuda", dtype=torch.bfloat16)
    da = torch.randn(m, f, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor(0.01, device="cuda")
    compressed = norm.norm_compress(x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", True, E3M4)
    stored = compressed.x8, "rmsnorm", compressed.stats
    gu8 = activation.activation_compress(gate_up, "swiglu", E4M3, 32, "e8m0", True, None, INT8).pre8
    q = quantize.quantize_tensor(x, E4M3, scale)
    down = torch.randn(h, f, device="cuda", dtype=torch.bfloat16)  # fc2's weight
    heads, batch, size = Heads(h // 128, 1, 128), 4, 128
    table = rope_table(torch.randn(m // batch, 1, 1, size, device="cuda"))
    mixed = torch.randn(m // batch, batch, heads.width, device="cuda", dtype=torch.bfloat16)
    qkv = rope.split_rope(mixed, heads, table)
    wide = 33 / 32  # a code and its share of a scale
    calls = {
        "amax": (lambda: quantize.amax(x), 2 * m * h),
        "quantize": (lambda: quantize.quantize_tensor(x, E4M3, scale), 3 * m * h),
        "quantize transposed": (lambda: quantize.quantize_tensor(x, E4M3, scale, True), 3 * m * h),
        "quantize, both orders": (lambda: quantize.quantize_both(x, E4M3, scale), 4 * m * h),
        "quantize_rows": (lambda: quantize.quantize_rows(x, E4M3), 3 * m * h),
        "quantize_rows of fc2's weight": (lambda: quantize.quantize_rows(down, E4M3), 3 * h * f),
        "transpose codes": (lambda: quantize.transpose(q), 2 * m * h),
        "quantize_groups": (
            lambda: quantize.quantize_groups(x, E3M4, 32, "e8m0"),
            (2 + wide) * m * h,
        ),
        "dequantize groups": (
            lambda: quantize.dequantize(compressed.x8, torch.bfloat16),
            (2 + wide) * m * h,
        ),
        "split_rope": (lambda: rope.split_rope(mixed, heads, table), 4 * mixed.numel()),
        "split_rope_backward": (
            lambda: rope.split_rope_backward(*qkv, heads, table),
            4 * mixed.numel(),
        ),
        "norm": (lambda: norm.norm_forward(x, "rmsnorm", 1e-5, weight, None), 4 * m * h),
        "norm_compress": (
            lambda: norm.norm_compress(
                x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", True, E3M4
            ),
            (2 + wide) * m * h,
        ),
        "norm_compress_rows": (
            lambda: norm.norm_compress_rows(
                x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", True, E3M4
            ),
            (3 + wide) * m * h,
        ),
        "norm_compress_rows, quantized": (
            lambda: norm.norm_compress_rows(
                x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", False, E3M4
            ),
            (3 + wide) * m * h,
        ),
        "norm_quantize from x": (
            lambda: norm.norm_quantize(x, compressed.stats, weight, None, E4M3, scale),
            3 * m * h,
        ),
        "norm_quantize from x8, transposed": (
            lambda: norm.norm_quantize(
                compressed.x8, compressed.stats, weight, None, E4M3, scale, True
            ),
            (1 + wide) * m * h,
        ),
        "norm_backward": (
            lambda: norm.norm_backward(dy, *stored, weight, dtype=torch.bfloat16, bias=False),
            (4 + wide) * m * h,
        ),
        "norm_backward with a residual": (
            lambda: norm.norm_backward(
                dy, *stored, weight, torch.float32, torch.bfloat16, False, x
            ),
            (6 + wide) * m * h,
        ),
        "activation_compress": (
            lambda: activation.activation_compress(
                gate_up, "swiglu", E4M3, 32, "e8m0", True, None, INT8
            ),
            (4 + 2 * wide) * m * f,
        ),
        "activation_compress_rows": (
            lambda: activation.activation_compress_rows(
                gate_up, "swiglu", E4M3, 32, "e8m0", True, None, INT8
            ),
            (5 + 2 * wide) * m * f,
        ),
        "activation_compress_rows, quantized": (
            lambda: activation.activation_compress_rows(
                gate_up, "swiglu", E4M3, 32, "e8m0", False, None, INT8
            ),
            (5 + 2 * wide) * m * f,
        ),
        "activation_quantize from BF16": (
            lambda: activation.activation_quantize(gate_up, "swiglu", E4M3, scale),
            5 * m * f,
        ),
        "activation_grad_amax": (
            lambda: activation.activation_grad_amax(da, gu8, "swiglu"),
            (2 + 2 * wide) * m * f,
        ),
        "activation_backward": (
            lambda: activation.activation_backward(da, gu8, "swiglu", E4M3, scale, E4M3, scale),
            (2 + 2 * wide + 5) * m * f,
        ),
    }
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, {m} tokens, h {h}, f {f}")
    rows = []
    for name, (call, size) in calls.items():
        ms = graph_ms([call] * 4)
        share = size / (ms * 1e-3) / bandwidth
        rows.append({"kernel": name, "us": 1e3 * ms, "fraction_of_copy_bandwidth": share})
        show(name, rows[-1], us=".1f", fraction_of_copy_bandwidth=".1%")
    found = {**options(arguments), "copy_bytes_per_second": bandwidth, "kernels": rows}
    print("wrote", write_result("speed/flow-kernels", found, arguments.output))


if __name__ == "__main__":
    main()
