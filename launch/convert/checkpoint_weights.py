"""A training checkpoint as a source of weights: of ZeRO-1, 2 or 3 or BF16_Optimizer, or a
universal one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import MANIFEST, read_manifest
from coat_dist.checkpoint.read.tags import is_checkpoint
from coat_dist.checkpoint.universal.folder import UniversalFolder
from coat_dist.checkpoint.universal.zero_checkpoint import ZeroCheckpoint
from coat_dist.checkpoint.universal.zero_files import Shard, read
from coat_dist.checkpoint.write.publish import LATEST, find, replaced_or
from launch.convert.fill import each_expert
from launch.convert.tensor_files import rounded
from launch.convert.weights import CheckpointError, Weights, check_shapes
from launch.model.model_config import ModelConfig
from launch.model.sizes import parameter_shapes


def find_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that ``folder`` means: itself, or the one that its ``latest`` names; None
    where it holds none.

    Raises:
        CheckpointError: ``latest`` names what is not there.
    """
    # A run that was killed while it saved this step again left it under another name.
    folder = named = replaced_or(folder.absolute()).resolve()
    with suppress(OSError, ValueError):  # find() names what is wrong with it
        named = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    for one in (folder, named):
        if is_checkpoint(one):  # another program's has no manifest
            return one.resolve()
    return find(folder)  # a kill may have left no `latest`


class CheckpointWeights(Weights):
    """What a training run's engine held, read from its files, which are memory-mapped and joined a
    tensor at a time.

    Args:
        path: the checkpoint's folder.
        dtype: None = torch.bfloat16, which is what the run multiplies with: its master weights
            rounded, to the bit. float32 gives the master weights.
        model: of a checkpoint that does not say (of another program than pretrain.py); else both
            have to agree.

    Raises:
        CheckpointError: a checkpoint that cannot be read, or does not say which model it is of, or
            is of another one than is said; names the tensor.
        CoatConfigError: ``model`` has no vocab_size, or is another one than the checkpoint's.
    """

    kind = "a training checkpoint"

    def __init__(
        self, path: Path, dtype: torch.dtype | None = None, model: ModelConfig | None = None
    ) -> None:
        self.path, self._dtype = path, dtype or torch.bfloat16
        self.manifest = read_manifest(path, of_run=False) if (path / MANIFEST).is_file() else {}
        self.model = _model(path, self.manifest, model)
        try:
            universal = (
                bool(self.manifest.get("universal"))
                or (path / "zero" / "optimizer_state.pt").is_file()
            )
            self._source: _Universal | _Zero | Ungrouped = (_Universal if universal else _Zero)(
                path, self._dtype
            )
            if self.model.num_moe_experts is not None:
                self._source = Ungrouped(
                    self._source, self.model.num_moe_experts, self.model.hidden_size
                )
        except ValueError as problem:
            raise CheckpointError(str(problem)) from None
        self.shapes = parameter_shapes(self.model)
        check_shapes(
            path, self._source.shapes, self.shapes, MANIFEST if model is None else "--model"
        )

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`."""
        return self._dtype

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Weights`."""
        try:
            return rounded(self._source.read(name), self._dtype, name)
        except (ValueError, OSError) as problem:
            raise CheckpointError(str(problem)) from problem


def _model(path: Path, manifest: dict[str, Any], given: ModelConfig | None) -> ModelConfig:
    """The model by the manifest, or ``given`` where it does not say."""
    described = (manifest.get("run") or {}).get("model")
    if described is None:
        if given is None:
            raise CheckpointError(
                f"{path}: does not say of which model it is, accepted: a checkpoint of "
                "launch/pretrain.py, or --model"
            )
        if given.vocab_size is None:
            raise CoatConfigError(
                "model.vocab_size: got null, accepted: the number of the tokenizer's ids"
            )
        return given
    try:
        own = ModelConfig.model_validate(described)
    except ValueError as problem:
        raise CheckpointError(f"{path / MANIFEST}: run.model: {problem}") from None
    if given is not None and (
        wrong := given.with_vocab(own.vocab_size or 0).different(own, str(path))
    ):
        raise CoatConfigError("\n".join(wrong))
    return own


class _Zero:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.checkpoint, self.dtype = ZeroCheckpoint(path), dtype
        self.rest = {
            n: v["param"]
            for n, v in self.checkpoint.untrained().items()
            if v["param"].is_floating_point()
        }
        buffers = self.checkpoint.buffers()
        self.shapes = {name: self.checkpoint.shape(name) for name in self.checkpoint.names}
        self.shapes |= {
            name: tuple(value.shape) for name, value in self.rest.items() if name not in buffers
        }

    def divided(self, name: str) -> bool:
        return self.checkpoint.tensor_parallel > 1

    def read(self, name: str) -> torch.Tensor:
        if name in self.rest:
            return self.rest[name]

        def part(shard: Shard) -> torch.Tensor:
            if self.dtype == torch.float32:
                return shard.part(name, "fp32")
            # Of masters in 16 bits and a remainder, the 16 bits are what the engine holds.
            return rounded(shard.weights(name), self.dtype, name)

        return self.checkpoint.whole(name, part, "fp32")[0]


class _Universal:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.folder = UniversalFolder(path, (0, 1))
        self.rest = {
            n: v["param"] for n, v in self.folder.rest.items() if v["param"].is_floating_point()
        }
        trained = {name: self._saved(name)["param"] for name in self.folder.trained()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in (trained | self.rest).items()}

    def _saved(self, name: str) -> dict[str, Any]:
        return read(self.folder.folder / name / "fp32.pt")

    def divided(self, name: str) -> bool:
        return "cat_dim" in self._saved(name)

    def read(self, name: str) -> torch.Tensor:
        return self.rest[name] if name in self.rest else self._saved(name)["param"]


class Ungrouped:
    """Tensors of a checkpoint, those of grouped experts one by one.

    Args:
        source: has ``shapes`` by name, ``read(name)``, and ``divided(name)``: tensor-parallel ranks
            were joined.
        experts: of a layer.
        hidden: hidden size.

    Raises:
        CheckpointError: grouped experts that tensor-parallel ranks divide: joined along a
            dimension, they are mixed up.
    """

    def __init__(self, source: Any, experts: int, hidden: int) -> None:
        self.source, self.experts = source, experts
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._of: dict[str, tuple[str, int]] = {}
        self._last: tuple[str, torch.Tensor] | None = None
        for name, shape in source.shapes.items():
            names = each_expert(name, range(experts))
            if not names:
                self.shapes[name] = shape
                continue
            if source.divided(name):
                raise CheckpointError(
                    f"{name}: divided over tensor-parallel ranks, accepted: --tensor-parallel 1"
                )
            inner = shape[0] * shape[1] // (experts * hidden)
            for i, one in enumerate(names):
                self.shapes[one] = (inner, hidden) if "linear_fc1" in one else (hidden, inner)
                self._of[one] = (name, i)

    def read(self, name: str) -> torch.Tensor:
        """A tensor, whole. That of grouped experts is kept until its last one was read."""
        if name not in self._of:
            return self.source.read(name)
        whole, i = self._of[name]
        if self._last is None or self._last[0] != whole:
            self._last = None  # two of them need not be in memory
            self._last = (whole, self.source.read(whole))
        rows, columns = self.shapes[name]
        one = self._last[1].reshape(self.experts, columns, rows)[i].t().contiguous()
        if i == self.experts - 1:
            self._last = None
        return one
