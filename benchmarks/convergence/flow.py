"""Models, text, variants of the flow and settings of the training runs of `branches.py` and
`long.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import ROOT, prepare_text

__all__ = [
    "BF16",
    "FP8_MOMENTS",
    "FULL",
    "HELD_OUT",
    "NEEDED",
    "NUDGE",
    "SAME",
    "TINY",
    "VARIANTS",
    "Job",
    "Size",
    "check_text",
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
"""By what part the learning rate of a run that is made again is larger: what differs then is
chaos.
"""
SAME = "steps", "lr", "tiny"
"""Settings that runs have in common if they are compared."""
NEEDED = "variant", "seed", "repeat", "steps", "losses", "held_out_loss", "last_training_losses"
"""What a run has to say for it to be compared."""


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
        """From "VARIANT:SEED:REPEAT"; repeat, or seed and repeat, are 0 where they are left out."""
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
    line = ["--deepspeed_config", str(config), "--model", "configs/models/tiny.json"]
    line += [
        "--model-override",
        *size.model,
        f"seq_length={size.sequence}",
        "--data",
        data,
        "--output",
        str(out),
    ]
    line += [
        "--seed",
        str(job.seed),
        "--train-steps",
        str(steps),
        "--lr",
        repr(lr),
        "--warmup-steps",
        str(steps // 10),
    ]
    held_out = round(1000 * HELD_OUT)
    line += ["--split", f"{1000 - held_out},{held_out},0", "--data-cache", f"{out}.cache"]
    return line + ["--eval-interval", str(steps), "--eval-steps", str(size.evaluation)]


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


def earlier(
    path: Path,
    settings: dict[str, Any],
    variants: Collection[str],
    same: Sequence[str] = SAME,
    needed: Sequence[str] = NEEDED,
) -> dict[str, Any]:
    """A result of the same program whose runs can count with those of a call with ``settings``.

    Raises:
        ValueError: it is no such result, or was made with other settings among ``same``, has a run
            without one of the values ``needed``, or a variant that is not among ``variants``; the
            message names all that is wrong.
    """
    try:
        found = json.loads(path.read_text())
        theirs, _, _ = found["settings"], found["environment"], found["data"]["tokens"]
        wrong = [
            f"settings.{key}: got {json.dumps(theirs[key])}, accepted: this call's "
            f"{json.dumps(settings[key])}"
            for key in same
            if theirs[key] != settings[key]
        ]
        names = dict.fromkeys(run["variant"] for run in found["runs"])
        missing = sorted({key for run in found["runs"] for key in needed if key not in run})
    except OSError as problem:
        raise ValueError(
            f"--extend: got {path}, accepted: a readable file ({problem.strerror})"
        ) from None
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"--extend: got {path}, accepted: a result of this program ({problem!r})"
        ) from None
    wrong += [
        f"runs: got runs without {json.dumps(key)}, accepted: runs of this program"
        for key in missing
    ]
    wrong += [
        f"variant: got {n!r}, accepted: {', '.join(map(repr, variants))}"
        for n in names
        if n not in variants
    ]
    if wrong:
        raise ValueError("\n".join(f"--extend: {path}: {line}" for line in wrong))
    return found


def check_text(path: Path, found: dict[str, Any], there: int) -> None:
    """Raises ValueError where the runs of the result read another text than one of ``there``
    tokens.
    """
    if (given := found["data"]["tokens"]) != there:
        raise ValueError(
            f"--extend: {path}: data.tokens: got {given}, accepted: this call's {there} (see "
            "--data)"
        )
