"""Whole models: steps and memory with larger and larger micro-batches, until memory is out, for
each variant.

    python -m benchmarks.speed.whole [--models llama2-7b ...] [--ranks 2] [--variants BF16 both \\
        ...] [--peers DIR]
    python -m benchmarks.speed.whole --gpu-memory 80     # as on a GPU with so many GiB

Each case (model, variant, GPUs, memory) has processes of its own, one a GPU, which build the engine
of `pretrain.py` with random tokens and train with one micro-batch after the other: two steps to
warm up, three that count. The same command goes on where it was: what the result has of the same
commit is not measured again, no case is started after `--seconds`, and one that is cut by time
keeps its steps and goes on with the micro-batches that are left. Cases that were cut before a step,
or failed, are tried again last. `--gpu-memory` is for all that this process holds there, NCCL's
buffers excepted. Variants that begin with "TE" need `--peers`, a folder with Transformer Engine or
an archive of it. Prints tokens/s/GPU and peaks; writes `speed/whole.json`, of which
`whole_report.py` makes tables and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_peers, one_line, positive_float, positive_int
from benchmarks.common import (
    ROOT,
    argument_parser,
    commit,
    environment,
    gpus,
    python_path,
    read_json,
    result_path,
    wait_for_ranks,
    write_result,
)
from benchmarks.speed.te_layer import unpack
from benchmarks.speed.te_train import RECIPES, peer_environment
from benchmarks.speed.whole_rank import OUT_OF_MEMORY, VARIANTS
from benchmarks.speed.whole_report import finished
from coat_dist.nodes import free_port
from launch.model.model_config import load_model_config

MICRO_BATCHES = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24]
KEY = ("model", "override", "variant", "ranks", "stage", "gpu_memory", "expert_parallel")
"""What tells cases apart."""
GRACE = 30
"""Seconds that a case may go on after ``--seconds``. One that has less than twice as much in all
is not started.
"""
STUCK = 300
"""Seconds in which some step should be through: a case with none after so long has failed, it
was not cut.
"""
STOPPED = threading.Event()
"""This program was told to end: the case that runs keeps its steps, and none is started."""


def run(case: dict[str, Any], te: Path | None, limit: float) -> dict[str, Any]:
    """A case's steps, and how it ended: "out_of_memory_at", or "cut" by time, or "error"."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_"))
    }
    shared = {
        "WORLD_SIZE": str(case["ranks"]),
        "LOCAL_WORLD_SIZE": str(case["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": python_path(ROOT),
    }
    if case["variant"] in RECIPES:
        assert te is not None  # see parse
        shared |= {**peer_environment(1), "PYTHONPATH": python_path(ROOT, te, te / "deps")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps"
        line = [sys.executable, "-m", "benchmarks.speed.whole_rank", json.dumps(case), str(out)]
        processes = []
        for rank in range(case["ranks"]):
            with (Path(folder) / f"{rank}.log").open("w") as log:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(
                        line, cwd=ROOT, env={**clean, **shared, **own}, stdout=log, stderr=log
                    )
                )
        statuses = wait_for_ranks(processes, limit, STOPPED.is_set)
        steps = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
        found: dict[str, Any] = {"steps": steps, "out_of_memory_at": None}
        left = [n for n in case["micro_batches"] if n > (steps[-1]["micro_batch"] if steps else 0)]
        if STOPPED.is_set():  # its ranks may have been told, too: what they ended with says nothing
            return found | ({"cut": "with steps" if steps else "without a step"} if left else {})
        if OUT_OF_MEMORY in statuses:
            return found | {"out_of_memory_at": left[0] if left else None}
        if None in statuses and not left:  # all is measured, whatever kept them
            return found
        if None in statuses and (steps or limit < STUCK):
            return found | {"cut": "with steps" if steps else "without a step"}
        if statuses == [0] * case["ranks"]:
            return found
        if None in statuses:
            return found | {"error": f"no step in {limit:.0f} s"}
        logs = [
            (Path(folder) / f"{rank}.log").read_text(errors="replace")[-1500:]
            for rank in range(case["ranks"])
        ]
        # A signal writes no log.
        return found | {"error": "\n".join([f"ranks ended with {statuses}", *logs])}


def left_of(have: dict[str, Any], micro_batches: Sequence[int]) -> list[int]:
    """The micro-batches that a case of the result still lacks: not measured, and below where
    memory was out.
    """
    known = {step["micro_batch"] for step in have.get("steps", [])}
    end = have.get("out_of_memory_at")
    return sorted(n for n in set(micro_batches) - known if end is None or n < end)


def current(case: dict[str, Any]) -> bool:
    """Whether a case was measured with the commit that is here."""
    return case["measured"]["commit"] == commit()


def turn(have: dict[str, Any]) -> int:
    """When a case is started: those that got nowhere would take the time of others, call after
    call.
    """
    return 2 if "error" in have else int(have.get("cut") == "without a step")


def apart_from(have: dict[str, Any], micro_batches: Sequence[int]) -> dict[str, Any]:
    """What a case has measured, without what ``micro_batches`` measure again."""
    end = have.get("out_of_memory_at")
    steps = [step for step in have.get("steps", []) if step["micro_batch"] not in micro_batches]
    return {
        "steps": steps,
        "out_of_memory_at": end if end is None or end > max(micro_batches) else None,
    }


def joined(have: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What a case has measured so far, and how it ended last."""
    ends = [
        one["out_of_memory_at"] for one in (have, found) if one.get("out_of_memory_at") is not None
    ]
    end = min(ends, default=None)
    steps = sorted([*have.get("steps", []), *found["steps"]], key=lambda step: step["micro_batch"])
    return found | {
        "steps": [step for step in steps if end is None or step["micro_batch"] < end],
        "out_of_memory_at": end,
    }


def worth_keeping(was: dict[str, Any], new: dict[str, Any], again: bool) -> bool:
    """Whether a case stays as it was: its new measurement found nothing, or less than what was
    to be measured again.
    """
    if "measured" not in was or not finished(was) or finished(new):
        return False
    return new.get("cut") == "without a step" or (again and current(was))


def show(one: dict[str, Any]) -> str:
    """A line about a case."""
    memory = "" if one["gpu_memory"] is None else f", {one['gpu_memory']:g} GiB"
    name = f"{one['model']}, {one['ranks']} GPUs{memory}, {one['variant']}"
    if "error" in one:
        return f"{name}: failed: {one['error'].strip().splitlines()[-1][:160]}"
    rows = [
        f"{s['micro_batch']}: {s['tokens_per_second_per_gpu']:,.0f} "
        f"({s.get('peak_bytes', 0) / 2**30:.1f})"
        for s in one["steps"]
    ]
    end = "" if one["out_of_memory_at"] is None else f"; out of memory at {one['out_of_memory_at']}"
    end += "; cut by time" if one.get("cut") else ""
    return f"{name}: micro-batch: tokens/s/GPU (GiB) {', '.join(rows) or 'none'}{end}"


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["llama2-7b", "llama2-13b", "llama3-8b"],
        help="of configs/models",
    )
    parser.add_argument("--model-override", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=positive_int, default=2, help="GPUs")
    parser.add_argument("--expert-parallel", type=positive_int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO")
    parser.add_argument(
        "--variants", nargs="+", default=None, choices=[*VARIANTS], help="default: all that can run"
    )
    parser.add_argument("--micro-batches", nargs="+", type=positive_int, default=MICRO_BATCHES)
    parser.add_argument(
        "--gpu-memory",
        type=positive_float,
        default=None,
        metavar="GIB",
        help="(default: all there is)",
    )
    parser.add_argument(
        "--seconds", type=positive_float, default=480, help="start no case later than this"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure also what the result has, from the beginning in each call",
    )
    parser.add_argument("--name", default="whole", help="of the JSON result")
    parser.add_argument("--peers", help="folder with Transformer Engine, or with an archive of it")
    arguments = parser.parse_args(given)
    if arguments.variants is None:
        usual = [v for v in VARIANTS if "graphs" not in v]  # those are for small models
        arguments.variants = [v for v in usual if arguments.peers is not None or v not in RECIPES]
    if arguments.peers is None and any(v in RECIPES for v in arguments.variants):
        parser.error(
            "--variants: got a peer without --peers, accepted: with a folder that has Transformer "
            "Engine"
        )
    return arguments


def cases_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is asked for."""
    return [
        {
            "model": model,
            "override": arguments.model_override,
            "variant": variant,
            "ranks": arguments.ranks,
            "stage": arguments.stage,
            "gpu_memory": arguments.gpu_memory,
            "expert_parallel": arguments.expert_parallel,
        }
        for model in arguments.models
        for variant in arguments.variants
    ]


def key_of(case: dict[str, Any]) -> tuple[str, ...]:
    """A case's :data:`KEY`."""
    return tuple(str(case.get(k, 1)) for k in KEY)


def wanted(
    arguments: argparse.Namespace,
    known: Sequence[dict[str, Any]],
    say: Callable[[str], object] = print,
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Cases to start, in this order, each with its earlier result; ``say`` gets a line about
    every other case.
    """
    cases, found = {key_of(one): one for one in known}, []
    for case in cases_of(arguments):
        have = cases.get(key_of(case), {})
        if not ("measured" in have and current(have)):
            have = {}
        elif arguments.again:
            have = apart_from(have, arguments.micro_batches)
        if have and "error" not in have and not left_of(have, arguments.micro_batches):
            say(f"has {show(have)}")
        else:
            found.append((case, have))
    return sorted(found, key=lambda one: turn(one[1]))


def check_gpus(known: Sequence[dict[str, Any]], here: Sequence[str]) -> None:
    """Check that a result has no cases of GPUs with other names: in its tables they would stand
    beside those of here.

    Raises:
        ValueError: it has some.
    """
    if other := {one["measured"]["gpus"][0] for one in known if one["measured"]["gpus"]} - set(
        here[:1]
    ):
        raise ValueError(
            f"--name: got a result of {', '.join(sorted(other))}, accepted on "
            f"{here[0] if here else 'no GPU'}: another"
        )


def in_order(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the tables have them, whichever were measured first: by model, GPUs and memory, then
    BF16 before others.
    """
    variants = {name: index for index, name in enumerate(VARIANTS)}

    def place(case: dict[str, Any]) -> tuple:
        part = case["gpu_memory"] is not None
        variant = variants.get(case["variant"], len(variants))  # one may have had another name
        return -case["ranks"], part, case["gpu_memory"] or 0, case["stage"], variant

    models = list(dict.fromkeys(str((case["model"], case["override"])) for case in cases))
    return sorted(
        cases, key=lambda one: (models.index(str((one["model"], one["override"]))), *place(one))
    )


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    path = result_path(f"speed/{arguments.name}", arguments.output)
    with one_line():
        if arguments.peers is not None:
            check_peers(arguments.peers)
        for model in arguments.models:
            load_model_config(model, arguments.model_override)
        known = read_json(path)["cases"] if path.exists() else []
        check_gpus(known, gpus())
    cases = {key_of(one): one for one in known}
    began = time.monotonic()
    with ExitStack() as stack:
        te = None
        for case, have in wanted(arguments, known):
            if STOPPED.is_set():
                break
            left = arguments.seconds - (time.monotonic() - began)
            if left < GRACE:
                print(
                    f"not started, --seconds {arguments.seconds:g} are over: {case['model']}, "
                    f"{case['variant']}"
                )
                continue
            if case["variant"] in RECIPES and te is None:  # an archive takes its time
                te = unpack(arguments.peers, stack.enter_context(tempfile.TemporaryDirectory()))
                left = arguments.seconds - (time.monotonic() - began)
            missing = left_of(have, arguments.micro_batches)
            found = joined(have, run(case | {"micro_batches": missing}, te, left + GRACE))
            now = environment()
            measured = {k: now[k] for k in ("date", "commit", "gpus")}
            new, was = case | found | {"measured": measured}, cases.get(key_of(case), {})
            print(show(new), flush=True)
            if worth_keeping(was, new, arguments.again):
                print("it was not finished: what the result has of it stays")
                continue
            cases[key_of(case)] = new
            write_result(
                f"speed/{arguments.name}", {"cases": in_order([*cases.values()])}, arguments.output
            )
    print("wrote", path)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: STOPPED.set())
    main()
