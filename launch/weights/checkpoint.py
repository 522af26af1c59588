"""A training checkpoint as a source of weights: of ZeRO-1, 2 or 3 or BF16_Optimizer, or a universal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import MANIFEST, read_manifest, verify
from coat_dist.checkpoint.universal.folder import UniversalFolder
from coat_dist.checkpoint.universal.zero_checkpoint import ZeroCheckpoint
from coat_dist.checkpoint.universal.zero_files import Shard, read
from coat_dist.checkpoint.write.publish import LATEST, find
from launch.model.gpt import ModelConfig
from launch.weights.grouped import Ungrouped
from launch.weights.shapes import check_shapes, parameter_shapes
from launch.weights.source import CheckpointError, Weights, rounded

__all__ = ["CheckpointWeights", "described", "find_checkpoint"]


def find_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that ``folder`` means: itself, or the one that its ``latest`` names; None where it holds none.

    Raises:
        CheckpointError: ``latest`` names what is not there.
    """
    if list(folder.glob("*model_states.pt")):
        return folder.resolve()
    try:
        named = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        named = folder
    # Another program's has no manifest.
    return named.resolve() if list(named.glob("*model_states.pt")) else find(folder)


class CheckpointWeights(Weights):
    """What a training run's engine held, read from its files, which are memory-mapped and joined a tensor at a time.

    Args:
        path: the checkpoint's folder.
        dtype: None = torch.bfloat16, which is what the run multiplies with: its master weights rounded, to the bit.
            float32 gives the master weights.
        model: of a checkpoint that does not say (of another program than pretrain.py).

    Raises:
        CheckpointError: a checkpoint that cannot be read, or does not say of which model it is, or is of another one
            than is said; names the tensor.
        CoatConfigError: ``model`` has no vocab_size.
    """

    kind = "a training checkpoint"

    def __init__(self, path: Path, dtype: torch.dtype | None = None, model: ModelConfig | None = None) -> None:
        self.path, self._dtype = path, dtype or torch.bfloat16
        self.manifest = _manifest(path)
        own = described(path)
        if model is None and own is None:
            raise CheckpointError(
                f"{path}: does not say of which model it is, accepted: a checkpoint of launch/pretrain.py, or --model"
            )
        self.model: ModelConfig = model or own  # type: ignore[assignment]
        try:
            universal = bool(self.manifest.get("universal")) or (path / "zero" / "optimizer_state.pt").is_file()
            self._source: _Universal | _Zero | Ungrouped = (_Universal if universal else _Zero)(path, self._dtype)
            if self.model.num_moe_experts is not None:
                self._source = Ungrouped(self._source, self.model.num_moe_experts, self.model.hidden_size)
        except ValueError as problem:
            raise CheckpointError(str(problem)) from None
        if self.model.vocab_size is None:
            raise CoatConfigError("model.vocab_size: got null, accepted: the number of the tokenizer's ids")
        self.shapes = parameter_shapes(self.model)
        check_shapes(path, self._source.shapes, self.shapes, "--model" if model is not None else MANIFEST)

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`."""
        return self._dtype

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Weights`."""
        try:
            return rounded(self._source.read(name), self._dtype, name)
        except (ValueError, OSError) as problem:
            raise CheckpointError(str(problem)) from problem

    def verify(self) -> None:
        """See :class:`Weights`: every file is read once, ranks share the work."""
        if files := self.manifest.get("files"):
            verify(self.path, files)


class _Zero:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.checkpoint, self.dtype = ZeroCheckpoint(path), dtype
        self.rest = {n: v["param"] for n, v in self.checkpoint.untrained().items() if v["param"].is_floating_point()}
        buffers = self.checkpoint.buffers()
        self.shapes = {name: self.checkpoint.shape(name) for name in self.checkpoint.names}
        self.shapes |= {name: tuple(value.shape) for name, value in self.rest.items() if name not in buffers}

    def divided(self, name: str) -> bool:
        return self.checkpoint.tensor_parallel > 1

    def read(self, name: str) -> torch.Tensor:
        if name in self.rest:
            return self.rest[name]

        def part(shard: Shard) -> torch.Tensor:
            # Of masters in 16 bits and a remainder, the 16 bits are what the engine holds.
            exact = self.dtype == torch.float32
            return shard.part(name, "fp32") if exact else rounded(shard.weights(name), self.dtype, name)

        return self.checkpoint.whole(name, part, "fp32")[0]


class _Universal:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.folder = UniversalFolder(path, (0, 1))
        self.shapes = {name: tuple(self._mapped(name).shape) for name in self.folder.trained()}
        self.shapes |= {
            name: tuple(value["param"].shape)
            for name, value in self.folder.rest.items()
            if value["param"].is_floating_point()
        }
        self.dtype = dtype

    def _mapped(self, name: str) -> torch.Tensor:
        return self._saved(name)["param"]

    def _saved(self, name: str) -> dict[str, Any]:
        return read(self.folder.folder / name / "fp32.pt")

    def divided(self, name: str) -> bool:
        return "cat_dim" in self._saved(name)

    def read(self, name: str) -> torch.Tensor:
        if name in self.folder.rest:
            return self.folder.rest[name]["param"]
        return rounded(self._mapped(name), self.dtype, name)


def _manifest(path: Path) -> dict[str, Any]:
    return read_manifest(path, of_run=False) if (path / MANIFEST).is_file() else {}


def described(path: Path) -> ModelConfig | None:
    """The model that a checkpoint says it is of; None where it does not say.

    Raises:
        CheckpointError: its description cannot be used.
    """
    run = _manifest(path).get("run")
    if not isinstance(run, dict) or run.get("model") is None:
        return None
    try:
        return ModelConfig.model_validate(run["model"])
    except ValueError as problem:
        raise CheckpointError(f"{path / MANIFEST}: run.model: {problem}") from None
