"""Files of torch.save that know their CRC-32 when they are closed."""

import zlib

import pytest
import torch

from coat_dist.checkpoint.write import engine_writes
from coat_dist.checkpoint.write.engine_writes import SummedFile, join

LARGE = torch.arange(1 << 18, dtype=torch.float32)  # 1 MiB
STATES = {
    "mixed": {"a": LARGE, "b": LARGE[5:9], "c": torch.ones(3), "text": "x" * 2_000_000, "d": LARGE * 2},
    "odd length": {"a": torch.ones(1_500_001, dtype=torch.uint8)},
    "small": {i: torch.ones(i + 1) for i in range(50)},
    "nothing": {},
}


def test_join_is_the_sum_of_both():
    data = bytes(range(256)) * 300
    for cut in (0, 1, 77, 65536, len(data)):
        first, second = data[:cut], data[cut:]
        assert join(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_checksum_is_that_of_the_file(tmp_path, monkeypatch, state, new_format):
    summed = []
    real = zlib.crc32
    monkeypatch.setattr(
        engine_writes.zlib, "crc32", lambda data, *before: summed.append(len(data)) or real(data, *before)
    )
    file = SummedFile(tmp_path / "x.pt", zipped=new_format)
    torch.save(STATES[state], file, _use_new_zipfile_serialization=new_format)
    file.close()
    monkeypatch.undo()
    content = (tmp_path / "x.pt").read_bytes()
    assert (file.size, file.checksum) == (len(content), zlib.crc32(content))
    if new_format:  # torch has summed what is large
        assert max(summed) < 1 << 20


def test_a_checksum_that_the_file_does_not_say_is_left_open(tmp_path):
    with SummedFile(tmp_path / "x", zipped=True) as file:
        file.write(b"PK")
        file.write(bytes(1 << 20))
    assert file.checksum is None
