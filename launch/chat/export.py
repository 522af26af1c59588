"""The trained model as a Hugging Face folder: weights of the last checkpoint, tokenizer and chat template."""

from __future__ import annotations

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
from launch.hf.output import not_replaceable
from launch.weights import Weights

__all__ = ["check_target", "export"]

_KEPT = ("config.json", "generation_config.json")
_OF_A_RANK = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def check_target(target: str | None, replace: bool) -> None:
    """Refuse a folder that an export would not replace, before anything is trained.

    Raises:
        CoatConfigError: it holds something, and ``replace`` is false, or something else than a model.
    """
    path = Path(target or "")
    if target is None or not path.exists():
        return
    if path.is_dir() and replace:
        if (other := not_replaceable(path)) is not None:
            raise CoatConfigError(
                f"--export-to: got {target}, which holds something else than a model ({other}), accepted: another "
                "folder or --no-export"
            )
    elif not path.is_dir() or any(path.iterdir()):
        raise CoatConfigError(
            f"--export-to: got {target}, which is there already, accepted: another folder, --overwrite or --no-export"
        )


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
        tokenizer.save_pretrained(beside)
        for name, path in began_with.travelling().items():
            if name in _KEPT:
                shutil.copyfile(path, Path(beside, name))
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
