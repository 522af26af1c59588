"""Whether the present code trains as an earlier commit's did, to the last bit: then losses measured there still hold.

    python -m benchmarks.convergence.same_bits [--commit 25ece17] [--steps 50]

A run of 64 M parameters costs GPU hours, and most changes of a kernel or a pass do not change what it computes. So both
trees train a small Llama-shaped GPT on the same text, with FP8 moments and the flow's default, by their own
`launch/pretrain.py`, and every loss and gradient norm has to be equal. Where there are no GPUs the definitions in
`reference/` are compared, which tests hold the kernels to. Writes `convergence/same-bits.json`. Needs git's history.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import one_line, positive_int
from benchmarks.common import ROOT, argument_parser, options, python_path, result_path, write_result
from benchmarks.convergence.flow import settings
from benchmarks.convergence.flow_data import TINY, prepare
from benchmarks.convergence.runs import torchrun

__all__ = ["main", "parse", "train", "unpack"]

KEYS = "loss", "grad_norm"
VARIANT = "fp8 moments, row scales"


def unpack(commit: str, folder: Path) -> Path:
    """The files of a commit, in ``folder``.

    Raises:
        ValueError: there is no such commit here.
    """
    done = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.decode().split())
        raise ValueError(f"--commit: got {commit!r}, accepted: a commit in the history of {ROOT.name} ({why})")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def train(root: Path, data: str, folder: Path, steps: int, seed: int) -> list[dict[str, float]]:
    """What the code in ``root`` finds in each step.

    Raises:
        subprocess.CalledProcessError: the run failed; it has printed why.
    """
    config = folder / "config.json"
    config.write_text(json.dumps(settings(VARIANT, TINY)))
    out = folder / "run"
    line = ["--deepspeed_config", str(config), "--model", "configs/models/tiny.json", "--data", data]
    line += ["--model-override", *TINY.model, f"seq_length={TINY.sequence}", "--output", str(out)]
    line += ["--data-cache", f"{out}.cache", "--train-steps", str(steps), "--seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": python_path(root)}
    subprocess.run(torchrun("launch/pretrain.py", *line), cwd=root, env=environment, check=True, stdout=subprocess.PIPE)
    records = (json.loads(one) for one in (out / "metrics.jsonl").read_text().splitlines())
    return [{key: record[key] for key in KEYS} for record in records]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    measured = json.loads(result_path("convergence/branches").read_text())["environment"]["commit"][:7]
    parser = argument_parser(__doc__)
    parser.add_argument("--commit", default=measured, help="the earlier one; of convergence/branches.json if not given")
    parser.add_argument("--steps", type=positive_int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    found: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with one_line():
            earlier = unpack(arguments.commit, folder / "earlier")
        data = prepare(folder, TINY)
        for name, root in (("then", earlier), ("now", ROOT)):
            (folder / name).mkdir()
            found.append(train(root, data, folder / name, arguments.steps, arguments.seed))
    then, now = found
    part = next((step for step, (a, b) in enumerate(zip(then, now, strict=True), 1) if a != b), None)
    print(f"{arguments.commit}: {f'differs from step {part} on' if part else f'the same in all {len(now)} steps'}")
    result = {"settings": options(arguments), "first_difference": part, "then": then, "now": now}
    print("wrote", write_result("convergence/same-bits", result, arguments.output))


if __name__ == "__main__":
    main()
