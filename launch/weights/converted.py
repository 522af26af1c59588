"""A folder that ``launch/convert_hf.py`` wrote: Megatron's tensors, whole, in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from coat_dist.checkpoint.manifest import MANIFEST
from launch.model.gpt import ModelConfig, load_model_config
from launch.weights.shapes import parameter_shapes
from launch.weights.source import CARRIED, CheckpointError, Weights, files_in, rounded
from launch.weights.tensor_files import TensorFiles, read_header

__all__ = ["KIND", "MODEL", "TYPES", "ConvertedWeights"]

MODEL = "model.json"
"""The model's description, as ``--model`` takes it."""
TYPES = "types.json"
"""What :meth:`ConvertedWeights.parts_types` gives, where there are such parts."""
KIND = "weights"
"""What the manifest calls such a folder."""


class ConvertedWeights(Weights):
    """Whole tensors by Megatron's names, for any tensor- and pipeline-parallel size.

    Args:
        path: the folder.
        dtype: that tensors are given in; None = as they are stored.

    Raises:
        CheckpointError: a file or tensor is missing, of another shape, too much or cut off; names it.
        CoatConfigError: a model description that cannot be used.
    """

    kind = "a folder of launch/convert_hf.py"

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        self.path = path
        manifest = _manifest(path)
        files = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
        for name, (size, _) in manifest["files"].items():
            there = (path / name).stat().st_size if (path / name).is_file() else None
            if there != size:
                found = (
                    "missing" if there is None else f"is {there} bytes, was {size}: it is cut off or of another folder"
                )
                raise CheckpointError(f"{path / name}: {found}")
        self.model: ModelConfig = load_model_config(path / MODEL)
        self._shapes = parameter_shapes(self.model)
        entries = {name: entry for file in files for name, entry in read_header(path / file).items()}
        for name, shape in self._shapes.items():
            if name not in entries:
                raise CheckpointError(f"{path}: has no tensor {name}, which a model as {MODEL} describes needs")
            if entries[name].shape != shape:
                raise CheckpointError(
                    f"{entries[name].file}: tensor {name}: got shape {list(entries[name].shape)}, accepted: "
                    f"{list(shape)}, by {MODEL}"
                )
        if extra := sorted(entries.keys() - self._shapes.keys()):
            raise CheckpointError(f"{entries[extra[0]].file}: holds {extra[0]}, which {MODEL} does not describe")
        self._files, self._dtype = TensorFiles(entries, manifest["tensors"]), dtype

    def names(self) -> list[str]:
        """See :class:`Weights`."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Weights`."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`."""
        return self._dtype or self._files.entries[name].dtype

    def parts_types(self) -> dict[str, torch.dtype]:
        """See :class:`Weights`."""
        if not (self.path / TYPES).is_file():
            return {}
        try:
            types = json.loads((self.path / TYPES).read_text(encoding="utf-8-sig"))
            return {name: getattr(torch, one) for name, one in types.items()}
        except (OSError, ValueError, AttributeError, TypeError) as problem:
            raise CheckpointError(f"{self.path / TYPES}: cannot be read ({problem})") from None

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Weights`."""
        return rounded(self._files.read(name), self.dtype(name), name)

    def travelling(self) -> dict[str, Path]:
        """See :class:`Weights`."""
        return files_in(self.path / CARRIED)


def _size_and_sum(value: Any) -> bool:
    return isinstance(value, list) and [type(one) for one in value] == [int, int]


_WRITTEN = {"files": _size_and_sum, "tensors": lambda value: type(value) is int}


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read ({problem})") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise CheckpointError(f"{path}: is no folder of launch/convert_hf.py")
    for key in ("files", "tensors"):
        values = manifest.get(key)
        if not isinstance(values, dict) or not all(_WRITTEN[key](value) for value in values.values()):
            raise CheckpointError(f"{path / MANIFEST}: is damaged, {key} missing or of another kind than was written")
    return manifest
