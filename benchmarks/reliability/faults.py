"""Is a run lost? Kills, damage, full disks, mismatches, dead and hung ranks, with coat_dist and with plain DeepSpeed.

    python -m benchmarks.reliability.faults            # everything: hundreds of runs on a CPU
    python -m benchmarks.reliability.faults --quick    # some of each kind

Needs Linux and a C compiler: kills and full disks come at single calls, by a library that is loaded before libc.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, argument_parser, options, python_path, write_result

from . import damage, full_disk, kills, mismatches, stopped
from .bench import Bench, Case
from .disk import compile_library
from .program import COAT, DEEPSPEED
from .ranks import preload

GROUPS = {
    "kills": kills.cases,
    "damage": damage.cases,
    "full-disk": full_disk.cases,
    "mismatches": mismatches.cases,
    "stopped": stopped.cases,
}
QUICK = {"kills": 5, "damage": 6, "full-disk": 2, "mismatches": 3, "stopped": 1}
"""Cases of each kind, program and stage."""
PROGRAMS = {"coat": COAT, "deepspeed": DEEPSPEED}
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_BUILD_OPS": "0"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="some cases of each kind")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3], help="of ZeRO")
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS, help="kinds of faults")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every case of coat_dist passed."""
    args = parse(argv)
    if args.worker:
        _work(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        if library is None:
            print("no C compiler (cc, gcc or clang): nothing was tried", file=sys.stderr)
            return 2
        began = time.monotonic()
        with ThreadPoolExecutor() as side_by_side:
            work = [side_by_side.submit(_start, args, name, library, Path(folder)) for name in args.programs]
            found = {name: one.result() for name, one in zip(args.programs, work, strict=True)}
    rows = summary(found)
    print(table(rows))
    failed = [row for row in found.get("coat", []) if not row["passed"]]
    for row in failed:
        print(f"coat_dist failed: ZeRO-{row['stage']}, {row['group']}, {row['name']}: {row['what']}")
    name = "reliability/faults" + ("-quick" if args.quick else "")
    cases = {PROGRAMS[program]: _compact(of) for program, of in found.items()}
    seconds = round(time.monotonic() - began)
    options_ = options(args, "worker")
    path = write_result(name, {"options": options_, "seconds": seconds, "summary": rows, "cases": cases}, args.output)
    print(f"{seconds} s; {path}")
    return 1 if failed else 0


def _compact(cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By stage and kind of fault, "name | passed or failed | what was seen": hundreds of cases on few lines."""
    found: dict[str, list[str]] = {}
    for case in cases:
        how = "passed" if case["passed"] else "failed"
        found.setdefault(f"ZeRO-{case['stage']}, {case['group']}", []).append(
            f"{case['name']} | {how} | {case['what']}"
        )
    return found


def _start(args: argparse.Namespace, program: str, library: Path, work: Path) -> list[dict[str, Any]]:
    """One program's cases, in a process of its own: it may not see what the other has imported."""
    out = work / f"{program}.jsonl"
    line = [sys.executable, "-m", "benchmarks.reliability.faults", "--worker", str(out), "--programs", program]
    line += ["--stages", *map(str, args.stages), "--groups", *args.groups, *(["--quick"] if args.quick else [])]
    environment = {**os.environ, **ENVIRONMENT, "LD_PRELOAD": str(library), "PYTHONPATH": python_path(ROOT)}
    subprocess.run(line, check=True, env=environment, cwd=ROOT)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _work(args: argparse.Namespace) -> None:
    program = PROGRAMS[args.programs[0]]
    preload(program)
    folder = Path(args.worker).parent / args.programs[0]
    with open(args.worker, "w", encoding="utf-8") as out:
        for stage in args.stages:
            bench = Bench(program, stage, folder / f"zero-{stage}")
            for group in args.groups:
                for case in GROUPS[group](bench, QUICK[group] if args.quick else None):
                    out.write(json.dumps(case._asdict()) + "\n")
                    out.flush()
                    _say(program, case)


def _say(program: str, case: Case) -> None:
    mark = "passed" if case.passed else "FAILED"
    print(f"{program}, ZeRO-{case.stage}, {case.group}: {case.name}: {mark}: {case.what}", flush=True)


def summary(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Passed and tried cases by kind of fault, stage and program."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for program, cases in found.items():
        for case in cases:
            row = rows.setdefault((case["group"], case["stage"]), {"fault": case["group"], "stage": case["stage"]})
            passed, tried = row.get(PROGRAMS[program], [0, 0])
            row[PROGRAMS[program]] = [passed + case["passed"], tried + 1]
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    """The summary in Markdown."""
    columns = [name for name in PROGRAMS.values() if any(name in row for row in rows)]
    lines = [f"| fault | ZeRO | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        cells = [" of ".join(map(str, row[name])) if name in row else "" for name in columns]
        lines.append(f"| {row['fault']} | {row['stage']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
