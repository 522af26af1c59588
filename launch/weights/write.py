"""Writing tensors into safetensors files, a file at a time."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from coat_dist.checkpoint.write.durable import write_text
from launch.weights.source import CheckpointError
from launch.weights.tensor_files import crc32

__all__ = ["Planned", "Written", "write_tensors"]


class Planned(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Written:
    """What :func:`write_tensors` has written."""

    files: dict[str, list[int]] = field(default_factory=dict)
    """[bytes, CRC-32] by file."""
    tensors: dict[str, int] = field(default_factory=dict)
    """CRC-32 by tensor."""


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Sequence[Planned],
    read: Callable[[Planned], torch.Tensor],
    *,
    shard_bytes: int,
    progress: Callable[[int], object] = lambda _: None,
) -> Written:
    """Write ``stem.safetensors``, or ``stem-00001-of-0000N.safetensors`` and ``stem.safetensors.index.json``.

    When this returns, the files are on disk; their names are not yet (``coat_dist/checkpoint/write/durable.py``). The
    tensors of one file are in memory at once. A thread sums them and waits for the disk meanwhile.

    Args:
        folder: is there.
        stem: of the files' names.
        tensors: in the order in which they are read.
        read: gives a tensor, contiguous and in its dtype, that shares its memory with no other one.
        shard_bytes: most bytes of tensors in a file; a larger tensor has one for itself.
        progress: is told of bytes that were written, as they are.

    Raises:
        OSError, CheckpointError: a file cannot be written.
        Exception: what ``read`` raises.
    """
    planned = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        planned,
        get_storage_size=lambda tensor: tensor.bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_bytes,
    )
    written = Written()
    with ThreadPoolExecutor(1) as beside:
        synced: list[Future[None]] = []
        for name, shard in split.filename_to_tensors.items():
            content, sums = {}, {}
            for one in shard:
                content[one] = read(planned[one])
                sums[one] = beside.submit(crc32, content[one])
            _save(folder / name, content)
            written.tensors |= {one: found.result() for one, found in sums.items()}
            written.files[name] = _measured(folder / name, content)
            synced.append(beside.submit(_sync, folder / name))
            progress(sum(planned[one].bytes for one in shard))
        for sync in synced:
            sync.result()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return written


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # the library's own file is readable by its owner alone
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # transformers refuses files without it
    except SafetensorError as problem:
        raise CheckpointError(f"{path}: cannot be written ({problem})") from problem
    path.chmod(mode)


def _measured(path: Path, tensors: dict[str, torch.Tensor]) -> list[int]:
    """Bytes and CRC-32 of a file as it should be: of its header, and of the tensors that were in memory."""
    with path.open("rb") as file:
        header = file.read(8)
        header += file.read(int.from_bytes(header, "little"))
    size, checksum = len(header), zlib.crc32(header)
    with safe_open(path, "pt", backend="pread") as opened:
        for name in opened.offset_keys():
            checksum = crc32(tensors[name], checksum)
            size += tensors[name].nbytes
    return [size, checksum]


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
