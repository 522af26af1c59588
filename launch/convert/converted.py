"""A folder that ``launch/convert_hf.py`` wrote: Megatron's tensors, whole, in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from coat_dist.checkpoint.manifest import read_manifest
from launch.convert.source import Weights, check_shapes
from launch.convert.tensor_files import TensorFiles, read_header, rounded
from launch.model.model_config import load_model_config
from launch.model.sizes import parameter_shapes

__all__ = ["KIND", "MODEL", "TYPES", "ConvertedWeights"]

MODEL = "model.json"
"""The model's description, as ``--model`` takes it."""
TYPES = "types.json"
"""Content of :meth:`ConvertedWeights.parts_types`, where there are such parts."""
KIND = "weights"
"""The manifest's name for such a folder."""


class ConvertedWeights(Weights):
    """Whole tensors by Megatron's names, for any tensor- and pipeline-parallel size.

    Args:
        path: the folder.
        dtype: of the tensors that are read; None = as they are stored.

    Raises:
        CheckpointError: a file or tensor is missing, of another shape, surplus or cut off; names
            it.
        CoatConfigError: a model description that cannot be used.
    """

    kind = "a folder of launch/convert_hf.py"

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        self.path, self.manifest = path, read_manifest(path, of_run=False)
        self.model = load_model_config(path / MODEL)
        self.shapes = parameter_shapes(self.model)
        files = [path / name for name in self.manifest["files"] if name.endswith(".safetensors")]
        entries = {name: entry for file in files for name, entry in read_header(file).items()}
        check_shapes(
            path, {name: entry.shape for name, entry in entries.items()}, self.shapes, MODEL
        )
        self._files, self._dtype = TensorFiles(entries), dtype

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`."""
        return self._dtype or self._files.entries[name].dtype

    def parts_types(self) -> dict[str, torch.dtype]:
        """See :class:`Weights`."""
        if not (self.path / TYPES).is_file():
            return {}
        types = json.loads((self.path / TYPES).read_text(encoding="utf-8"))
        return {name: getattr(torch, one) for name, one in types.items()}

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Weights`."""
        return rounded(self._files.read(name), self.dtype(name), name)
