"""The trained model as a Hugging Face folder: weights of the last checkpoint, and the tokenizer with the chat template."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from launch import convert_hf
from launch.hf.arguments import parse
from launch.weights import Weights

__all__ = ["check_target", "export"]

_KEPT = ("config.json", "generation_config.json")


def check_target(target: str | None, replace: bool) -> None:
    """Refuse a folder that an export would not replace, before anything is trained.

    Raises:
        CoatConfigError: it holds something, and ``replace`` is false.
    """
    path = Path(target or "")
    if target is None or not path.exists() or replace:
        return
    if not path.is_dir() or any(path.iterdir()):
        raise CoatConfigError(
            f"--export-to: got {target}, which is there already, accepted: another folder, --overwrite or --no-export"
        )


def export(checkpoint: Path, target: str, tokenizer: Any, began_with: Weights) -> None:
    """Write a checkpoint as ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it; on one rank.

    Args:
        checkpoint: of the run.
        target: the folder; what an earlier export left there is replaced when the new one is complete.
        tokenizer: goes along, with the chat template that was trained with.
        began_with: whose config.json and generation config go along.

    Raises:
        CoatConfigError, CheckpointError, OSError: it cannot be written; an earlier one is as it was.
    """
    with tempfile.TemporaryDirectory() as beside:
        for name, file in began_with.travelling().items():
            if name in _KEPT:
                shutil.copyfile(file, Path(beside, name))
        tokenizer.save_pretrained(beside)
        arguments = ["--from", str(checkpoint), "--to", target, "--overwrite"]
        if Path(beside, "config.json").exists():
            arguments += ["--like", beside]
        with contextlib.redirect_stdout(io.StringIO()):  # the line that names both folders: ours does
            convert_hf.convert(parse(arguments, None))
