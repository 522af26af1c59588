"""A training checkpoint as a source of weights: of ZeRO-1, 2 or 3 or BF16_Optimizer, or a universal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import MANIFEST, read_manifest, verify
from coat_dist.checkpoint.universal.folder import UniversalFolder
from coat_dist.checkpoint.universal.zero_checkpoint import ZeroCheckpoint
from coat_dist.checkpoint.universal.zero_files import Shard
from coat_dist.checkpoint.write.publish import LATEST, find
from coat_dist.ranks import alone
from launch.model.gpt import ModelConfig
from launch.weights.forget import forget
from launch.weights.grouped import Ungrouped
from launch.weights.shapes import parameter_shapes
from launch.weights.source import CARRIED, CheckpointError, Weights, files_in, rounded

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
            self._check_sizes()
            raise CheckpointError(str(problem)) from None
        self._check("--model" if model is not None else MANIFEST)
        self._last: tuple[str, torch.Tensor] | None = None

    def _check_sizes(self) -> None:
        """After files could not be read: of one that was cut off the manifest says more than torch does."""
        if files := self.manifest.get("files"):
            with alone():  # only this rank may have got here
                verify(self.path, files, checksums=False)

    def _check(self, by: str) -> None:
        """Whether these are the tensors of the model that ``by`` describes: of others, rows would be mixed up."""
        if self.model.vocab_size is None:
            raise CoatConfigError("model.vocab_size: got null, accepted: the number of the tokenizer's ids")
        wanted, there = parameter_shapes(self.model), self._source.shapes
        for name in [*wanted, *there]:
            if name not in there:
                raise CheckpointError(f"{self.path}: has no {name}, which the model by {by} has")
            if name not in wanted:
                raise CheckpointError(f"{self.path}: has {name}, which the model by {by} has not")
            if there[name] != wanted[name]:
                raise CheckpointError(
                    f"{self.path}: {name}: got {list(there[name])}, accepted: {list(wanted[name])}, by {by}"
                )

    def names(self) -> list[str]:
        """See :class:`Weights`."""
        return list(self._source.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Weights`."""
        return self._source.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`."""
        return self._dtype

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See :class:`Weights`. The tensor that was read last is kept until another one is asked for."""
        if self._last is None or self._last[0] != name:
            self._last = None
            try:
                self._last = (name, rounded(self._source.read(name), self._dtype, name))
            except (ValueError, OSError) as problem:
                raise CheckpointError(str(problem)) from problem
        whole = self._last[1]
        if stop == whole.shape[0]:
            self._last = None if start == 0 else self._last
        return whole[start:stop]

    def travelling(self) -> dict[str, Path]:
        """See :class:`Weights`."""
        return files_in(self.path / CARRIED)

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
        used: list[torch.Tensor] = []

        def part(shard: Shard) -> torch.Tensor:
            # Of masters in 16 bits and a remainder, the 16 bits are what the engine holds.
            held = shard.weights(name)
            used.append(held)
            return shard.part(name, "fp32") if self.dtype == torch.float32 else rounded(held, self.dtype, name)

        whole, _ = self.checkpoint.whole(name, part, "fp32")
        for held in used:
            forget(held)
        return whole


class _Universal:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.folder = UniversalFolder(path, (0, 1))
        self.shapes = {name: tuple(self._mapped(name).shape) for name in sorted(self.folder.trained(), key=_natural)}
        self.shapes |= {
            name: tuple(value["param"].shape)
            for name, value in self.folder.rest.items()
            if value["param"].is_floating_point()
        }
        self.dtype = dtype

    def _mapped(self, name: str) -> torch.Tensor:
        return self._saved(name)["param"]

    def _saved(self, name: str) -> dict[str, Any]:
        from coat_dist.checkpoint.universal.folder import read

        return read(self.folder.folder / name / "fp32.pt", weights_only=False)

    def divided(self, name: str) -> bool:
        return "cat_dim" in self._saved(name)

    def read(self, name: str) -> torch.Tensor:
        if name in self.folder.rest:
            return self.folder.rest[name]["param"]
        mapped = self._mapped(name)
        whole = mapped.clone() if mapped.dtype == self.dtype else rounded(mapped, self.dtype, name)
        forget(mapped)
        return whole


def _natural(name: str) -> tuple[Any, ...]:
    """Layers by number, and the embedding first."""
    parts = name.split(".")
    order = {"embedding": 0, "decoder": 1}.get(parts[0], 2)
    number = int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else 10**9
    return order, number, name


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
