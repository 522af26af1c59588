"""Layers with experts, forward and backward: grouped products in BF16 and with the
flow.

    python -m benchmarks.speed.experts [--shapes mixtral-8x7b ...] [--tokens 16384 4096] \\
        [--variants coat ...]

One Megatron layer of each shape (attention, router, dispatcher, experts), timed and counted as
``layer.py`` does it. The base is our layer in BF16 with ``moe_grouped_gemm``, whose products are
``torch._grouped_mm``. Routing is that of random weights, so experts have different numbers of
tokens. The kernel tables are of one profiled pass each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import argument_parser, check_multiples, int_from_0
from benchmarks.common import options, show, write_result
from benchmarks.speed.layer import SEQUENCE, VARIANTS, kernels, measure, show_kernels, stack
from coat_dist import CoatConfig
from launch.model.gpt import ModelConfig, load_model_config
from megatron_patches import initialize_model_parallel, patched

SHAPES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": dict(
        hidden_size=4096, ffn_hidden_size=14336, moe_ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, num_moe_experts=8, moe_router_topk=2,
    ),
    "qwen3-30b-a3b": dict(
        hidden_size=2048, ffn_hidden_size=6144, moe_ffn_hidden_size=768, num_attention_heads=16,
        num_query_groups=4, num_moe_experts=128, moe_router_topk=8,
    ),
    "64-experts-of-1408": dict(
        hidden_size=2048, ffn_hidden_size=5632, moe_ffn_hidden_size=1408, num_attention_heads=16,
        num_query_groups=16, num_moe_experts=64, moe_router_topk=8,
    ),
}  # fmt: skip
"""What differs from ``configs/models/tiny-moe.json``; attention heads of Qwen3 have 128
elements, here too.
"""


def model_of(shape: str, dispatcher: str) -> ModelConfig:
    """One layer of a shape."""
    keys = SHAPES[shape] | {
        "num_layers": 1,
        "moe_grouped_gemm": True,
        "moe_shared_expert_intermediate_size": None,
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": dispatcher,
        "seq_length": SEQUENCE,
    }
    given = [f"{key}={'null' if v is None else str(v).lower()}" for key, v in keys.items()]
    return load_model_config("tiny-moe", given)


def flops(model: ModelConfig, tokens: int) -> float:
    """Floating-point operations of one layer, forward and backward; attention counts half of the
    keys, and its backward 2.5 times its forward.
    """
    h, d, heads = model.hidden_size, model.head_channels, model.num_attention_heads
    weights = h * d * 2 * (heads + model.kv_heads)
    weights += h * ((model.num_moe_experts or 0) + 3 * model.moe_router_topk * model.expert_size)
    return tokens * (6.0 * weights + 3.5 * 2 * SEQUENCE * heads * d)


def runs_of(shape: str, tokens: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What was measured, by name: BF16 and the variants."""
    model = model_of(shape, arguments.dispatcher)
    torch.manual_seed(0)
    forward, gpt, x = stack(model, tokens)
    dy = torch.randn_like(x)

    def run() -> dict[str, Any]:
        return measure(forward, gpt, x, 1) | {"kernels": kernels(forward, dy, 1)}

    found = {"grouped bf16": run()}
    for variant in arguments.variants:
        settings = CoatConfig.parse({"activation": VARIANTS[variant]}).activation
        with patched(gpt, settings) as report:
            assert any(block.endswith("mlp.experts") for block in report.patched), str(report)
            found[f"grouped {variant}"] = run()
    return found


def report(
    shape: str, tokens: int, runs: dict[str, dict[str, Any]], rows: int, dispatcher: str
) -> None:
    """Print the results, and add sums and ratios to them."""
    work = flops(model_of(shape, dispatcher), tokens)
    base = next(iter(runs.values()))
    print(f"== {shape}, {tokens} tokens")
    for name, one in runs.items():
        one["ms"] = one["forward_ms"] + one["backward_ms"]
        one["ratio_to_bf16"], one["tflops"] = one["ms"] / base["ms"], work / one["ms"] / 1e9
        one["kernels_ms"] = sum(k["us"] for k in one["kernels"]) / 1e3
        show(
            name,
            one,
            forward_ms=".3f",
            backward_ms=".3f",
            ms=".3f",
            ratio_to_bf16=".3f",
            kernels_ms=".3f",
            tflops=".0f",
            saved_bytes_per_token=",.0f",
            peak_bytes=",d",
        )
    for name, one in list(runs.items())[:2]:
        print(f"-- {name}")
        show_kernels(one["kernels"], rows)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__, tokens=[16384, 4096], name="experts")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--variants", nargs="+", default=["coat"], choices=list(VARIANTS))
    parser.add_argument("--dispatcher", default="alltoall", choices=["alltoall", "allgather"])
    parser.add_argument(
        "--kernels", type=int_from_0, default=24, help="rows of the kernel tables, printed and kept"
    )
    arguments = parser.parse_args(given)
    check_multiples(parser, "--tokens", arguments.tokens, SEQUENCE)
    return arguments


def main() -> None:
    arguments = parse()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1)
    results = []
    for shape in arguments.shapes:
        for tokens in arguments.tokens:
            runs = runs_of(shape, tokens, arguments)
            torch.cuda.empty_cache()
            report(shape, tokens, runs, arguments.kernels, arguments.dispatcher)
            for one in runs.values():
                one["kernels"] = one["kernels"][: arguments.kernels]
            results.append({"shape": shape, "tokens": tokens, "runs": runs})
    found = {"settings": options(arguments), "results": results}
    print("wrote", write_result(f"speed/{arguments.name}", found, arguments.output))


if __name__ == "__main__":
    main()
