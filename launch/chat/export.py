"""The trained model as a Hugging Face folder: weights of the last checkpoint, tokenizer and chat template."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch import convert_hf
from launch.hf.output import Output
from launch.training.checkpoint import require_loadable
from launch.weights import Weights

__all__ = ["check_target", "export", "write_beside"]

_KEPT = ("config.json", "generation_config.json")
_OF_A_RANK = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def check_target(args: argparse.Namespace, began_with: Path) -> None:
    """Refuse a folder that an export would not replace, or must not, before anything is trained.

    Args:
        args: of the command line.
        began_with: folder of the model that is fine-tuned.

    Raises:
        CoatConfigError: it holds something that is no earlier export, or one, and the run is neither one that continues
            nor told to overwrite; or what the run reads or writes is in it.
        CheckpointError: what --load means cannot be read.
    """
    if args.export_to is None:
        return
    target = Path(args.export_to)
    for used in (began_with, args.tokenizer, args.output, *args.data, *(args.valid or ())):
        if used is not None and Path(used).resolve().is_relative_to(target.resolve()):
            raise CoatConfigError(f"--export-to: got {target}, which is or holds {used}, accepted: another folder")
    replace = args.overwrite or require_loadable(args.load, args.save) is not None
    try:
        Output("--export-to", target, replace).check(Path(args.save), 0)
    except CheckpointError as problem:
        raise CoatConfigError(f"{problem} or --no-export") from None
    except OSError as problem:
        raise CoatConfigError(f"--export-to: got {args.export_to}, accepted: another folder ({problem})") from None


def write_beside(folder: Path, tokenizer: Any, began_with: Weights) -> None:
    """Write what a Hugging Face folder has beside the weights: tokenizer with chat template, and config.json and
    generation config of the model that was begun with."""
    tokenizer.save_pretrained(folder)
    for name, path in began_with.travelling().items():
        if name in _KEPT:
            shutil.copyfile(path, folder / name)


def export(checkpoint: Path, target: str, tokenizer: Any, began_with: Weights) -> None:
    """Write a checkpoint as ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it. Call it on one rank.

    ``convert_hf.py`` does it, in a process of its own: it verifies and writes with all ranks that there are.

    Args:
        checkpoint: of the run.
        target: the folder; what an earlier export left there is replaced when the new one is complete.
        tokenizer: goes along, with the chat template that was trained with.
        began_with: whose config.json and generation config go along.

    Raises:
        CheckpointError: it cannot be written; an earlier export is as it was.
    """
    with tempfile.TemporaryDirectory() as beside:
        write_beside(Path(beside), tokenizer, began_with)
        command = [sys.executable, convert_hf.__file__, "--from", str(checkpoint), "--to", target, "--overwrite"]
        alone = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_RANK)}
        alone |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(
            [*command, "--like", beside], env=alone, capture_output=True, text=True, errors="replace", check=False
        )
    if done.returncode:
        why = (done.stderr.strip().split("\n") or ["?"])[-1].removeprefix("error: ")
        raise CheckpointError(
            f"--export-to: {target} was not written ({why}); the checkpoint {checkpoint} is whole: "
            f"launch/convert_hf.py --from {checkpoint} --to DIR"
        )
