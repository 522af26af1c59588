"""Optimizer step on one flat tensor, as ZeRO hands it over, and on a model of many: time against
copy and others.

    python -m benchmarks.speed.optimizer [--sizes 1e6 1e8 1e9] [--bytes-size 1.3e9] [--output DIR]

Prints, for each size, milliseconds, the fraction of this run's copy bandwidth that the bytes of a
step amount to, and the ratio to torch's fused fp32 AdamW. Sizes below 1e8, where the host takes
longer to start a kernel than the GPU to run it, are also timed without the host: steps of several
optimizers, whose buffers together exceed the cache, in one CUDA graph, against copies of as many
bytes timed in the same way. Then the same for a plain model of 300 tensors, also by the host's
clock, since there the host may take longer than the GPU. Optimizers that are not installed are left
out and named.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.arguments import argument_parser
from benchmarks.common import show, write_result
from benchmarks.timing import copy_bandwidth, graph_ms, median, timed, wall_ms
from coat_dist import CoatAdamW

# fp32 parameter read and written, fp32 gradient read, and the two moments read and written.
BYTES = {
    "torch fused AdamW": 28.0,
    "CoatAdamW": 12 + 2 * (2 + 6 / 128),
    "torchao AdamW8bit": 16.1,
    "torchao AdamWFp8": 16.1,
}


def flat_parameter(n: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.randn(n, device="cuda") * 0.02)
    # Gradients whose size varies over the tensor, so that moments span several orders of magnitude
    # as in a model.
    parameter.grad = torch.randn(n, device="cuda") * torch.exp2(
        torch.randn(n, device="cuda") * 2 - 12
    )
    return parameter


def candidates() -> dict[str, Callable[[list], torch.optim.Optimizer]]:
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    noisy = {**options, "betas": (0.9, 0.999)}  # where the second moment is rounded stochastically
    other: dict[str, Any] = {"first_moment": "int8", "second_moment": "log8"}
    found: dict[str, Callable] = {
        "torch fused AdamW": lambda p: torch.optim.AdamW(p, fused=True, **options),
        "CoatAdamW": lambda p: CoatAdamW(p, **options),
        "CoatAdamW, beta2 0.999": lambda p: CoatAdamW(p, **noisy),
        "CoatAdamW, int8 and log8": lambda p: CoatAdamW(p, **options, **other),
        "CoatAdamW, int8 and log8, beta2 0.999": lambda p: CoatAdamW(p, **noisy, **other),
    }
    try:
        from torchao.optim import AdamW8bit, AdamWFp8

        found["torchao AdamW8bit"] = lambda p: AdamW8bit(p, **options)
        found["torchao AdamWFp8"] = lambda p: AdamWFp8(p, **options)
    except ImportError:
        print("torchao: not installed, left out")
    try:
        from bitsandbytes.optim import AdamW8bit as BnbAdamW8bit

        found["bitsandbytes AdamW8bit"] = lambda p: BnbAdamW8bit(p, **options)
    except ImportError:
        print("bitsandbytes: not installed, left out")
    return found


def measure(n: int, bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, build in candidates().items():
        parameter = flat_parameter(n)
        try:
            optimizer = build([parameter])
            milliseconds = timed(optimizer.step, repeat=30 if n < 5e8 else 10)
        except Exception as error:
            print(f"{name} at {n:.0e}: {type(error).__name__}: {error}")
            continue
        row = {"optimizer": name, "parameters": n, "ms": milliseconds}
        if (kind := name.split(",")[0]) in BYTES:
            row["fraction_of_copy_bandwidth"] = BYTES[kind] * n / (milliseconds * 1e-3) / bandwidth
        row["ratio_to_torch_fused"] = milliseconds / rows[0]["ms"] if rows else 1.0
        rows.append(row)
        show(
            f"{n:,} {name}",
            row,
            ms=".3f",
            fraction_of_copy_bandwidth=".1%",
            ratio_to_torch_fused=".3f",
        )
        del optimizer, parameter
        torch.cuda.empty_cache()
    return rows


def measure_kernels(n: int) -> list[dict[str, Any]]:
    """GPU time of steps at a size where the host would be slower, against copies of as many bytes.

    The copy is a kernel that negates its input: for small tensors it is faster than the copy that a
    CUDA graph makes.
    """
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    builders: dict[str, Callable[[list], torch.optim.Optimizer]] = {
        "torch fused AdamW": lambda p: torch.optim.AdamW(p, fused=True, capturable=True, **options),
        "CoatAdamW": lambda p: CoatAdamW(p, capturable=True, **options),
    }
    copies = math.ceil(2**29 / (16 * n))  # ten times an H200's cache
    rows: list[dict[str, Any]] = []
    for name, build in builders.items():
        milliseconds = graph_ms([build([flat_parameter(n)]).step for _ in range(copies)])
        half = math.ceil(BYTES[name] * n / 8)
        pairs = [torch.zeros(2, half, device="cuda").unbind() for _ in range(copies)]
        copy = graph_ms([functools.partial(torch.neg, a, out=b) for a, b in pairs])
        rows.append(
            {
                "optimizer": name,
                "parameters": n,
                "ms": milliseconds,
                "fraction_of_copy_of_as_many_bytes": copy / milliseconds,
                "ratio_to_torch_fused": milliseconds / rows[0]["ms"] if rows else 1.0,
            }
        )
        show(
            f"{n:,} {name}, kernels alone",
            rows[-1],
            ms=".5f",
            fraction_of_copy_of_as_many_bytes=".1%",
            ratio_to_torch_fused=".3f",
        )
        torch.cuda.empty_cache()
    return rows


def model_of_many() -> list[torch.nn.Parameter]:
    """300 tensors, 48 million parameters: 25 blocks of six 512-wide matrices and six vectors, as
    transformers have.
    """
    matrices = [(512, 512)] * 4 + [(1024, 512), (512, 1024)]
    return [flat_parameter(math.prod(s)) for _ in range(25) for s in (*matrices, *[(512,)] * 6)]


def measure_model() -> list[dict[str, Any]]:
    """Milliseconds of a step over :func:`model_of_many`: on the device, until the host is done with
    it, and on the device with gradients that lie elsewhere each time, as after ``zero_grad()``.
    """
    rows: list[dict[str, Any]] = []
    for name, build in candidates().items():
        params = model_of_many()
        small = [p for p in params if p.numel() == 512]
        groups: list[Any] = params
        if name.startswith("CoatAdamW"):
            groups = [
                {"params": [p for p in params if p.numel() > 512]},
                {"params": small, "moments": "fp32"},
            ]
        try:
            optimizer = build(groups)
            device = timed(optimizer.step)
            host = []
            for _ in range(30):
                torch.cuda.synchronize()
                host.append(wall_ms(optimizer.step, synchronize=False))
            moved = timed(
                functools.partial(step_elsewhere, optimizer, params, [grads(params), grads(params)])
            )
        except Exception as error:
            print(f"{name}, 300 tensors: {type(error).__name__}: {error}")
            continue
        row = {
            "optimizer": name,
            "tensors": len(params),
            "parameters": sum(p.numel() for p in params),
            "ms": device,
            "host_ms": median(host),
            "moved_ms": moved,
        }
        rows.append(row)
        row["ratio_to_torch_fused"] = device / rows[0]["ms"]
        row["moved_ratio"] = moved / rows[0]["moved_ms"]
        show(
            f"{len(params)} tensors, {name}",
            row,
            ms=".3f",
            host_ms=".3f",
            ratio_to_torch_fused=".3f",
            moved_ms=".3f",
            moved_ratio=".3f",
        )
    return rows


def grads(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [torch.randn_like(p) for p in params]


def step_elsewhere(
    optimizer: Any, params: list[torch.nn.Parameter], sets: list[list[torch.Tensor]]
) -> None:
    """A step with the other one of two ``sets`` of gradients."""
    sets.reverse()
    for parameter, gradient in zip(params, sets[0], strict=True):
        parameter.grad = gradient
    optimizer.step()


def state_bytes(n: int) -> float:
    """Bytes per parameter that CoatAdamW's state takes, measured by the allocator."""
    parameter = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda"))
    optimizer = CoatAdamW([parameter], lr=1e-4)
    parameter.grad = torch.full_like(parameter, 1e-3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before) / n


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program; ``--bytes-size`` is the shard over which state bytes are
    measured.
    """
    parser = argument_parser(__doc__, sizes=[1e6, 1e8, 1e9], bytes_size=1.3e9, name="optimizer")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: this benchmark measures GPU time only")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    rows = [row for n in arguments.sizes for row in measure(int(n), bandwidth)]
    kernel_rows = [row for n in arguments.sizes if n < 1e8 for row in measure_kernels(int(n))]
    model_rows = measure_model()
    per_parameter = state_bytes(int(arguments.bytes_size))
    print(
        f"CoatAdamW state: {per_parameter:.4f} bytes per parameter over {arguments.bytes_size:.2g} "
        "parameters"
    )
    write_result(
        f"speed/{arguments.name}",
        {
            "copy_bytes_per_second": bandwidth,
            "state_bytes_per_parameter": per_parameter,
            "steps": rows,
            "kernels": kernel_rows,
            "model_of_300_tensors": model_rows,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
