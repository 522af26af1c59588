"""Models, batches and text of the studies of the flow, and results that they can go on from."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import prepare_text

__all__ = ["FULL", "HELD_OUT", "NEEDED", "SAME", "TINY", "Size", "check_text", "earlier", "prepare", "tokens"]

HELD_OUT = 0.04
"""Share of the data that is not trained on."""

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
    ("num_layers=9", "hidden_size=768", "ffn_hidden_size=2048", "num_attention_heads=12", "num_query_groups=12"),
    sequence=1024, micro_batch=32, evaluation=64, max_bytes="100M",
)  # fmt: skip
TINY = Size(
    ("num_layers=2", "hidden_size=64", "ffn_hidden_size=192", "num_attention_heads=2", "num_query_groups=2"),
    sequence=64, micro_batch=4, evaluation=4, max_bytes="1M",
)  # fmt: skip


def prepare(folder: Path, size: Size) -> str:
    """Bytes of Python sources; the prefix for --data."""
    prefix, packages = folder / "python", Path(torch.__file__).parents[1]
    prepare_text(prefix, "bytes", ["stdlib", str(packages)], "--glob", "*.py", "--max-bytes", size.max_bytes)
    return str(prefix)


def tokens(data: str, size: Size, steps: int) -> dict[str, Any]:
    """What there is to read and what a run reads. Samples beyond the first epoch are the same ones in another order."""
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
        ValueError: it is no such result, or was made with other settings among ``same``, has a run without one of the
            values ``needed``, or a variant that is not among ``variants``; the message names all that is wrong.
    """
    try:
        found = json.loads(path.read_text())
        theirs, _, _ = found["settings"], found["environment"], found["data"]["tokens"]
        wrong = [
            f"settings.{key}: got {json.dumps(theirs[key])}, accepted: this call's {json.dumps(settings[key])}"
            for key in same
            if theirs[key] != settings[key]
        ]
        names = dict.fromkeys(run["variant"] for run in found["runs"])
        missing = sorted({key for run in found["runs"] for key in needed if key not in run})
    except OSError as problem:
        raise ValueError(f"--extend: got {path}, accepted: a readable file ({problem.strerror})") from None
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"--extend: got {path}, accepted: a result of this program ({problem!r})") from None
    wrong += [f"runs: got runs without {json.dumps(key)}, accepted: runs of this program" for key in missing]
    wrong += [f"variant: got {n!r}, accepted: {', '.join(map(repr, variants))}" for n in names if n not in variants]
    if wrong:
        raise ValueError("\n".join(f"--extend: {path}: {line}" for line in wrong))
    return found


def check_text(path: Path, found: dict[str, Any], there: int) -> None:
    """Raises ValueError where the runs of the result read another text than one of ``there`` tokens."""
    if (given := found["data"]["tokens"]) != there:
        raise ValueError(f"--extend: {path}: data.tokens: got {given}, accepted: this call's {there} (see --data)")
