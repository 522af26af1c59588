"""What training really needs of a GPU: peaks, and what is held when, beside the planner's numbers.

    python -m benchmarks.speed.planner_check [--only NAME ...] [--ranks 2] [--seconds 450] \\
        [--output DIR]
    python -m benchmarks.speed.planner_check \\
        --verify  # configurations that the planner was not fitted to
    python -m benchmarks.speed.planner_check \\
        --compare FILE.json # the planner against an earlier measurement

Each configuration is an engine of `launch/pretrain.py` with random tokens in processes of its own
(`--ranks` of them, each on a GPU), six steps: the first four taken apart (forward, backward, step),
the last two timed as a whole. A configuration that the result file has already is not measured
again, so a run that was cut goes on where it was; no new one is started after `--seconds`. Writes
`speed/planner-check.json` (`planner-check-N-ranks.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import positive_float, positive_int
from benchmarks.common import (
    ROOT,
    argument_parser,
    environment,
    python_path,
    read_json,
    result_path,
    write_result,
)
from benchmarks.speed.planner_cases import CASES, VERIFY, largest, predict, settings_of
from coat_dist.nodes import free_port

STEPS, APART, GIB = 6, 4, 2**30


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One rank's run of a case: bytes at every point, and seconds."""
    import torch

    from benchmarks.speed.whole_rank import plan_of
    from launch.model.gpt import load_model_config
    from launch.scale.timed_steps import random_batch
    from launch.train import runtime, training_engine
    from launch.train.memory_report import MemoryReport
    from megatron_patches import initialize_model_parallel

    used: dict[str, int] = {}

    def look(moment: str) -> None:
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            used[moment] = total - free - torch.cuda.memory_reserved()

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    look("the CUDA context alone")
    device = runtime.start(int(os.environ["LOCAL_RANK"]))
    look("process group")
    gpu, tp = device.type == "cuda", case.get("tp", 1)
    initialize_model_parallel(tp, seed=1234, create_gloo_process_groups=False)
    look("Megatron's groups")
    case = {**case, "micro": largest(case)} if case["micro"] == "largest" else case
    settings = settings_of(case)
    model = load_model_config(case["model"], case["override"])
    p = plan_of(model, settings, tp, case.get("recompute", {}))
    held: list[dict[str, Any]] = []

    def note(moment: str) -> None:
        if gpu:
            torch.cuda.synchronize()
            held.append(
                {
                    "moment": moment,
                    "allocated": torch.cuda.memory_allocated(),
                    "peak": torch.cuda.max_memory_allocated(),
                    "reserved": torch.cuda.memory_reserved(),
                    "peak_reserved": torch.cuda.max_memory_reserved(),
                }
            )
            torch.cuda.reset_peak_memory_stats()

    note("started")
    engine = training_engine.build_engine(p, lambda text: None)
    note("engine built")
    look("engine built")
    loss_of = training_engine.language_model_loss(tp, device)
    torch.manual_seed(torch.distributed.get_rank())
    batch = random_batch(model, p.batch.micro)
    report, times, parts = MemoryReport(engine, p.batch.micro * model.seq_length), [], []
    for step in range(STEPS):
        clock = [time.perf_counter()]
        for index in range(p.batch.accumulation):
            if step == 0 and index == 0:
                with report.forward():
                    loss = loss_of(engine, batch)
            else:
                loss = loss_of(engine, batch)
            if step < APART:
                note(f"step {step + 1}, forward")
            clock.append(time.perf_counter())
            engine.backward(loss)
            if step == 0 and index == p.batch.accumulation - 1:
                report.backward_done()
            if step < APART:
                note(f"step {step + 1}, backward")
            clock.append(time.perf_counter())
            engine.step()
            if step < APART:
                note(f"step {step + 1}, step")
            clock.append(time.perf_counter())
        if step == 0:
            report.step_done()
        float(engine.get_global_grad_norm())
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - clock[0])
        if step == APART - 1:
            parts = [b - a for a, b in zip(clock, clock[1:], strict=False)]
    result: dict[str, Any] = {
        "case": case,
        "bytes": {f"held: {name}": row["bytes"] for name, row in report.to_dict().items()},
        "seconds": {
            "step": min(times[APART:]),
            **{f"part {i}": one for i, one in enumerate(parts)},
        },
    }
    if gpu:
        note("end")
        free, total = torch.cuda.mem_get_info()
        phases: dict[str, int] = {}
        for one in held:
            phase = f"peak: {one['moment'].rpartition(', ')[2]}"
            phases[phase] = max(phases.get(phase, 0), one["peak"])
        result["bytes"] |= {
            **phases,
            "allocated": max(one["peak"] for one in held),
            "reserved": max(one["peak_reserved"] for one in held),
            "other": total - free - torch.cuda.memory_reserved(),
            **{f"other: {moment}": size for moment, size in used.items()},
            "of the GPU": total,
        }
        if retries := torch.cuda.memory_stats()["num_alloc_retries"]:
            case["allocator_retries"] = retries
        case["gpu"] = torch.cuda.get_device_name()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return result


def children(
    name: str, case: dict[str, Any], ranks: int, folder: Path, limit: float
) -> dict[str, Any]:
    """Run a case in ``ranks`` processes; what the rank with the highest peak measured, or the
    error.
    """
    port = free_port()
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_"))
    }
    processes = []
    for rank in range(ranks):
        own = clean | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": python_path(ROOT),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }
        out = folder / f"{name}-{rank}"
        command = [
            sys.executable,
            "-m",
            "benchmarks.speed.planner_check",
            "--child",
            json.dumps(case),
            str(out),
        ]
        with (folder / f"{name}-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log))
    deadline = time.monotonic() + limit
    for process in processes:
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for one in processes:
                one.kill()
    found = [folder / f"{name}-{rank}" for rank in range(ranks)]
    if not all(path.exists() for path in found):
        return {
            "error": "\n".join(
                (folder / f"{name}-{rank}.log").read_text()[-1500:] for rank in range(ranks)
            )
        }
    return max(
        (json.loads(path.read_text()) for path in found),
        key=lambda one: one["bytes"].get("reserved", 0),
    )


def compare(results: dict[str, dict[str, Any]], ranks: int) -> list[str]:
    """A line for each measured case: measured, and the planner's numbers over them."""
    lines = [
        f"{'configuration':<36}{'allocated':>10}{'reserved':>10}{'other':>7}{'step ms':>9}   GiB; "
        "predicted / measured"
    ]
    for name, one in results.items():
        if "error" in one:
            lines.append(f"{name:<36} failed: {one['error'].strip().splitlines()[-1][:120]}")
            continue
        step = one["seconds"]["step"]
        if "reserved" not in one["bytes"]:
            lines.append(f"{name:<36} (no GPU) step {1e3 * step:.0f} ms")
            continue
        sizes, predicted = one["bytes"], predict(one["case"], ranks)
        lines.append(
            f"{name:<36}{sizes['allocated'] / GIB:>10.2f}{sizes['reserved'] / GIB:>10.2f}"
            f"{sizes['other'] / GIB:>7.2f}{1e3 * step:>9.1f}   "
            f"allocated {predicted['allocated'] / sizes['allocated']:.3f}, "
            f"reserved {predicted['reserved'] / sizes['reserved']:.3f}"
        )
    return lines


def known(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The file's results that have no error, each with where it is from: the file's environment
    is its last call's.
    """
    return {
        name: {**one, "measured": one.get("measured", origin(found["environment"]))}
        for name, one in found["results"].items()
        if "error" not in one
    }


def origin(of: dict[str, Any]) -> dict[str, Any]:
    """Of an environment what a result keeps."""
    return {key: of[key] for key in ("date", "commit")}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=None,
        choices=[*CASES, *VERIFY],
        metavar="NAME",
        help=", ".join([*CASES, *VERIFY]),
    )
    parser.add_argument(
        "--again", action="store_true", help="measure also what the result file has"
    )
    parser.add_argument("--ranks", type=positive_int, default=1, help="GPUs")
    parser.add_argument(
        "--seconds", type=positive_float, default=450, help="start no configuration later than this"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="with tiny models (to try this program without a GPU)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="configurations that the planner was not fitted to"
    )
    parser.add_argument("--compare", default=None, metavar="FILE", help="a result of this program")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    if arguments.child is not None:
        case, out = json.loads(arguments.child[0]), Path(arguments.child[1])
        result = measure(case)
        out.write_text(json.dumps(result))
        return
    if int(os.environ.get("RANK", 0)):
        return  # under torchrun: the first process starts the ranks
    if arguments.compare is not None:
        content = read_json(Path(arguments.compare))
        print("\n".join(compare(content["results"], content["ranks"])))
        return
    name = "speed/planner-check" + (f"-{arguments.ranks}-ranks" if arguments.ranks > 1 else "")
    path = result_path(name, arguments.output)
    results = known(read_json(path)) if path.exists() else {}
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"planner-check-{os.getpid()}"
    folder.mkdir()
    if shutil.which("nvidia-smi"):  # before any process of ours
        query = [
            "nvidia-smi",
            "--query-gpu=memory.total,memory.used,memory.reserved",
            "--format=csv",
        ]
        subprocess.run(query, check=False)
    began = time.monotonic()
    for key in arguments.only or (VERIFY if arguments.verify else CASES):
        if key in results and not arguments.again:
            continue
        left = arguments.seconds - (time.monotonic() - began)
        if left < 15:
            print(
                f"{key}: not started, --seconds {arguments.seconds:.0f} are over; start the same "
                "command again"
            )
            continue
        case = {**CASES, **VERIFY}[key]
        if arguments.tiny:
            small = [
                "hidden_size=256",
                "ffn_hidden_size=512",
                "num_attention_heads=4",
                "num_query_groups=4",
            ]
            case = {
                **case,
                "override": [*small, "num_layers=2", "seq_length=64", "vocab_size=1000"],
            }
        results[key] = children(key, case, arguments.ranks, folder, left + 30) | {
            "measured": origin(environment())
        }
        print(compare({key: results[key]}, arguments.ranks)[-1], flush=True)
        write_result(name, {"ranks": arguments.ranks, "results": results}, arguments.output)
    print("\n".join(compare(results, arguments.ranks)))
    print("wrote", path)


if __name__ == "__main__":
    main()
