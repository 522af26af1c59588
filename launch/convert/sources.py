"""Weights of whole models, wherever they come from: a Hugging Face folder or a training
checkpoint.

    weights = open_weights("path/to/folder")
    model = build_model(weights.model, tp=2)
    fill(model, weights)  # launch.convert.fill

Names are those of Megatron's parameters, layers are numbered through all pipeline stages, and
tensors are whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from launch.convert.checkpoint_weights import CheckpointWeights, find_checkpoint
from launch.convert.hugging_face import CONFIG, HuggingFaceWeights, refuse_adapter
from launch.convert.weights import CheckpointError, Weights
from launch.model.model_config import ModelConfig


def open_weights(
    path: str | os.PathLike,
    dtype: torch.dtype | None = None,
    *,
    model: ModelConfig | None = None,
    tensors: bool = True,
) -> Weights:
    """The weights in a folder, of whichever kind it is; names and shapes are checked, no tensor is
    read.

    Args:
        path: a Hugging Face folder, or a training checkpoint of any ZeRO stage and tensor-parallel
            size, universal or not.
        dtype: of the tensors that are read. None = as they are stored; of a training checkpoint
            bfloat16, what the run multiplied with. float32 gives such a checkpoint's master
            weights.
        model: of a training checkpoint that does not say which model it is of. Of one that does,
            both have to agree.
        tensors: False = only ``model`` and ``travelling()`` are wanted, for which a Hugging Face
            folder needs nothing but its config.json.

    Raises:
        CheckpointError: there is nothing of the kind, or a file or tensor of it is missing or
            damaged; names it.
        CoatConfigError: config.json asks for what cannot be honoured, or ``model`` is another one
            than the checkpoint's; names the key.
    """
    folder = Path(path)
    if (folder / CONFIG).is_file():
        return HuggingFaceWeights(folder, dtype, tensors)
    if (found := find_checkpoint(folder)) is not None:
        return CheckpointWeights(found, dtype, model)
    refuse_adapter(folder)
    what = "holds no weights" if folder.is_dir() else "is no folder (nothing is downloaded)"
    raise CheckpointError(
        f"{path}: {what}, accepted: a Hugging Face folder ({CONFIG} and safetensors), or a "
        "training checkpoint (a `step*` folder, or one whose `latest` names it)"
    )
