"""What every source of weights can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch

from coat_dist.checkpoint.manifest import CheckpointError
from launch.model.gpt import ModelConfig

__all__ = ["CARRIED", "DTYPES", "CheckpointError", "Weights", "files_in", "rounded"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
"""Types that weights can have, by the names that command lines and config.json use."""


CARRIED = "hugging_face"
"""Folder, in a converted one and in a checkpoint of pretrain.py, of the files that travel with the weights."""


def files_in(folder: Path) -> dict[str, Path]:
    """Every file in a folder and those in it, by its path there; none where there is no such folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return {path.relative_to(folder).as_posix(): path for path in found}


def rounded(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """A tensor in another type; itself where it has it.

    Raises:
        CheckpointError: values beyond float16's largest, which would become infinite.
    """
    found = tensor.to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and not torch.equal(found.isfinite(), tensor.isfinite()):
        raise CheckpointError(
            f"tensor {name}: has values beyond 65504, float16's largest, accepted: bfloat16 or float32"
        )
    return found


class Weights(ABC):
    """The weights of one model, whole, read a tensor at a time.

    Names are those of Megatron's ``GPTModel``; layers are numbered over all pipeline stages. The embedding has
    ``model.padded_vocab`` rows; those from ``model.vocab_size`` on are zero where the source has none. Nothing is kept
    of what was read.
    """

    path: Path
    """The folder."""
    kind: str
    """What it is, in words for messages."""
    model: ModelConfig
    """What model these are the weights of; ``vocab_size`` is always set."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole tensors, by name, in the order in which they are best read."""

    def names(self) -> list[str]:
        """Every parameter, in the order in which they are best read."""
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.shapes[name]

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Of what :meth:`read` gives."""

    def parts_types(self) -> dict[str, torch.dtype]:
        """The types of a Hugging Face folder's tensors that are parts of one tensor here and have several types, by
        their names there; the tensor here has the type that holds all."""
        return {}

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The whole, unsharded tensor.

        Raises:
            CheckpointError: it cannot be read, or is not what was written; names tensor and file.
        """

    def travelling(self) -> dict[str, Path]:
        """Files that travel with the weights, by the names that they have in a Hugging Face folder: tokenizer, chat
        template, generation config, config.json."""
        return files_in(self.path / CARRIED)

    def tokenizer_files(self) -> list[Path]:
        """:meth:`travelling`, the paths."""
        return list(self.travelling().values())

    def verify(self) -> None:  # noqa: B027 - most sources need none
        """Compare files with their checksums where :meth:`read` does not do so on the way; collective over all ranks
        where torch.distributed is initialized.

        Raises:
            CheckpointError: on every rank; names the files.
        """
