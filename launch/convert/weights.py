"""The interface of every source of weights, and what the sources share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coat_dist.checkpoint.manifest import FORMAT, MANIFEST, CheckpointError, verify
from launch.model.model_config import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
"""Types of weights, by the names that command lines and config.json use."""
CARRIED = "hugging_face"
"""Folder, in a checkpoint of pretrain.py, of the files that travel with the weights."""


class Weights(ABC):
    """The weights of one model, whole, read a tensor at a time.

    Names are those of Megatron's ``GPTModel``; layers are numbered over all pipeline stages. The
    embedding has ``model.padded_vocab`` rows; those from ``model.vocab_size`` on are zero where the
    source has none.
    """

    path: Path
    """The folder."""
    kind: str
    """Its kind, in words for messages."""
    model: ModelConfig
    """The model that these are the weights of; ``vocab_size`` is always set."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole tensors, by name, in the order in which they are best read."""
    manifest: Mapping[str, Any] = {}
    """``manifest.json`` of the folder; empty where this project did not write it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Type of the tensor that :meth:`read` returns."""

    def stored_types(self) -> Mapping[str, torch.dtype]:
        """Types of Hugging Face's tensors, by their names, as a folder of theirs has them."""
        return {}

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The whole, unsharded tensor.

        Raises:
            CheckpointError: it cannot be read; names tensor and file.
        """

    def travelling(self) -> dict[str, Path]:
        """Files that travel with the weights, by their names in a Hugging Face folder: tokenizer,
        chat template, generation config, config.json.
        """
        return files_in(self.path / CARRIED)

    def verify(self) -> None:
        """Compare every file of the manifest with its checksum; collective, and ranks share the
        work.

        Raises:
            CheckpointError: on every rank; names the files.
        """
        if files := self.manifest.get("files"):
            verify(self.path, files)


def own_manifest(folder: Path) -> dict[str, Any]:
    """``manifest.json`` of a folder that this project wrote; empty where there is none, or
    another program's.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read ({problem})") from None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else {}


def files_in(folder: Path) -> dict[str, Path]:
    """Every file in a folder and those in it, by its path there; none where there is no such
    folder.
    """
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_shapes(
    folder: Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    by: str,
) -> None:
    """Compare the tensors of a folder with those of the model that ``by`` describes.

    Raises:
        CheckpointError: names the tensor that is missing, surplus or of another shape.
    """
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            has, needs = (list(one[name]) if name in one else "nothing" for one in (found, wanted))
            raise CheckpointError(f"{folder}: {name}: got {has}, accepted: {needs}, by {by}")
