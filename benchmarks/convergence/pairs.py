"""Pairs of training runs with equal seeds: how far a variant's held-out loss is from BF16's.

    python -m benchmarks.convergence.pairs --budget 540 --pairs 16 --variants bf16 coat
    python -m benchmarks.convergence.pairs --budget 540 --variants bf16:16 "coat e5m2:8"
    python -m benchmarks.convergence.pairs --budget 540 --pairs 8 --variants all --peers DIR
    python -m benchmarks.convergence.pairs_report --plot docs/figures/convergence-pairs.png

A Llama of transformers (7 M parameters outside the embedding) learns Python source as tokens of a
BPE, 10 tokens a parameter, in a plain torch loop on one GPU. The learning rate rises for 5 % of the
steps and falls to zero as a cosine. Runs of one seed have the same initial weights and the same
batches in the same order. The model is in BF16 with fp32 master weights beside it: gradients are
cast to fp32, clipped there, and the optimizer updates the masters. So variants differ by the part
that they name alone. "bf16 again" has a learning rate larger by 1e-5 of itself: what chaos does to
a run.

**Held-out loss**: every 50th window of the text is not trained on. After the last step their mean
loss is taken with the variant's own forward, and in BF16 layers from the same master weights. Of
weights that no FP8 layers have trained it is taken in the flow too ("flow_forward").

**Speed**: a step reads batch and learning rate from the GPU by a counter that lies there, so one
CUDA graph holds the whole step. Optimizers of peers take their step outside of it, and Transformer
Engine runs without a graph. A variant whose capture fails is trained without a graph. Each GPU is
shared by ``--processes`` runs.

**Continuing**: `convergence/pairs.json` is written after every run, and has all runs of earlier
calls, those in the repository too; a run that is in it is not repeated. One that is under way at
the end of ``--budget`` is saved in ``--folder``, where the text is too, and a later call on the
same machine continues it, unless it is Transformer Engine's. Where there may be none, ``--whole``
begins no run that would not end in time. A result has runs of one set of settings and one text;
give others another ``--name``.

``--preset 303m`` is a Llama of 270 M parameters outside the embedding with as many steps of as many
tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import argument_parser, one_line, positive_float
from benchmarks.common import gpus, prepare_text, read_json, result_path, show, write_result
from benchmarks.convergence.pairs_report import BF16, forward, report, show_rows
from benchmarks.convergence.pairs_run import HELD_OUT, VARIANTS, Worker

SAVING = 60
"""Seconds after the end of the budget in which a run saves itself or takes its last loss."""
SLOW = ("fp32",)
"""Variants that "all" leaves out."""
PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "303m": {
        "layers": 21,
        "hidden": 1024,
        "sequence": 1024,
        "batch": 32,
        "steps": 2160,
        "lr": 4e-4,
        "vocabulary": 16384,
        "text_bytes": "4G",
    },
}


def settings(a: argparse.Namespace, text: dict[str, Any]) -> dict[str, Any]:
    """What all runs of a result have in common."""
    names = "layers hidden sequence batch micro_batch lr vocabulary"
    found = {name: getattr(a, name) for name in names.split()}
    found["micro_batch"] = a.micro_batch or a.batch
    found["ffn"] = -(-8 * a.hidden // 3 // 128) * 128
    parameters = a.layers * a.hidden * (4 * a.hidden + 3 * found["ffn"])
    tokens = a.batch * a.sequence
    found["steps"] = a.steps or max(2, round(a.tokens_per_parameter * parameters / tokens))
    trained = found["steps"] * tokens
    found |= {"parameters": parameters, "tokens": trained, "text": text["digest"]}
    return found | {"epochs": round(trained / text["tokens"] * HELD_OUT / (HELD_OUT - 1), 3)}


class Study:
    """Runs that wait and runs that are done. Threads take one run after the other, each with a
    process of its own, and write the result after each.
    """

    def __init__(
        self,
        a: argparse.Namespace,
        shared: dict[str, Any],
        runs: list[dict[str, Any]],
        began: float,
    ) -> None:
        self.arguments, self.shared, self.runs = a, shared, runs
        self.deadline = began + (a.budget or math.inf)
        there = {(run["variant"], run["seed"]) for run in runs}
        # Seed by seed, so that there are pairs early.
        self.waiting = [
            shared | {"variant": variant, "seed": seed, "graph": True}
            for seed in range(max(a.variants.values(), default=0))
            for variant, pairs in a.variants.items()
            if seed < pairs and (variant, seed) not in there
        ]
        self.seconds: dict[str, float] = {}
        """Of the last run of this call, by variant: the first ones also compile kernels."""
        self.failed: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def fits(self, variant: str) -> bool:
        """Whether a run of a variant may begin. With ``--whole`` it has to end in time; what is not
        known counts as the longest.
        """
        needed = 0.0
        if self.arguments.whole:
            needed = self.seconds.get(variant, max(self.seconds.values(), default=0.0))
        return time.monotonic() + needed < self.deadline

    def next(self) -> dict[str, Any] | None:
        """The first waiting run that may begin."""
        with self.lock:
            for i, job in enumerate(self.waiting):
                if self.fits(job["variant"]):
                    return self.waiting.pop(i)
        return None

    def work(self, gpu: int) -> None:
        """Train runs on a GPU until none is left that may begin."""
        worker: Worker | None = None
        while (job := self.next()) is not None:
            saved = Path(job["folder"]) / f"{self.arguments.name}-{job['variant']}-{job['seed']}.pt"
            job |= {"saved": str(saved), "deadline": self.deadline, "gpu": gpu}
            worker = worker or Worker()
            left = None
            if self.deadline < math.inf:
                left = max(0.0, self.deadline - time.monotonic()) + SAVING
            found = worker.train(job, left)
            if "error" in found:
                worker.stop()
                worker = None
            with self.lock:
                self.settle(job, found)
        if worker is not None:
            worker.stop()

    def settle(self, job: dict[str, Any], found: dict[str, Any]) -> None:
        """Keep what came of a run. If one fails, its variant is trained without graphs; if one
        fails so, the others of its variant are left out.
        """
        name = f"{job['variant']}, seed {job['seed']}"
        if "stopped" in found:
            print(f"{name}: stopped after {found['stopped']} steps", flush=True)
            self.waiting.append(job)
        elif "error" not in found:
            self.runs.append(found)
            self.runs.sort(key=lambda run: (list(VARIANTS).index(run["variant"]), run["seed"]))
            self.seconds[job["variant"]] = found["seconds"]
            show(name, found, held_out_loss=".4f", training_loss=".4f", seconds=".1f", graph="d")
            self.write()
        else:
            print(f"{name} failed: {found['error']}", flush=True)
            if job["graph"] and torch.cuda.is_available():
                self.waiting.insert(0, job)
                for one in self.waiting:
                    if one["variant"] == job["variant"]:
                        one["graph"] = False
            else:
                self.failed.append({"run": name, "error": found["error"].splitlines()[-1]})
                self.waiting = [one for one in self.waiting if one["variant"] != job["variant"]]

    def write(self) -> None:
        """Write all runs, earlier ones too."""
        result = {
            "settings": self.shared["settings"],
            "processes": self.arguments.processes,
            "gaps": report(self.runs),
            "flow_forward": forward(self.runs),
            "runs": self.runs,
        }
        write_result(f"convergence/{self.arguments.name}", result, self.arguments.output, nan=True)


def prepare(a: argparse.Namespace) -> dict[str, Any]:
    """Prefix, number and digest of the tokens; made where they are not there. The text is what a
    machine without a network has: Python sources of the standard library and of the packages beside
    torch.
    """
    prefix = a.text or str(a.folder / f"text-{a.vocabulary}-{a.text_bytes}")
    if not Path(f"{prefix}.json").exists():
        inputs = ["stdlib", str(Path(torch.__file__).parents[1])]
        more = ["--glob", "*.py", "--train-bytes", "5M", "--max-bytes", a.text_bytes]
        prepare_text(Path(prefix), f"bpe:{a.vocabulary}", inputs, *more)
    with open(f"{prefix}.bin", "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    summary = json.loads(Path(f"{prefix}.json").read_text())
    return {"prefix": prefix, "tokens": summary["tokens"], "digest": digest}


def earlier(a: argparse.Namespace, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of earlier calls: of the repository, and of ``--output``.

    Raises:
        ValueError: they were made with other settings.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    name = f"convergence/{a.name}"
    for path in {result_path(name), result_path(name, a.output)}:
        if not path.exists():
            continue
        result = read_json(path, "settings", "runs")
        for key, value in wanted.items():
            if result["settings"].get(key) != value:
                raise ValueError(
                    f"--name: {path}: {key}: got {result['settings'].get(key)}, accepted: this "
                    f"call's {value}, or another --name"
                )
        found |= {(run["variant"], run["seed"]): run for run in result["runs"]}
    return list(found.values())


def available(variants: dict[str, int], peers: str | None) -> dict[str, int]:
    """The variants that can run here, with their pairs; prints why another one is left out."""
    found = {}
    for name, pairs in variants.items():
        peer, why = VARIANTS[name].peer, None
        if peer == "transformer_engine":
            if peers is None or not torch.cuda.is_available():
                why = "no --peers, or no GPU"
        elif peer and importlib.util.find_spec(peer) is None:
            why = f"no package {peer}"
        if why is None:
            found[name] = pairs
        else:
            print(f"{name}: left out: {why}")
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program. A preset changes the defaults."""
    parser = argument_parser(
        __doc__,
        layers=4,
        hidden=384,
        sequence=512,
        batch=64,
        tokens_per_parameter=10.0,
        lr=1.5e-3,
        vocabulary=4096,
        text_bytes="250M",
        processes=3,
        pairs=16,
        text=None,
        peers=None,
        name="pairs",
    )
    parser.add_argument("--micro-batch", type=int, help="windows of a backward (default: --batch)")
    parser.add_argument("--steps", type=int, help="instead of --tokens-per-parameter")
    parser.add_argument("--preset", choices=list(PRESETS), default="small")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[BF16, "coat"],
        metavar="NAME[:PAIRS]",
        help="how many pairs, where not --pairs; all of them: all",
    )
    parser.add_argument(
        "--budget", type=positive_float, metavar="SECONDS", help="of a call, preparation included"
    )
    parser.add_argument(
        "--whole", action="store_true", help="begin no run that would not end within the budget"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/pairs"), help="where text and saved runs are"
    )
    first, _ = parser.parse_known_args(given)
    parser.set_defaults(**PRESETS[first.preset])
    a = parser.parse_args(given)
    if "all" in a.variants:
        a.variants = [name for name in VARIANTS if name not in SLOW]
    wanted: dict[str, int] = {}
    for variant in a.variants:
        name, _, count = variant.partition(":")
        if name not in VARIANTS or count and not count.isdecimal():
            parser.error(f"--variants: got {variant!r}, accepted: {', '.join(VARIANTS)}, :PAIRS")
        wanted[name] = int(count or a.pairs)
    a.variants = wanted
    if a.batch % (a.micro_batch or a.batch):
        parser.error(f"--micro-batch: got {a.micro_batch}, accepted: a divisor of {a.batch}")
    return a


def main() -> None:
    began, a = time.monotonic(), parse()
    a.folder.mkdir(parents=True, exist_ok=True)
    text = prepare(a)
    print(f"text in {time.monotonic() - began:.0f} s: {text['tokens']:,} tokens", flush=True)
    shared = {"settings": settings(a, text), "text": text["prefix"], "folder": str(a.folder)}
    with one_line():
        runs = earlier(a, shared["settings"])
    a.variants = available(a.variants, a.peers)
    with tempfile.TemporaryDirectory() as unpacked:
        if any(VARIANTS[name].peer == "transformer_engine" for name in a.variants):
            from benchmarks.speed import te_layer

            shared["peers"] = str(te_layer.unpack(a.peers, unpacked))
        study = Study(a, shared, runs, began)
        each = [gpu for gpu in range(max(1, len(gpus()))) for _ in range(a.processes)]
        threads = [threading.Thread(target=study.work, args=(gpu,), daemon=True) for gpu in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    show_rows(report(study.runs))
    print(f"{len(study.waiting)} runs wait for a later call; failed: {study.failed or 'none'}")


if __name__ == "__main__":
    main()
