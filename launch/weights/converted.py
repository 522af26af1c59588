"""A folder that ``launch/convert_hf.py`` wrote: Megatron's tensors, whole, in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from coat_dist.checkpoint.manifest import MANIFEST
from launch.model.gpt import ModelConfig, load_model_config
from launch.weights.shapes import check_shapes, parameter_shapes
from launch.weights.source import CheckpointError, Weights, rounded
from launch.weights.tensor_files import TensorFiles, read_header, written_manifest

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
        manifest = written_manifest(path)
        if not manifest.keys() >= {"files", "tensors"}:
            raise CheckpointError(f"{path / MANIFEST}: cannot be read, accepted: as launch/convert_hf.py wrote it")
        for name, (size, _) in manifest["files"].items():
            there = (path / name).stat().st_size if (path / name).is_file() else "missing"
            if there != size:
                raise CheckpointError(f"{path / name}: is {there}, was {size} bytes: cut off, or of another folder")
        self.model: ModelConfig = load_model_config(path / MODEL)
        self.shapes = parameter_shapes(self.model)
        files = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
        entries = {name: entry for file in files for name, entry in read_header(path / file).items()}
        places = {name: entry.file for name, entry in entries.items()}
        check_shapes(path, {name: entry.shape for name, entry in entries.items()}, self.shapes, MODEL, places)
        self._files, self._dtype = TensorFiles(entries, manifest["tensors"]), dtype

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`."""
        return self._dtype or self._files.entries[name].dtype

    def parts_types(self) -> dict[str, torch.dtype]:
        """See :class:`Weights`."""
        if not (self.path / TYPES).is_file():
            return {}
        types = json.loads((self.path / TYPES).read_text(encoding="utf-8-sig"))
        return {name: getattr(torch, one) for name, one in types.items()}

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Weights`."""
        return rounded(self._files.read(name), self.dtype(name), name)
