"""Optimizer steps where the host sets the pace: 300 small tensors, and one flat tensor, against torch's fused AdamW.

    python -m benchmarks.speed.small_tensors [--repeat 200] [--output DIR]

For each problem and optimizer, medians in milliseconds: a step by the host's clock until the GPU is done with it
(``wall_ms``), until the call returns (``host_ms``), and its kernels on the GPU added up (``gpu_ms``, by the profiler).
Gradients lie where they did in the last step, or in two sets of memory in turn, as they may after
``zero_grad(set_to_none=True)``. Steps with ``capturable=True`` are also timed as replays of a CUDA graph. Before
anything is timed, replays are compared with steps of an optimizer without ``capturable``, to the bit.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, options, write_result
from benchmarks.timing import median, stages_ms, wall_ms
from coat_dist import CoatAdamW

SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}
PROBLEMS: dict[str, list[tuple[int, ...]]] = {
    # 25 blocks of six 512-wide matrices and six vectors, as transformers have: 52 million parameters
    "300 tensors": [s for _ in range(25) for s in (*[(512, 512)] * 4, (1024, 512), (512, 1024), *[(512,)] * 6)],
    "300 tensors of 4096": [(64, 64)] * 300,
    "flat, 1e6": [(10**6,)],
    "flat, 1e8": [(10**8,)],
}


def build(name: str, params: list[torch.nn.Parameter], capturable: bool) -> torch.optim.Optimizer:
    if name == "torch fused AdamW":
        return torch.optim.AdamW(params, fused=True, capturable=capturable, **SETTINGS)
    more = {"betas": (0.9, 0.999)} if name.endswith("beta2 0.999") else {}
    kinds = {"fp8": [p for p in params if p.dim() > 1 or len(params) == 1]}
    kinds["fp32"] = [p for p in params if all(p is not q for q in kinds["fp8"])]
    groups = [{"params": ps, "moments": kind} for kind, ps in kinds.items() if ps]
    return CoatAdamW(groups, **{**SETTINGS, **more}, capturable=capturable)


NAMES = ("torch fused AdamW", "CoatAdamW", "CoatAdamW, beta2 0.999")


def tensors(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> tuple[list[torch.nn.Parameter], list[list]]:
    """Parameters, and two sets of gradients."""
    g = torch.Generator("cuda").manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(s, device="cuda", generator=g) * 0.02) for s in shapes]
    return params, [[torch.randn(s, device="cuda", generator=g) * 1e-3 for s in shapes] for _ in range(2)]


def give(params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


def gpu_ms(step: Callable[[], Any], repeat: int) -> float:
    """Mean time of one call's kernels on the GPU, added up."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeat):
            step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in events) / 1e3 / repeat


def measure(problem: str, name: str, moving: bool, repeat: int) -> dict[str, Any]:
    params, sets = tensors(PROBLEMS[problem])
    optimizer = build(name, params, capturable=False)
    turn = itertools.cycle(sets if moving else sets[:1])
    walls: list[float] = []
    hosts: list[float] = []
    for kind in ["warm-up"] * 5 + ["wall", "host"] * repeat:
        give(params, next(turn))
        torch.cuda.synchronize()
        time = wall_ms(optimizer.step, synchronize=kind != "host")
        {"wall": walls, "host": hosts}.get(kind, []).append(time)

    def one() -> None:
        give(params, next(turn))
        optimizer.step()

    row: dict[str, Any] = {"problem": problem, "gradients": "move" if moving else "stay", "optimizer": name}
    return row | {"wall_ms": median(walls), "host_ms": median(hosts), "gpu_ms": gpu_ms(one, 10)}


def measure_graph(problem: str, name: str, repeat: int) -> dict[str, Any]:
    params, sets = tensors(PROBLEMS[problem])
    give(params, sets[0])
    graph = capture(build(name, params, capturable=True))
    graph.replay()
    milliseconds = stages_ms([graph.replay], repeat)[0]
    return {"problem": problem, "gradients": "stay", "optimizer": name, "graph_ms": milliseconds}


def capture(optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    """A graph of one step, after three steps to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def check_graph(name: str) -> int:
    """Replays against steps without ``capturable``: the number of bytes that differ in parameters and states."""
    shapes = [(64, 64), (512, 512), (129,), (7, 5), (512,), (3,)]
    runs = []
    for capturable in (True, False):
        params, sets = tensors(shapes, seed=1)
        give(params, [grad.clone() for grad in sets[0]])
        optimizer = build(name, params, capturable)
        if capturable:
            advance = capture(optimizer).replay
        else:
            advance = optimizer.step
            for _ in range(3):
                advance()
        for i in range(20):
            for p, a, b in zip(params, *sets, strict=True):
                p.grad.copy_(a if i % 2 else b)  # type: ignore[union-attr]
            advance()
        states = [optimizer.state[p] for p in params]
        runs.append([*params, *(s[k] for s in states for k in sorted(s) if k.startswith(("coat_m", "coat_v", "exp")))])
        counts = {float(s["step"]) for s in states}
        assert counts == {23.0}, counts
    pairs = zip(*([t.detach().reshape(-1).view(torch.uint8) for t in run] for run in runs), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--repeat", type=positive_int, default=200, help="timed steps of each kind")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: this benchmark measures steps on one")
    differing = {name: check_graph(name) for name in NAMES[1:]}
    print(f"bytes that differ after 20 replays of a graph: {differing}", flush=True)
    rows: list[dict[str, Any]] = []
    for problem, moving in itertools.product(arguments.problems, (False, True)):
        for name in NAMES:
            rows.append(measure(problem, name, moving, arguments.repeat))
            first = next(r for r in rows if (r["problem"], r["gradients"]) == (problem, rows[-1]["gradients"]))
            rows[-1]["wall_ratio_to_torch_fused"] = rows[-1]["wall_ms"] / first["wall_ms"]
            print(
                "{problem}, gradients {gradients}: {optimizer:<24} wall {wall_ms:.3f} ms, host {host_ms:.3f}, "
                "GPU {gpu_ms:.3f}, {wall_ratio_to_torch_fused:.2f} x torch fused".format(**rows[-1]),
                flush=True,
            )
    graphs = [measure_graph(problem, name, arguments.repeat) for problem in arguments.problems for name in NAMES]
    for row in graphs:
        print("{problem}, graph: {optimizer:<24} {graph_ms:.4f} ms".format(**row))
    result = {"steps": rows, "graphs": graphs, "bytes_that_differ_between_graph_and_steps": differing}
    write_result("speed/small-tensors", {"options": options(arguments), **result}, arguments.output)
    assert math.fsum(differing.values()) == 0, "a replay is not a step"


if __name__ == "__main__":
    main()
