"""What a GPU without FP8 instructions pays: times with them, without them, and by definitions alone, on one GPU.

    python -m benchmarks.speed.fp8_arithmetic [--size 1e8] [--preset llama2-7b --tokens 16384 --layers 2] [--output DIR]

On a GPU that has the instructions, ``COAT_FP8_ARITHMETIC=1`` has conversion done by integer arithmetic and FP8 products
as BF16 products: the programs that a GPU of compute capability 8.0 to 8.8 runs, on this one. ``COAT_REFERENCE=1`` has
definitions run: what a GPU below 8.0 does. Each is printed with its ratio to the time with instructions, or, on a GPU
that has none, to the first line. Of the optimizer it is a step on one flat tensor (beside torch's fused fp32 AdamW), of
the flow each converting kernel, and one layer forward and backward (beside BF16).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.arguments import int_from_0, positive_float, positive_int, preset_name
from benchmarks.common import ROOT, argument_parser, options, write_result
from benchmarks.speed.optimizer import candidates, flat_parameter
from benchmarks.timing import graph_ms, timed
from coat_dist import CoatAdamW
from coat_dist.devices import has_fp8
from coat_dist.formats import E3M4, E4M3, INT8
from coat_dist.kernels import activation, norm, quantize
from coat_dist.kernels.launch import forget

SWITCHES = {"arithmetic": "COAT_FP8_ARITHMETIC", "definitions": "COAT_REFERENCE"}
Rows = list[dict[str, Any]]


@contextmanager
def way(name: str) -> Iterator[None]:
    """Run by "instructions", "arithmetic" or "definitions"."""
    for variable in SWITCHES.values():
        os.environ.pop(variable, None)
    if name in SWITCHES:
        os.environ[SWITCHES[name]] = "1"
    forget()
    try:
        yield
    finally:
        os.environ.pop(SWITCHES.get(name, ""), None)


def ways() -> list[str]:
    """Those that this GPU has, fastest first."""
    return ["instructions"] * has_fp8(torch.empty(0, device="cuda")) + ["arithmetic", "definitions"]


def note(rows: Rows, what: str, name: str, milliseconds: float) -> None:
    """Add a line, and print it with its ratio to the first of the same name."""
    first = next((r["ms"] for r in rows if r["what"] == what), milliseconds)
    rows.append({"what": what, "way": name, "ms": milliseconds, "ratio": milliseconds / first})
    print(f"{what:<40} {name:<20} {milliseconds:9.3f} ms  {milliseconds / first:7.3f} x", flush=True)


def steps(n: int) -> Rows:
    """Optimizer steps on one flat tensor of n parameters."""
    rows: Rows = []
    builders = {k: b for k, b in candidates().items() if k.startswith(("CoatAdamW", "torch fused"))}
    e5m2: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "first_moment": "e5m2", "second_moment": "e5m2"}
    builders["CoatAdamW, e5m2"] = lambda p: CoatAdamW(p, betas=(0.9, 0.95), **e5m2)
    for kind, build in builders.items():
        for name in ways() if kind.startswith("CoatAdamW") else ["torch"]:
            with way(name):
                note(rows, kind, name, timed(build([flat_parameter(n)]).step, repeat=20))
            torch.cuda.empty_cache()
    return rows


def kernels(m: int, h: int, f: int) -> Rows:
    """The flow's converting kernels, GPU time only."""
    x, gate_up = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for n in (h, 2 * f))
    da = torch.randn(m, f, device="cuda", dtype=torch.bfloat16)
    weight, scale = torch.rand(h, device="cuda", dtype=torch.bfloat16), torch.tensor(0.01, device="cuda")
    compressed = norm.norm_compress(x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", True, E3M4)
    pre8 = activation.activation_compress(gate_up, "swiglu", E4M3, 32, "e8m0", True, None, INT8).pre8
    calls: dict[str, Callable[[], Any]] = {
        "quantize_rows": lambda: quantize.quantize_rows(x, E4M3),
        "quantize_both": lambda: quantize.quantize_both(x, E4M3, scale),
        "norm_compress_rows": lambda: norm.norm_compress_rows(
            x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", True, E3M4
        ),
        "norm_quantize, transposed": lambda: norm.norm_quantize(
            compressed.x8, compressed.stats, weight, None, E4M3, scale, True
        ),
        "activation_compress_rows": lambda: activation.activation_compress_rows(
            gate_up, "swiglu", E4M3, 32, "e8m0", True, None, INT8
        ),
        "activation_backward": lambda: activation.activation_backward(da, pre8, "swiglu", E4M3, scale, E4M3, scale),
    }
    rows: Rows = []
    for what, call in calls.items():
        for name in ways():
            if name != "definitions":
                with way(name):
                    note(rows, what, name, graph_ms([call] * 4))
    return rows


def layers(preset: str, tokens: int, count: int) -> Rows:
    """One layer, forward and backward."""
    import torch.distributed as dist

    from benchmarks.speed.layer import measure, stack
    from coat_dist.config import ActivationConfig
    from launch.model.gpt import load_model_config
    from megatron_patches import initialize_model_parallel, patched

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1)
    model = load_model_config(ROOT / f"configs/models/{preset}.json", [f"num_layers={count}"])
    forward, gpt, x = stack(model, tokens)
    rows: Rows = []
    one = measure(forward, gpt, x, count)
    note(rows, f"layer of {preset}", "BF16, not patched", one["forward_ms"] + one["backward_ms"])
    with patched(gpt, ActivationConfig(enabled=True)):
        for name in ways():
            if name != "definitions":
                with way(name):
                    one = measure(forward, gpt, x, count)
                note(rows, f"layer of {preset}", name, one["forward_ms"] + one["backward_ms"])
    return rows


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", type=positive_float, default=1e8, help="parameters of the optimizer's tensor")
    parser.add_argument("--preset", type=preset_name, default="llama2-7b", help="a name in configs/models")
    parser.add_argument("--tokens", type=positive_int, default=16384, help="a multiple of 4096")
    parser.add_argument("--layers", type=int_from_0, default=2, help="of the stack; 0: no layers are timed")
    arguments = parser.parse_args(given)
    if arguments.tokens % 4096:
        parser.error(f"--tokens: got {arguments.tokens}, accepted: a multiple of 4096")
    return arguments


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: this benchmark measures GPU time only")
    found = {"settings": options(arguments), "steps": steps(int(arguments.size))}
    found["kernels"] = kernels(arguments.tokens, 4096, 11008)
    if arguments.layers:
        found["layers"] = layers(arguments.preset, arguments.tokens, arguments.layers)
    print("wrote", write_result("speed/fp8-arithmetic", found, arguments.output))


if __name__ == "__main__":
    main()
