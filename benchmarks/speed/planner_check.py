"""Peaks of training on a GPU beside the planner's numbers.

    python -m benchmarks.speed.planner_check [--only NAME ...] [--ranks 2] [--seconds 450] \\
        [--output DIR]
    python -m benchmarks.speed.planner_check \\
        --verify  # configurations that the planner was not fitted to
    python -m benchmarks.speed.planner_check \\
        --compare FILE.json # the planner against an earlier measurement

Each configuration is an engine of `launch/pretrain.py` with random tokens in processes of its own
(`--ranks` of them, each on a GPU), which take the steps of `whole_rank.py`. Peaks are those of the
rank that has the largest. A configuration that the result file has already is not measured again,
so a run that was cut goes on where it was; no new one is started after `--seconds`. Writes
`speed/planner-check.json` (`planner-check-N-ranks.json`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ranks
from benchmarks.arguments import argument_parser, positive_float
from benchmarks.common import environment, read_json, result_path, show, write_result
from benchmarks.speed.planner_cases import CASES, VERIFY, largest, predict, settings_of

GIB = 2**30
TINY = [
    "hidden_size=256",
    "ffn_hidden_size=512",
    "num_attention_heads=4",
    "num_query_groups=4",
    "num_layers=2",
    "seq_length=64",
    "vocab_size=1000",
]


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The record of a case: bytes that are held, and on a GPU its peaks and what others than
    torch's allocator hold there.
    """
    from benchmarks.speed.whole_rank import plan_of, steps
    from launch.model.gpt import load_model_config
    from launch.train import runtime, training_engine
    from megatron_patches import initialize_model_parallel

    runtime.start(device.index or 0)
    gpu, tp = device.type == "cuda", case.get("tp", 1)
    initialize_model_parallel(tp, seed=1234, create_gloo_process_groups=False)
    if case["micro"] == "largest":
        case["micro"] = largest(case)
    model = load_model_config(case["model"], case["override"])
    plan = plan_of(model, settings_of(case), tp, case.get("recompute", {}))
    engine = training_engine.build_engine(plan, lambda text: None)
    built = torch.cuda.max_memory_allocated() if gpu else 0
    loss_of, accumulation = training_engine.language_model_loss(tp, device), plan.batch.accumulation
    record = steps(engine, loss_of, plan.batch.micro, model, accumulation)
    found = {f"held: {name}": size for name, size in record["held_bytes"].items()}
    if gpu:
        free, total = torch.cuda.mem_get_info()
        found["allocated"] = max(built, record["peak_bytes"])
        found["reserved"] = record["peak_reserved_bytes"]
        found["other"] = total - free - torch.cuda.memory_reserved()
        found["of the GPU"] = total
        case["gpu"] = torch.cuda.get_device_name()
        if retries := record["allocator_retries"]:
            case["allocator_retries"] = retries
    yield {"case": case, "bytes": found}


def compare(name: str, one: dict[str, Any], world: int) -> None:
    """Print what was measured of a case, GiB, and the planner's numbers over it."""
    if "error" in one:
        print(f"{name:<36} failed: {one['error'].strip().splitlines()[-1][:120]}", flush=True)
        return
    row = {}
    if "reserved" in one["bytes"]:
        predicted = predict(one["case"], world)
        for key in ("allocated", "reserved", "other"):
            row[key] = one["bytes"][key] / GIB
        for key, size in predicted.items():
            row[f"{key}_predicted_over_measured"] = size / one["bytes"][key]
    show(
        name,
        row,
        allocated=".2f",
        reserved=".2f",
        other=".2f",
        allocated_predicted_over_measured=".3f",
        reserved_predicted_over_measured=".3f",
    )


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
    """What a result keeps of an environment."""
    return {key: of[key] for key in ("date", "commit")}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__, ranks=1, tiny=False)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*CASES, *VERIFY],
        metavar="NAME",
        help=", ".join([*CASES, *VERIFY]),
    )
    parser.add_argument(
        "--seconds", type=positive_float, default=450, help="start no configuration later than this"
    )
    parser.add_argument(
        "--verify", action="store_true", help="configurations that the planner was not fitted to"
    )
    parser.add_argument("--compare", metavar="FILE", help="a result of this program")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    if arguments.compare is not None:
        content = read_json(Path(arguments.compare), "results", "ranks")
        for key, one in content["results"].items():
            compare(key, one, content["ranks"])
        return
    name = "speed/planner-check" + (f"-{arguments.ranks}-ranks" if arguments.ranks > 1 else "")
    path = result_path(name, arguments.output)
    results = known(read_json(path, "results")) if path.exists() else {}
    began = time.monotonic()
    for key in arguments.only or (VERIFY if arguments.verify else CASES):
        if key in results:
            continue
        left = arguments.seconds - (time.monotonic() - began)
        if left < 15:
            print(f"{key}: not started, --seconds are over; start the same command again")
            continue
        case = {**CASES, **VERIFY}[key] | {"ranks": arguments.ranks}
        if arguments.tiny:
            case["override"] = TINY
        records, statuses, log = ranks.run(case, left + 30, "benchmarks.speed.planner_check")
        one = records[0] if records else {"error": f"ranks ended with {statuses}\n{log}"}
        results[key] = one | {"measured": origin(environment())}
        compare(key, results[key], arguments.ranks)
        write_result(name, {"ranks": arguments.ranks, "results": results}, arguments.output)
    print("wrote", path)


if __name__ == "__main__":
    ranks.as_rank(measure)
    main()
