"""Tensors in safetensors files: where each one is, reading it, and writing many, a file at a
time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from launch.convert.weights import CheckpointError

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
    """Index into the file's tensor, of one expert of stacked ones."""


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: the file is damaged, or a tensor has a type that weights cannot have.
    """
    try:
        with _opened(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            found = {
                name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()
            }
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(
            f"{file}: cannot be read ({problem}), accepted: a whole safetensors file"
        ) from None
    for name, (dtype, _) in found.items():
        if dtype not in _TYPES:
            raise CheckpointError(
                f"{file}: tensor {name}: got type {dtype}, accepted: {', '.join(_TYPES)}"
            )
    return {name: Entry(file, name, _TYPES[dtype], shape) for name, (dtype, shape) in found.items()}


def _opened(file: Path) -> Any:
    # Mapped, a file that is cut off meanwhile would end the process.
    return safe_open(file, "pt", backend="pread")


class TensorFiles:
    """Tensors of one or several safetensors files, read one by one; the last file stays open."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)
        self._last: tuple[Path, Any] | None = None

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        entry = self.entries[name]
        try:
            if self._last is None or self._last[0] != entry.file:
                self._last = entry.file, _opened(entry.file)
            file = self._last[1]
            if entry.place is ...:
                return file.get_tensor(entry.name)
            return file.get_slice(entry.name)[entry.place]
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(
                f"{entry.file}: tensor {name} cannot be read ({problem})"
            ) from problem


def rounded(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """A tensor in another type; itself where it has it.

    Raises:
        CheckpointError: values beyond float16's largest, which would become infinite.
    """
    found = tensor.to(dtype)
    if (
        dtype == torch.float16
        and tensor.dtype != dtype
        and not torch.equal(found.isfinite(), tensor.isfinite())
    ):
        raise CheckpointError(
            f"tensor {name}: got values beyond 65504 in float16, accepted: bfloat16 or float32"
        )
    return found


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    read: Callable[[str], torch.Tensor],
    *,
    shard_bytes: int,
    progress: Callable[[int], object] = lambda _: None,
) -> None:
    """Write ``stem.safetensors``, or ``stem-00001-of-0000N.safetensors`` and
    ``stem.safetensors.index.json``.

    The tensors of one file are in memory at once.

    Args:
        folder: is there.
        stem: of the files' names.
        tensors: without memory (device "meta"), in the order in which they are read.
        read: gives a tensor by its name, contiguous, that shares its memory with no other one.
        shard_bytes: most bytes of tensors in a file; a larger tensor has one for itself.
        progress: called with the bytes of each file that was written.

    Raises:
        OSError, CheckpointError: a file cannot be written.
        Exception: what ``read`` raises.
    """
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_bytes,
    )
    for name, shard in split.filename_to_tensors.items():
        path = folder / name
        path.touch()
        mode = path.stat().st_mode  # the library's own file is readable by its owner alone
        try:  # transformers refuses files without this metadata
            save_file({one: read(one) for one in shard}, path, metadata={"format": "pt"})
        except SafetensorError as problem:
            raise CheckpointError(f"{path}: cannot be written ({problem})") from problem
        path.chmod(mode)
        progress(sum(tensors[one].nbytes for one in shard))
    if split.is_sharded:
        index = {
            "metadata": split.metadata,
            "weight_map": dict(sorted(split.tensor_to_filename.items())),
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
