"""Safetensors files as they are written: content, permissions, and errors."""

from __future__ import annotations

import json
import os
import resource

import pytest
import torch
from safetensors.torch import load_file

from launch.convert.tensor_files import write_tensors
from launch.convert.weights import CheckpointError

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TENSORS = {
    f"t{i}": torch.empty(1000, i % 2 + 1, dtype=TYPES[i % 3], device="meta") for i in range(6)
}
LARGEST = max(tensor.nbytes for tensor in TENSORS.values())


def read(name):
    return torch.arange(TENSORS[name].numel()).view(TENSORS[name].shape).to(TENSORS[name].dtype)


@pytest.mark.parametrize("shard_bytes", [1, 2 * LARGEST, 1 << 30])
def test_files_have_the_tensors(tmp_path, shard_bytes):
    bars: list[int] = []
    write_tensors(tmp_path, "m", TENSORS, read, shard_bytes=shard_bytes, progress=bars.append)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {1: 6, 1 << 30: 1}.get(shard_bytes, 2)
    found = {}
    for file in files:
        found |= load_file(file)
        os.umask(mask := os.umask(0o22))
        assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    for name in TENSORS:
        assert found[name].dtype == TENSORS[name].dtype and torch.equal(found[name], read(name))
    assert sum(bars) == sum(tensor.nbytes for tensor in TENSORS.values())
    if len(files) > 1:
        index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(bars) and set(index["weight_map"]) == set(
            found
        )


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, before[1]))
    try:
        with pytest.raises(
            CheckpointError,
            match=r"m-00001-of-00002.safetensors: cannot be written \(.*File too large",
        ):
            write_tensors(tmp_path, "m", TENSORS, read, shard_bytes=2 * LARGEST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
