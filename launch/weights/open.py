"""Which kind of weights a folder holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import MANIFEST
from coat_dist.checkpoint.write.publish import replaced_or
from launch.model.gpt import ModelConfig
from launch.weights.checkpoint import CheckpointWeights, described, find_checkpoint
from launch.weights.converted import KIND, MODEL, ConvertedWeights
from launch.weights.source import CheckpointError, Weights

__all__ = ["open_weights"]

CONFIG = "config.json"
_ACCEPTED = (
    f"one that launch/convert_hf.py wrote ({MODEL} and {MANIFEST}), or a training checkpoint (a `step*` folder, or one "
    "whose `latest` names it)"
)


def open_weights(
    path: str | os.PathLike,
    dtype: torch.dtype | None = None,
    *,
    model: ModelConfig | None = None,
    tensors: bool = True,
) -> Weights:
    """The weights in a folder, of whichever kind it is; names and shapes are checked, no tensor is read.

    Args:
        path: a Hugging Face folder, one that ``launch/convert_hf.py`` wrote, or a training checkpoint of any ZeRO stage
            and tensor-parallel size, universal or not.
        dtype: that tensors are given in. None = as they are stored; of a training checkpoint bfloat16, what the run
            multiplied with. float32 gives such a checkpoint's master weights.
        model: of a training checkpoint that does not say of which model it is. Of one that does, both have to agree.
        tensors: False = only ``model`` and ``travelling()`` are wanted, for which a Hugging Face folder needs nothing
            but its config.json.

    Raises:
        CheckpointError: there is nothing of the kind, or a file or tensor of it is missing or damaged; names it.
        CoatConfigError: config.json asks for what cannot be honoured, or ``model`` is another one than the
            checkpoint's; names the key.
    """
    from launch.hf.folder import HuggingFaceWeights, refuse_adapter  # late: that room imports files of this one

    folder = Path(path)
    accepted = f"a Hugging Face folder ({CONFIG}{' and safetensors' if tensors else ''}), {_ACCEPTED}"
    if not folder.exists():  # perhaps a checkpoint that a kill left under another name while it was saved again
        folder = replaced_or(folder.absolute())
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist (nothing is downloaded)"
        raise CheckpointError(f"{path}: {what}, accepted: {accepted}")
    if _kind(folder) == KIND:
        return ConvertedWeights(folder, dtype)
    if (folder / CONFIG).is_file():
        return HuggingFaceWeights(folder, dtype, tensors)
    if (found := find_checkpoint(folder)) is not None:
        return CheckpointWeights(found, dtype, None if model is None else _agreed(model, found))
    refuse_adapter(folder)
    snapshots = sorted(folder.glob("snapshots/*/config.json"))
    hint = f"; {snapshots[-1].parent} is one" if snapshots else ""
    if (below := folder / "checkpoints").is_dir() and find_checkpoint(below) is not None:  # a run's folder
        hint = f" (did you mean {below}?)"
    raise CheckpointError(f"{path}: holds no {'weights' if tensors else 'model'}, accepted: {accepted}{hint}")


def _agreed(model: ModelConfig, checkpoint: Path) -> ModelConfig:
    """The model of a checkpoint that may say itself what it is."""
    from launch.hf.config_out import function_of

    if (own := described(checkpoint)) is None:
        return model
    if model.vocab_size is None:
        model = model.model_copy(update={"vocab_size": own.vocab_size})
    ours, theirs = function_of(model), function_of(own)
    wrong = [
        f"model.{key}: got {ours.get(key)!r}, accepted: {theirs.get(key)!r}, which {checkpoint} has"
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    ]
    if wrong:
        raise CoatConfigError("\n".join(wrong))
    return own


def _kind(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return KIND if (folder / MODEL).is_file() else None
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read ({problem})") from None
    return manifest.get("kind") if isinstance(manifest, dict) else None
