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
an archive of it. Prints tokens/s/GPU and peaks; writes `speed/whole.json`;
`whole_report.py` makes tables and a picture of it.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.arguments import argument_parser, check_peers, one_line, positive_float
from benchmarks.common import commit, environment, gpus, read_json, result_path, write_result
from benchmarks.speed.te_layer import unpack
from benchmarks.speed.te_train import RECIPES, peer_environment
from benchmarks.speed.whole_rank import VARIANTS
from benchmarks.speed.whole_report import finished
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


def how_it_ended(
    ended: ranks.Ended, micro_batches: Sequence[int], limit: float, stopped: bool
) -> dict[str, Any]:
    """A case's steps, and how it ended: "out_of_memory_at", or "cut" by time, or "error".

    Args:
        ended: What its ranks left.
        micro_batches: What was to be measured.
        limit: Seconds that it had.
        stopped: Whether this program was told to end. Its ranks may have been told, too: their
            exit statuses then say nothing.
    """
    steps, statuses, log = ended
    found: dict[str, Any] = {"steps": steps, "out_of_memory_at": None}
    left = micro_batches[len(steps) :]
    cut = {"cut": "with steps" if steps else "without a step"}
    if stopped:
        return found | cut if left else found
    if ranks.OUT_OF_MEMORY in statuses:
        return found | {"out_of_memory_at": left[0] if left else None}
    if not any(statuses) and None not in statuses:
        return found
    if None not in statuses:
        return found | {"error": f"ranks ended with {statuses}\n{log}"}  # a signal writes no log
    if not left:  # all is measured, whatever kept the ranks
        return found
    if steps or limit < STUCK:
        return found | cut
    return found | {"error": f"no step in {limit:.0f} s"}


def left_of(have: dict[str, Any], micro_batches: Sequence[int]) -> list[int]:
    """The micro-batches that a case of the result still lacks: not measured, and below where
    memory was out.
    """
    known = {step["micro_batch"] for step in have.get("steps", [])}
    end = have.get("out_of_memory_at")
    return sorted(n for n in set(micro_batches) - known if end is None or n < end)


def current(case: dict[str, Any]) -> bool:
    """Whether a case was measured with this commit."""
    return case["measured"]["commit"] == commit()


def turn(have: dict[str, Any]) -> int:
    """When a case is started: those that got nowhere would take the time of others, call after
    call.
    """
    return 2 if "error" in have else int(have.get("cut") == "without a step")


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
    parser = argument_parser(
        __doc__,
        models=["llama2-7b", "llama2-13b", "llama3-8b"],
        model_override=[],
        ranks=2,
        expert_parallel=1,
        micro_batches=MICRO_BATCHES,
        name="whole",
        peers=None,
    )
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO")
    parser.add_argument(
        "--variants", nargs="+", default=None, choices=[*VARIANTS], help="default: all that can run"
    )
    parser.add_argument(
        "--gpu-memory", type=positive_float, metavar="GIB", help="default: all there is"
    )
    parser.add_argument(
        "--seconds", type=positive_float, default=480, help="start no case later than this"
    )
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
    """Cases in the order of the tables, whichever were measured first: by model, GPUs and memory,
    then BF16 before others.
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
        te: Path | None = None
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
            missing, limit = left_of(have, arguments.micro_batches), left + GRACE
            variables: dict[str, str] = {}
            if case["variant"] in RECIPES:
                variables = peer_environment(te)
            ended = ranks.run(
                case | {"micro_batches": missing},
                limit,
                "benchmarks.speed.whole_rank",
                variables,
                STOPPED.is_set,
            )
            found = joined(have, how_it_ended(ended, missing, limit, STOPPED.is_set()))
            now = environment()
            measured = {k: now[k] for k in ("date", "commit", "gpus")}
            new, was = case | found | {"measured": measured}, cases.get(key_of(case), {})
            print(show(new), flush=True)
            if "measured" in was and finished(was) and new.get("cut") == "without a step":
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
