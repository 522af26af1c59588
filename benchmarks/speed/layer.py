"""Transformer layers, forward and backward, with and without the FP8 flow: time, saved bytes, and
where the time goes.

    python -m benchmarks.speed.layer [--presets llama2-7b ...] [--tokens 16384 ...] [--peers DIR]

Builds a stack of Megatron layers from a preset, times it as BF16, patches it in place and times it
again, all in one process. Saved bytes are what the allocator holds between forward and backward, a
token and layer. The peak of one forward and backward, without gradients before it, is compared with
what ``layer_memory.py`` expects from shapes. The kernel table is of one profiled pass of the
patched stack. With ``--peers`` Transformer Engine's layers of the same shape (``te_layer.py``) are
timed afterwards in the same way, and ratios to them are printed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.arguments import (
    argument_parser,
    check_multiples,
    check_peers,
    int_from_0,
    one_line,
)
from benchmarks.common import options, show, write_result
from benchmarks.speed import te_layer
from benchmarks.speed.layer_memory import Peak, expected_peak
from benchmarks.timing import stages_ms
from coat_dist import CoatConfig
from coat_dist.config import ActivationConfig
from coat_dist.flow.graphs.graph_pool import pool_bytes
from coat_dist.reference.activation import ACTIVATIONS
from launch.model.gpt import ModelConfig, build_model, load_model_config
from megatron_patches import initialize_model_parallel, patched

SEQUENCE = 4096
REPEATS = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "coat": {},
    "coat saved in e4m3": {"saved_format": "e4m3"},
    "coat quantized": {"forward": "quantized"},
    "coat fp8 attention": {"attention": "fp8"},
    "coat tensor scales": {"forward_scales": "tensor"},
    "coat cuda graphs": {"cuda_graphs": True},
}
"""The "activation" blocks that can be measured, by name."""


class Case(NamedTuple):
    """A stack to measure, and by variant its settings and the peak that is expected."""

    preset: str
    model: ModelConfig
    tokens: int
    variants: dict[str, tuple[ActivationConfig, Peak]]


def plan(arguments: argparse.Namespace) -> list[Case]:
    """What is to be measured; what cannot be is refused here, before anything is.

    Raises:
        ValueError: a preset that ``layer_memory.py`` has no account of, or
            ``te_layer.py`` no layer, or a folder without Transformer Engine.
    """
    settings = {
        v: CoatConfig.parse({"activation": VARIANTS[v]}).activation for v in arguments.variants
    }
    found = []
    for preset in arguments.presets:
        model = load_model_config(preset, [f"num_layers={arguments.layers}"])
        if arguments.peers is not None:
            te_layer.check(preset, model)
        for tokens in arguments.tokens:
            try:
                variants = {
                    name: (s, expected_peak(model, tokens, s)) for name, s in settings.items()
                }
            except ValueError as problem:
                raise ValueError(f"--presets: {preset}: {problem}") from None
            found.append(Case(preset, model, tokens, variants))
    if arguments.peers is not None:
        check_peers(arguments.peers)
    return found


def stack(
    model: ModelConfig, tokens: int, tp: int = 1, sequence: int = SEQUENCE
) -> tuple[Callable[[], torch.Tensor], Any, torch.Tensor]:
    """A function that runs the layers once, the model they belong to, and their input ``[s / tp, b,
    h]``; several tensor-parallel ranks split the sequence.
    """
    gpt: Any = build_model(
        model.model_copy(update={"vocab_size": 128}), tp=tp, sequence_parallel=tp > 1
    )
    gpt.train()
    rope, layers = gpt.rotary_pos_emb(sequence), list(gpt.decoder.layers)
    shape = (sequence // tp, tokens // sequence, model.hidden_size)
    device = next(gpt.parameters()).device
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y, _ = layer(hidden_states=y, attention_mask=None, rotary_pos_emb=rope)
        return y

    return forward, gpt, x


def measure(
    forward: Callable[[], torch.Tensor], gpt: torch.nn.Module, x: torch.Tensor, layers: int
) -> dict[str, Any]:
    """Median milliseconds a layer of forward and backward, bytes saved a token and layer, and the
    peak and the gradients of one pass that starts without gradients. CUDA graphs have memory of
    their own for what they save and make: ``graphs_bytes``, which the others leave out.
    """
    tokens = x.shape[0] * x.shape[1]
    y = forward()
    dy = torch.randn_like(y)
    y.backward(dy)
    for _ in range(2):
        forward().backward(dy)
    del y
    x.grad = None
    gpt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a tensor counts with the whole of the cached block that it is given
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = forward()
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(dy)
    del y
    peak = torch.cuda.max_memory_allocated() - before
    grads = sum(p.grad.nbytes for p in gpt.parameters() if p.grad is not None)
    outputs: list[torch.Tensor] = []
    stages = (lambda: outputs.append(forward()), lambda: outputs.pop().backward(dy))
    forward_ms, backward_ms = stages_ms(stages, REPEATS)
    return {
        "forward_ms": forward_ms / layers,
        "backward_ms": backward_ms / layers,
        "saved_bytes_per_token": saved / layers / tokens,
        "peak_bytes": peak,
        "gradient_bytes": grads,
        "graphs_bytes": pool_bytes(x.device),
    }


def kernels(
    forward: Callable[[], torch.Tensor], dy: torch.Tensor, layers: int
) -> list[dict[str, Any]]:
    """GPU time of each kernel, microseconds and calls a layer, of one forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        forward().backward(dy)
        torch.cuda.synchronize()
    found = [
        {"kernel": e.key, "us": e.self_device_time_total / layers, "calls": e.count / layers}
        for e in record.key_averages()
        if e.self_device_time_total > 0
    ]
    return sorted(found, key=lambda k: -k["us"])


def flops(model: ModelConfig, tokens: int) -> float:
    """Floating-point operations of one layer, forward and backward; attention counts half of the
    keys, and its backward 2.5 times its forward.
    """
    h, d, heads = model.hidden_size, model.head_channels, model.num_attention_heads
    parts = ACTIVATIONS[model.activation].parts
    weights = h * d * 2 * (heads + model.kv_heads) + h * model.ffn_hidden_size * (parts + 1)
    return tokens * (6.0 * weights + 3.5 * 2 * SEQUENCE * heads * d)


def time_transformer_engine(te: Any, model: ModelConfig, tokens: int) -> dict[str, dict[str, Any]]:
    """:func:`measure` of Transformer Engine's layers of the same shape, by recipe."""
    found = {}
    for name, recipe in te_layer.RECIPES.items():
        found[name] = measure(
            *te_layer.stack(te, model, tokens, recipe, SEQUENCE), model.num_layers
        )
        torch.cuda.empty_cache()
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__, presets=["llama2-7b"], tokens=[16384], layers=4, name="layer", peers=None
    )
    parser.add_argument("--variants", nargs="+", default=["coat"], choices=list(VARIANTS))
    parser.add_argument(
        "--kernels", type=int_from_0, default=24, help="rows of the kernel table, 0 = none"
    )
    arguments = parser.parse_args(given)
    check_multiples(parser, "--tokens", arguments.tokens, SEQUENCE)
    return arguments


def main() -> None:
    arguments = parse()
    with one_line():
        todo = plan(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        # Before anything computes: parts of cuDNN that torch has loaded by then would be taken for
        # those of its own.
        te = te_layer.load(te_layer.unpack(arguments.peers, temporary)) if arguments.peers else None
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        initialize_model_parallel(1)
        results = [shape(case, te, arguments) for case in todo]
    found = {"settings": options(arguments), "results": results}
    print("wrote", write_result(f"speed/{arguments.name}", found, arguments.output))


def shape(case: Case, te: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape, print its results and return them; beside them those of Transformer
    Engine's module ``te``, if not None.
    """
    preset, model, tokens, variants = case
    torch.manual_seed(0)
    forward, gpt, x = stack(model, tokens)
    runs = {"bf16": measure(forward, gpt, x, arguments.layers)}
    table: list[dict[str, Any]] = []
    for name, (settings, expected) in variants.items():
        with patched(gpt, settings):
            runs[name] = measure(forward, gpt, x, arguments.layers)
            runs[name]["expected_peak"] = vars(expected)
            if arguments.kernels and not table:
                table = kernels(forward, torch.randn_like(x), arguments.layers)
    del forward, gpt, x
    torch.cuda.empty_cache()
    theirs = {} if te is None else time_transformer_engine(te, model, tokens)
    return report(preset, tokens, model, runs, theirs, table, arguments)


def report(preset, tokens, model, runs, theirs, table, arguments) -> dict[str, Any]:
    """Print one shape's results and return them."""
    everything = {**runs, **theirs}
    for one in everything.values():
        one["ms"] = one["forward_ms"] + one["backward_ms"]
    base, te = runs["bf16"]["ms"], theirs.get("TE bf16", {}).get("ms")
    print(f"== {preset}, {tokens} tokens")
    for name, one in everything.items():
        one["ratio_to_bf16"] = one["ms"] / base
        one["tflops"] = flops(model, tokens) / one["ms"] / 1e9
        if te:
            one["ratio_to_te_bf16"] = one["ms"] / te
        expected = one.get("expected_peak")
        if expected and not one["graphs_bytes"]:
            one["peak_to_expected"] = one["peak_bytes"] / expected["bytes"]
        show(
            name,
            one,
            forward_ms=".3f",
            backward_ms=".3f",
            ms=".3f",
            ratio_to_bf16=".3f",
            ratio_to_te_bf16=".3f",
            tflops=".0f",
            saved_bytes_per_token=",.0f",
            graphs_bytes=",d",
            peak_bytes=",d",
            peak_to_expected=".4f",
        )
    show_kernels(table, arguments.kernels)
    return {"preset": preset, "tokens": tokens, "runs": everything, "kernels": table}


def show_kernels(table: Sequence[dict[str, Any]], rows: int) -> None:
    """Print the first rows of what :func:`kernels` returned, and the sum of all."""
    for row in table[:rows]:
        show(row["kernel"][:110], row, us=".1f", calls=".1f")
    if table:
        print(f"{sum(row['us'] for row in table):9.1f} us, all kernels", flush=True)


if __name__ == "__main__":
    main()
