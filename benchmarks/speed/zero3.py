"""ZeRO-3: steps with BF16 layers, and with the flow whose weights are gathered as BF16 or as FP8 codes.

    python -m benchmarks.speed.zero3 [--ranks 2] [--layers 8] [--micro-batches 1 2 4] [--output DIR]

Layers of Llama-2-7B; each case in processes of its own, since DeepSpeed keeps hold of engines that were destroyed.
`--max-reuse-distance 0` makes ZeRO-3 let go of every weight after its use, as it does with most weights of a large
model; DeepSpeed's default keeps the last ones from forward to backward. Times are by the host's clock until the GPU is
done, medians of 8 steps after 4 to warm up. A profile of one step more says for how long all-gathers ran, and for how
long nothing else did (exposed). Bytes are what a rank gives to gathers of weights in one step. Models are built in
shards; `--build` measures the peak of that, and of building a whole one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import int_from_0, positive_int
from benchmarks.common import ROOT, argument_parser, options, python_path, write_result
from benchmarks.timing import median, union, wall_ms
from launch.model.gpt import build_model, load_model_config
from launch.training.runtime import start

VARIANTS = {
    "BF16": {"enabled": False},
    "coat, BF16 gather": {"fp8_weight_gather": False},
    "coat, FP8 gather": {"fp8_weight_gather": True},
}


class Given:
    """Counts the bytes that this rank gives to gathers of weights."""

    def __init__(self) -> None:
        from coat_dist.flow import gathered as ours

        self.bytes = 0
        gathered: Any = ours
        deepspeeds: Any = sys.modules["deepspeed.runtime.zero.partition_parameters"]  # an engine brings it along
        of_codes, of_values = gathered.gather_into, deepspeeds._dist_allgather_fn

        def gather_codes(out: torch.Tensor, given: torch.Tensor, group: Any) -> Any:
            self.bytes += given.nbytes
            return of_codes(out, given, group)

        def gather_values(given: torch.Tensor, out: torch.Tensor, group: Any = None) -> Any:
            self.bytes += given.nbytes
            return of_values(given, out, group)

        gathered.gather_into, deepspeeds._dist_allgather_fn = gather_codes, gather_values


def settings(variant: str, micro_batch: int, distance: int | None) -> dict[str, Any]:
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    if distance is not None:
        zero["stage3_max_reuse_distance"] = distance
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}},
        "coat": {"activation": VARIANTS[variant]},
    }


def exposed_ms(gathers: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """How long any of ``gathers`` ran, and how long while none of ``others`` did; spans are nanoseconds."""
    waits, work = union(gathers), union(others)
    total = sum(end - begin for begin, end in waits)
    hidden = sum(max(0, min(e, f) - max(b, c)) for b, e in waits for c, f in work if c < e and f > b)
    return total / 1e6, (total - hidden) / 1e6


def profiled(step: Any) -> tuple[float, float]:
    """:func:`exposed_ms` of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    gathers, others = [], []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        name = event.name().lower()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() and "nccl" not in name:
            others.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif "nccldevkernel_allgather" in name:
            gathers.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return exposed_ms(gathers, others)


def model(arguments: argparse.Namespace) -> torch.nn.Module:
    overrides = [f"num_layers={arguments.layers}", *arguments.model_override]
    return build_model(load_model_config(ROOT / arguments.model, overrides).with_vocab(32000))


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(variant: str, micro_batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import megatron_patches

    config = settings(variant, micro_batch, arguments.max_reuse_distance)
    with megatron_patches.zero_init(config):
        built = model(arguments)
    engine, *_ = megatron_patches.initialize(model=built, config=config)
    given = Given()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = load_model_config(ROOT / arguments.model, arguments.model_override).seq_length
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 32000, (micro_batch, length + 1), generator=generator).to(device)
    positions = torch.arange(length, device=device).expand(micro_batch, -1)
    losses: list[torch.Tensor] = []

    def step() -> None:
        loss = engine(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())

    times = []
    for _ in range(arguments.steps + 4):
        given.bytes = 0
        dist.barrier()
        times.append(wall_ms(step, synchronize=torch.cuda.is_available()))
    row = {
        "variant": variant,
        "micro_batch": micro_batch,
        "step_ms": median(times[4:]),
        "tokens_per_second_per_gpu": micro_batch * length / median(times[4:]) * 1e3,
        "given_bytes": given.bytes,
        "losses": [round(float(loss), 6) for loss in losses],
    }
    if torch.cuda.is_available():
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["gathering_ms"], row["exposed_ms"] = profiled(step)
    engine.destroy()
    return row


def built_peaks(arguments: argparse.Namespace) -> dict[str, float]:
    """GiB of a GPU while a model is built, in shards and whole, and what is left afterwards."""
    import megatron_patches

    found = {}
    for name, stage in (("in shards", 3), ("whole", 2)):
        free()
        config = settings("BF16", 1, None)
        config["zero_optimization"] = {"stage": stage}
        with megatron_patches.zero_init(config):
            built = model(arguments)
        found[f"{name}, peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found[f"{name}, afterwards_gib"] = torch.cuda.memory_allocated() / 2**30
        del built
    free()
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=positive_int, default=2)
    parser.add_argument("--layers", type=positive_int, default=8)
    parser.add_argument("--model", default="configs/models/llama2-7b.json")
    parser.add_argument("--model-override", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--micro-batches", type=positive_int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--max-reuse-distance", type=int_from_0, default=None, help="elements; default: DeepSpeed's")
    parser.add_argument("--steps", type=positive_int, default=8)
    parser.add_argument("--build", action="store_true", help="also measure the peak of building models")
    parser.add_argument("--name", default=None, help="of the JSON result (default: zero3-N-ranks)")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)  # of a rank: what it measures, and its file
    return parser.parse_args(given)


def rank(arguments: argparse.Namespace) -> None:
    """One rank of one case."""
    start(int(os.environ["LOCAL_RANK"]))
    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(1)
    *case, file = arguments.case
    found = measure(case[0], case[1], arguments) if case else built_peaks(arguments)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


def in_processes(arguments: argparse.Namespace, *case: Any) -> dict[str, Any]:
    """What ranks of their own find."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        command += [str(arguments.ranks), "-m", "benchmarks.speed.zero3", *sys.argv[1:]]
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        subprocess.run([*command, "--case", json.dumps([*case, file])], check=True, env=environment)
        return json.loads(Path(file).read_text())


def main() -> None:
    arguments = parse()
    if arguments.case is not None:
        return rank(arguments)
    builds = in_processes(arguments) if arguments.build else None
    if builds:
        print(builds, flush=True)
    rows = []
    for micro_batch in arguments.micro_batches:
        for variant in arguments.variants:
            row = in_processes(arguments, variant, micro_batch)
            rows.append(row)
            print(
                f"micro-batch {micro_batch}  {variant:<18} {row['step_ms']:8.1f} ms  gives "
                f"{row['given_bytes'] / 2**20:8.1f} MiB  gathers {row.get('gathering_ms', 0):7.2f} ms, exposed "
                f"{row.get('exposed_ms', 0):7.2f} ms  peak {row.get('peak_gib', 0):5.1f} GiB  "
                f"loss {row['losses'][-1]:.6f}",
                flush=True,
            )
    result = {"settings": options(arguments, "case"), "build": builds, "steps": rows}
    name = arguments.name or f"zero3-{arguments.ranks}-rank{'s' * (arguments.ranks > 1)}"
    print("wrote", write_result(f"speed/{name}", result, arguments.output))


if __name__ == "__main__":
    main()
