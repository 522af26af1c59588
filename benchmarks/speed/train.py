"""End to end: the same pretraining run with and without the "coat" block, through DeepSpeed's
launcher.

    python -m benchmarks.speed.train --ranks 1 [--steps 50] [--layers 8] [--model \\
        configs/models/llama2-7b.json]
    python -m benchmarks.speed.train --ranks 2 --peers DIR  # beside 'TE bf16' and 'TE fp8 delayed'
    python -m benchmarks.speed.train --ranks 2 --tensor-parallel 2 --micro-batch 2 4 \\
        --configs 'TE bf16' zero2 'zero2 over NCCL' --peers DIR --name train-tp-2

Each run is `launch/pretrain.py` with one configuration of `configs/deepspeed`; text is the running
Python's standard library. A peer's name runs the same program with Transformer Engine's layers
(`te_train.py`) and `--peer-config`; DIR has the package, or an archive of it. Prints, for each run,
the median step, tokens/s/GPU, peak memory and final loss. Ratios are to the first run (the
baseline) of the same micro-batch; gaps of losses are to the first run of this program without a
"coat" block, where there is one. Writes `speed/train-N-ranks.json` when all runs are done; the same
command goes on where it was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import argument_parser, check_peers, int_from_0, one_line
from benchmarks.common import (
    ROOT,
    commit,
    gpus,
    loss_gaps,
    options,
    prepare_text,
    python_path,
    read_json,
    result_path,
    show,
    write_json,
    write_result,
)
from benchmarks.speed.collectives import NCCL_ONLY
from benchmarks.speed.te_layer import unpack
from benchmarks.speed.te_train import RECIPES, peer_environment
from benchmarks.timing import median
from coat_dist.nodes import free_port
from launch.model.model_config import load_model_config

WARM_UP = 10
OURS, PEERS = ("zero2-bf16", "zero2"), ("TE bf16", "TE fp8 delayed")
"""What is run unless something else is asked for."""


def run(
    name: str,
    micro_batch: int,
    data: str,
    folder: Path,
    te: Path | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One pretraining run; its records and what its memory table says."""
    config = arguments.peer_config if name in RECIPES else name.removesuffix(NCCL_ONLY)
    out = folder / f"{name}-{micro_batch}".replace(" ", "-")
    settings = json.loads((ROOT / f"configs/deepspeed/{config}.json").read_text())
    settings["train_micro_batch_size_per_gpu"] = micro_batch
    settings["gradient_accumulation_steps"] = arguments.accumulation
    path = folder / f"{out.name}.json"
    path.write_text(json.dumps(settings))
    variables = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    program = "launch/pretrain.py"
    if name in RECIPES:
        program = f"benchmarks/speed/te_train.py --fp8-recipe {RECIPES[name]}"
        variables |= peer_environment(te, arguments.tensor_parallel)
    elif name.endswith(NCCL_ONLY):
        variables["COAT_PEER_MEMORY"] = "0"
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += f"--num_gpus {arguments.ranks} --log_level error".split()
    command += f"--master_port {free_port()} {program} --lr {arguments.lr}".split()
    command += f"--train-steps {arguments.steps}".split()
    command += f"--warmup-steps {max(1, arguments.steps // 2)}".split()
    command += f"--tensor-parallel {arguments.tensor_parallel}".split()
    command += ["--deepspeed_config", str(path), "--output", str(out), "--data", data]
    command += ["--model", arguments.model]
    if arguments.tensor_parallel > 1:
        command.append("--sequence-parallel")
    if overrides := [*layers_of(arguments), *arguments.model_override]:
        command += ["--model-override", *overrides]
    print(f"== {name}, micro-batch {micro_batch}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env=variables)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steady = records[min(WARM_UP, len(records) - 1) :]
    return {
        "config": name,
        "micro_batch": micro_batch,
        "losses": [r["loss"] for r in records],
        "grad_norms": [r["grad_norm"] for r in records],
        "step_ms": 1e3 * median([r["step_time"] for r in steady]),
        "tokens_per_second_per_gpu": median([r["tokens_per_second_per_gpu"] for r in steady]),
        "peak_memory_gib": max(r["peak_memory_bytes"] for r in records) / 2**30,
        "memory": json.loads((out / "memory.json").read_text()),
    }


def layers_of(arguments: argparse.Namespace) -> list[str]:
    """The override that ``--layers`` is."""
    return [f"num_layers={arguments.layers}"] if arguments.layers else []


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        ranks=1,
        peer_config="zero2-bf16",
        peers=None,
        model="configs/models/llama2-7b.json",
        model_override=[],
        micro_batch=[2],
        accumulation=1,
        tensor_parallel=1,
        steps=50,
        # Gentle on purpose: with 8 k tokens a step, rates from 5e-5 on make the BF16 loss itself
        # jump by several units (gradient norms of 50 to 130), and then any two runs part for a
        # while, however small their first difference.
        lr=1e-5,
        vocabulary=32000,
        name=None,
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        metavar="NAME",
        help="files of configs/deepspeed, also followed by ' over NCCL' (COAT_PEER_MEMORY=0), and "
        f"peers: {', '.join(map(repr, RECIPES))}; the first one is the baseline (default: "
        f"{' '.join(OURS)}, with --peers {' '.join(map(repr, PEERS))} before them)",
    )
    parser.add_argument(
        "--layers", type=int_from_0, default=8, help="layers of that model; 0 = all"
    )
    arguments = parser.parse_args(given)
    if arguments.configs is None:
        arguments.configs = [*(PEERS if arguments.peers is not None else ()), *OURS]
    if any(name in RECIPES for name in arguments.configs) and arguments.peers is None:
        parser.error(
            "--configs: got a peer without --peers, accepted: with a folder that has Transformer "
            "Engine"
        )
    in_fp8 = [name for name in arguments.configs if RECIPES.get(name, "none") != "none"]
    if arguments.accumulation > 1 and in_fp8:
        parser.error(
            f"--accumulation: got {arguments.accumulation} with a peer in FP8, accepted: 1 (it "
            "would quantize its weights in every micro-batch)"
        )
    for name in [*arguments.configs, arguments.peer_config]:
        file = ROOT / f"configs/deepspeed/{name.removesuffix(NCCL_ONLY)}.json"
        if name not in RECIPES and not file.is_file():
            parser.error(
                f"--configs: got {name!r}, accepted: a name of configs/deepspeed, or "
                f"{', '.join(RECIPES)}"
            )
    return arguments


def is_bf16(config: str) -> bool:
    """Whether a run is one of this program without a "coat" block: what losses are compared
    with.
    """
    return config not in RECIPES and "coat" not in json.loads(
        (ROOT / f"configs/deepspeed/{config.removesuffix(NCCL_ONLY)}.json").read_text()
    )


def compare(runs: Sequence[dict[str, Any]]) -> None:
    """Add to runs of one micro-batch their ratios to the first, and their losses' gaps from
    BF16's, and print them.
    """
    base = runs[0]
    bf16 = next((one for one in runs if is_bf16(one["config"])), base)
    ratios = {
        "step_ms": "step_time_ratio",
        "tokens_per_second_per_gpu": "tokens_per_second_ratio",
        "peak_memory_gib": "peak_memory_ratio",
    }
    for one in runs:
        for key, ratio in ratios.items():
            one[ratio] = one[key] / base[key]
        one |= {"losses_beside": bf16["config"], **loss_gaps(one["losses"], bf16["losses"])}
        show(
            one["config"],
            one,
            micro_batch="d",
            step_ms=".1f",
            step_time_ratio=".2f",
            tokens_per_second_per_gpu=",.0f",
            tokens_per_second_ratio=".2f",
            peak_memory_gib=".1f",
            peak_memory_ratio=".2f",
            losses_beside="",
            largest_loss_gap=".2%",
            last_ten_loss_gap="+.2%",
        )


class Kept:
    """Runs that are done, in a file beside the result, until all are: a command that was cut, or
    one of whose runs failed, goes on where it was if commit, options and GPUs are the same.
    """

    def __init__(self, name: str, settings: dict[str, Any], output: str | None) -> None:
        self._path = result_path(f"speed/{name}-unfinished", output)
        self._same = {"settings": settings, "commit": commit(), "gpus": gpus()}
        found = read_json(self._path) if self._path.exists() else {}
        self._runs: list[dict[str, Any]] = found["runs"] if found.get("same") == self._same else []

    def get(self, name: str, micro_batch: int) -> dict[str, Any] | None:
        """A run that is done."""
        done = (
            one for one in self._runs if (one["config"], one["micro_batch"]) == (name, micro_batch)
        )
        return next(done, None)

    def add(self, run: dict[str, Any]) -> None:
        """Keep a run."""
        self._runs.append(run)
        write_json(self._path, {"same": self._same, "runs": self._runs})

    def forget(self) -> None:
        """All are done, and in the result."""
        self._path.unlink(missing_ok=True)


def main() -> None:
    arguments = parse()
    name = arguments.name or f"train-{arguments.ranks}-rank{'s' if arguments.ranks > 1 else ''}"
    with one_line():
        if arguments.peers is not None:
            check_peers(arguments.peers)
        file = ROOT / arguments.model  # ranks run there; it may be a name, too
        overrides = [*layers_of(arguments), *arguments.model_override]
        load_model_config(file if file.is_file() else arguments.model, overrides)
        kept = Kept(name, options(arguments), arguments.output)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        te = unpack(arguments.peers, str(folder / "te")) if arguments.peers else None
        prepare_text(folder / "stdlib", f"bpe:{arguments.vocabulary}", ["stdlib"])
        for micro_batch in arguments.micro_batch:
            for config in arguments.configs:
                if kept.get(config, micro_batch) is None:
                    try:
                        kept.add(
                            run(config, micro_batch, str(folder / "stdlib"), folder, te, arguments)
                        )
                    except subprocess.CalledProcessError as error:
                        failed.append(
                            f"{config}, micro-batch {micro_batch}: exit {error.returncode}"
                        )
    runs: list[dict[str, Any]] = []
    for micro_batch in arguments.micro_batch:
        done = (kept.get(config, micro_batch) for config in arguments.configs)
        together = [one for one in done if one is not None]
        if together:
            compare(together)
        runs += together
    if failed:
        sys.exit("not written; the same command goes on with what failed: " + "; ".join(failed))
    found = {"settings": options(arguments), "runs": runs}
    print("wrote", write_result(f"speed/{name}", found, arguments.output))
    kept.forget()


if __name__ == "__main__":
    main()
