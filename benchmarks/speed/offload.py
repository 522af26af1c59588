"""States in host memory: a step beside the bus's own time, the step with states on the GPU, and
DeepSpeed's CPUAdam.

    python -m benchmarks.speed.offload [--size 1e9] [--engine-size 1e9] [--output DIR]

First, how many bytes a second pinned memory and one GPU exchange, in each direction alone and in
both at once, by the size of a chunk. Then CoatAdamW's step on one flat bfloat16 parameter with
remainders, by the host's clock: until it returns, and until the last chunk is back. `limit_ms` is
the bus's time for these bytes in both directions at once. Last, `engine.step()` of DeepSpeed,
ZeRO-2, with all cores of the machine: set OMP_NUM_THREADS to their number.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.arguments import argument_parser
from benchmarks.common import show, write_result
from benchmarks.timing import median
from coat_dist import CoatAdamW, initialize
from coat_dist.optim import host

CHUNKS = tuple(1 << k for k in (20, 22, 24, 25, 26))
TOTAL = 1 << 31
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
ENGINES: dict[str, dict[str, Any]] = {
    "CoatAdamW, states on the GPU": {},
    "CoatAdamW, states in host memory": {"zero_optimization": {"stage": 2, **OFFLOAD}},
    "DeepSpeed's CPUAdam": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, **OFFLOAD},
    },
}
WIDTH = 8192


def seconds(call: Callable[[], Any], repeat: int = 5) -> tuple[float, float]:
    """Median time until a call returns, and until the GPU is done with it, after two calls to
    warm up.
    """
    returned, done = [], []
    for i in range(repeat + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        middle = time.perf_counter()
        torch.cuda.synchronize()
        if i >= 2:
            returned.append(middle - began)
            done.append(time.perf_counter() - began)
    return median(returned), median(done)


def bus() -> list[dict[str, Any]]:
    """Bytes a second of each direction, by bytes of a chunk."""
    meta = torch.empty(TOTAL, dtype=torch.uint8, device="meta")
    far = host.to_host({"sent": meta, "received": meta}, pin=True)
    near = torch.empty(2, max(CHUNKS) * 4, dtype=torch.uint8, device="cuda")
    to_gpu, from_gpu = torch.cuda.Stream(), torch.cuda.Stream()
    rows: list[dict[str, Any]] = []

    def send(start: int, end: int) -> None:
        with torch.cuda.stream(to_gpu):
            near[0, : end - start].copy_(far["sent"][start:end], non_blocking=True)

    def receive(start: int, end: int) -> None:
        with torch.cuda.stream(from_gpu):
            far["received"][start:end].copy_(near[1, : end - start], non_blocking=True)

    def move(chunk: int, *ways: Callable[[int, int], None]) -> None:
        for start in range(0, TOTAL, chunk):
            for way in ways:
                way(start, start + chunk)

    names = {"to_gpu": (send,), "from_gpu": (receive,), "each_of_both": (send, receive)}
    for elements in CHUNKS:
        row: dict[str, Any] = {"chunk_bytes": 4 * elements}
        for name, ways in names.items():
            row[name] = TOTAL / seconds(partial(move, 4 * elements, *ways))[1]
        rows.append(row)
        show(
            "bytes a second",
            row,
            chunk_bytes=",d",
            to_gpu=".3g",
            from_gpu=".3g",
            each_of_both=".3g",
        )
    return rows


def steps(n: int, rate: float) -> list[dict[str, Any]]:
    """A step of CoatAdamW with states in both places, and the first weights that each makes."""
    rows: list[dict[str, Any]] = []
    weights = torch.randn(n, device="cuda", dtype=torch.bfloat16) * 0.02
    grad = torch.randn(n, device="cuda").bfloat16()
    after: torch.Tensor | None = None
    for place, chunk in (("parameter", host.CHUNK), *(("cpu", chunk) for chunk in CHUNKS)):
        host.CHUNK = chunk
        p = torch.nn.Parameter(weights.clone())
        p.grad = grad
        optimizer = CoatAdamW([p], lr=1e-3, master_weights="bf16_remainder", state_device=place)
        optimizer.step()
        nbytes = sum(t.nbytes for t in optimizer.state[p].values() if torch.is_tensor(t))
        after = p.detach().clone() if after is None else after
        assert torch.equal(after, p.detach()), f"{place}, {chunk}: other bits"
        returned, done = seconds(optimizer.step)
        row: dict[str, Any] = {
            "states": place,
            "elements": n,
            "returned_ms": 1e3 * returned,
            "done_ms": 1e3 * done,
        }
        if place == "cpu":
            row |= {"chunk": chunk, "bytes_each_way": nbytes, "limit_ms": 1e3 * nbytes / rate}
            row["over_limit"] = row["done_ms"] / row["limit_ms"]
        rows.append(row)
        show(place, row, chunk=",d", returned_ms=".1f", done_ms=".1f", over_limit=".3f")
        del p, optimizer
        host.release()
        gc.collect()
    return rows


def engine_steps(n: int) -> list[dict[str, Any]]:
    """`engine.step()` on a stack of square matrices."""
    rows = []
    for name, settings in ENGINES.items():
        params = {"lr": 1e-4, "master_weights": "bf16_remainder"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": BF16,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "CoatAdamW", "params": params},
            **settings,
        }
        model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, n // WIDTH**2)))
        )
        try:
            engine, *_ = initialize(model=model, config=config)
        except Exception as error:  # its C++ extension cannot be built everywhere
            print(f"{name}: left out: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        x, times = torch.randn(16, WIDTH, device=engine.device, dtype=torch.bfloat16), []
        for i in range(7):
            engine.backward(engine(x).float().square().mean())
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.step()
            torch.cuda.synchronize()
            times += [time.perf_counter() - began] if i >= 2 else []
        rows.append(
            {
                "optimizer": name,
                "elements": sum(p.numel() for p in model.parameters()),
                "ms": 1e3 * median(times),
            }
        )
        print(f"{name}: engine.step() {rows[-1]['ms']:.1f} ms")
        engine.destroy()
        del engine, model
        host.release()
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program: elements of the flat parameter, parameters of the engines'
    model.
    """
    return argument_parser(__doc__, size=1e9, engine_size=1e9).parse_args(given)


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: this benchmark measures the bus between one and the host")
    rates = bus()
    rate = max(row["each_of_both"] for row in rates)
    data = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bus_bytes_per_second": rates,
    }
    data["steps"] = steps(int(arguments.size), rate)
    data["engine_steps"] = engine_steps(int(arguments.engine_size))
    write_result("speed/offload", data, arguments.output)


if __name__ == "__main__":
    main()
