"""Models, text, variants of the flow and settings of the training runs of `branches.py` and
`long.py`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import ROOT, prepare_text, read_json

__all__ = [
    "BF16",
    "FP8_MOMENTS",
    "FULL",
    "HELD_OUT",
    "NUDGE",
    "SAME",
    "TINY",
    "VARIANTS",
    "Job",
    "Size",
    "earlier",
    "prepare",
    "pretrain",
    "settings",
    "tokens",
]

BF16 = "bf16"
"""The variant that all others are compared with."""
VARIANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    "row scales": {"forward_scales": "row"},
    "row scales, saved in e4m3": {"forward_scales": "row", "saved_format": "e4m3"},
    "tensor scales": {"forward_scales": "tensor"},
    "tensor scales, quantized": {"forward_scales": "tensor", "forward": "quantized"},
    "tensor scales, e5m2 gradients": {"forward_scales": "tensor", "grad_format": "e5m2"},
    "tensor scales, fp8 attention": {"forward_scales": "tensor", "attention": "fp8"},
    "fp8 moments": None,
    "fp8 moments, row scales": {"forward_scales": "row"},
}
"""The "activation" block of each, None for BF16 layers. Whether it is valid is seen when its run
starts.
"""
FP8_MOMENTS = "fp8 moments", "fp8 moments, row scales"
"""Variants whose optimizer is CoatAdamW; the last is the project's default, optimizer and flow
together.
"""


HELD_OUT = 0.04
"""Share of the data that is not trained on."""

NUDGE = 1e-5
"""Relative increase of the learning rate when a run is repeated: the two then differ by chaos
alone.
"""
SAME = "steps", "lr", "tiny", "branch_at"
"""Settings that runs have in common if they are compared."""


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    model: tuple[str, ...]
    sequence: int
    micro_batch: int
    evaluation: int
    """Micro-batches of held-out text."""
    max_bytes: str


FULL = Size(
    (
        "num_layers=9",
        "hidden_size=768",
        "ffn_hidden_size=2048",
        "num_attention_heads=12",
        "num_query_groups=12",
    ),
    sequence=1024,
    micro_batch=32,
    evaluation=64,
    max_bytes="100M",
)
TINY = Size(
    (
        "num_layers=2",
        "hidden_size=64",
        "ffn_hidden_size=192",
        "num_attention_heads=2",
        "num_query_groups=2",
    ),
    sequence=64,
    micro_batch=4,
    evaluation=4,
    max_bytes="1M",
)


class Job(NamedTuple):
    """One run. Repeat r has a slightly larger learning rate: what differs between repeats is what
    rounding does to a run by chaos alone.
    """

    variant: str
    seed: int
    repeat: int

    @classmethod
    def parse(cls, text: str) -> Job:
        """Parse "VARIANT:SEED:REPEAT"; seed and repeat are 0 where they are left out."""
        variant, *numbers = text.split(":")
        if variant not in VARIANTS or len(numbers) > 2 or not all(n.isdecimal() for n in numbers):
            known = ", ".join(map(repr, VARIANTS))
            raise argparse.ArgumentTypeError(
                f"got {text!r}, accepted: VARIANT:SEED:REPEAT, VARIANT one of {known}"
            )
        seed, repeat = (*map(int, numbers), 0, 0)[:2]
        return cls(variant, seed, repeat)

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, repeat {self.repeat}"

    @property
    def file_name(self) -> str:
        """What the files of the run are called."""
        return f"{self.variant.replace(', ', '-').replace(' ', '-')}-{self.seed}-{self.repeat}"


def settings(variant: str, size: Size) -> dict[str, Any]:
    """The DeepSpeed configuration of a run."""
    config = json.loads((ROOT / "configs/deepspeed/zero2-bf16.json").read_text())
    config["train_micro_batch_size_per_gpu"] = size.micro_batch
    activation = VARIANTS[variant]
    if variant in FP8_MOMENTS:
        config["optimizer"]["type"] = "CoatAdamW"
        activation = activation or {"enabled": False}
    return config if activation is None else config | {"coat": {"activation": activation}}


def pretrain(
    job: Job,
    size: Size,
    data: str,
    config: Path,
    out: Path,
    arguments: argparse.Namespace,
    nudge: float = NUDGE,
) -> list[str]:
    """The arguments of `launch/pretrain.py` for a run; ``nudge``: relative step of the learning
    rate a repeat.
    """
    steps, lr = arguments.steps, arguments.lr * (1 + nudge * job.repeat)
    held_out = round(1000 * HELD_OUT)
    line = f"--seed {job.seed} --train-steps {steps} --warmup-steps {steps // 10} --lr {lr!r}"
    line += f" --split {1000 - held_out},{held_out},0 --eval-interval {steps}"
    line += f" --eval-steps {size.evaluation} --model configs/models/tiny.json --model-override"
    words = [*line.split(), *size.model, f"seq_length={size.sequence}"]
    words += ["--deepspeed_config", str(config), "--data", data, "--output", str(out)]
    return words + ["--data-cache", f"{out}.cache"]


def prepare(folder: Path, size: Size) -> str:
    """Bytes of Python sources; the prefix for --data."""
    prefix, packages = folder / "python", Path(torch.__file__).parents[1]
    prepare_text(
        prefix, "bytes", ["stdlib", str(packages)], "--glob", "*.py", "--max-bytes", size.max_bytes
    )
    return str(prefix)


def tokens(data: str, size: Size, steps: int) -> dict[str, Any]:
    """What there is to read and what a run reads. Samples beyond the first epoch are the same
    ones in another order.
    """
    there = json.loads(Path(f"{data}.json").read_text())["tokens"]
    trained, held_out = (n * size.sequence * size.micro_batch for n in (steps, size.evaluation))
    return {
        "tokens": there,
        "training_tokens": trained,
        "training_epochs": trained / (there * (1 - HELD_OUT)),
        "held_out_tokens": held_out,
        "held_out_epochs": held_out / (there * HELD_OUT),
    }


def earlier(path: Path, settings: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """A result of the same program whose runs can count with those of a call with ``settings``
    that reads the text ``data``.

    Raises:
        ValueError: it is no such result, or was made with other settings or another text.
    """
    found = read_json(path, "settings", "environment", "data", "runs")
    theirs = found["settings"] | found["data"]
    for key, value in {**{key: settings[key] for key in SAME}, "tokens": data["tokens"]}.items():
        if theirs.get(key) != value:
            raise ValueError(
                f"--extend: {path}: {key}: got {theirs.get(key)}, accepted: this call's {value}"
            )
    for run in found["runs"]:
        if run["variant"] not in VARIANTS:
            raise ValueError(
                f"--extend: {path}: variant: got {run['variant']!r}, accepted: "
                f"{', '.join(map(repr, VARIANTS))}"
            )
    return found
