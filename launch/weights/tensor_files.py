"""Tensors in safetensors files: where each one is, and reading it with its checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from coat_dist.checkpoint.manifest import MANIFEST
from launch.weights.source import CheckpointError

__all__ = ["Entry", "TensorFiles", "crc32", "read_header", "written_manifest"]

_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
"""Types of weights, as the format spells them. Codes of a quantized model are not weights."""


class Entry(NamedTuple):
    """Where a tensor is."""

    file: Path
    name: str
    """In the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Any = ...
    """Index of the tensor in the file's one, of experts that are stacked."""


class TensorFiles:
    """Tensors of one or several safetensors files, read one by one.

    Args:
        entries: see :func:`read_header`.
        checksums: CRC-32 by name, compared with what is read.
    """

    def __init__(self, entries: Mapping[str, Entry], checksums: Mapping[str, int] | None = None) -> None:
        self.entries = dict(entries)
        self._checksums = checksums or {}
        self._last: tuple[Path, Any] | None = None

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor.

        Raises:
            CheckpointError: the file cannot be read, or holds other bytes than were written.
        """
        entry = self.entries[name]
        try:
            if self._last is None or self._last[0] != entry.file:
                self._last = entry.file, _opened(entry.file)
            file = self._last[1]
            tensor = file.get_tensor(entry.name) if entry.place is ... else file.get_slice(entry.name)[entry.place]
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(f"{entry.file}: tensor {name} cannot be read ({problem})") from problem
        if name in self._checksums and crc32(tensor) != self._checksums[name]:
            raise CheckpointError(
                f"{entry.file}: tensor {name} is not what was written, by the checksum in "
                f"{entry.file.parent / MANIFEST} (remove that file if the tensors were changed on purpose)"
            )
        return tensor


def crc32(tensor: torch.Tensor, before: int = 0) -> int:
    """CRC-32 of a contiguous tensor's memory, behind bytes whose CRC-32 is ``before``."""
    return zlib.crc32(tensor.view(-1).view(torch.uint8).numpy(), before)  # type: ignore[arg-type]  # numpy's are buffers


def written_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that this program wrote; empty where there is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read ({problem})") from None
    return manifest if isinstance(manifest, dict) else {}


def _opened(file: Path) -> Any:
    return safe_open(file, "pt", backend="pread")  # mapped, a file that is cut off meanwhile would end the process


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: it is no such file, is cut off, or holds a tensor of a type that weights cannot have.
    """
    try:
        with _opened(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            found = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{file}: cannot be read ({problem}), accepted: a whole safetensors file") from None
    for name, (dtype, _) in found.items():
        if dtype not in _TYPES:
            raise CheckpointError(f"{file}: tensor {name}: got type {dtype}, accepted: {', '.join(_TYPES)}")
    return {name: Entry(file, name, _TYPES[dtype], shape) for name, (dtype, shape) in found.items()}
