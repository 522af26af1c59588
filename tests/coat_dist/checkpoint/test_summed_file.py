"""Files of torch.save that know their CRC-32 when they are closed."""

import zlib

import pytest
import torch

from coat_dist.checkpoint.write.engine_writes import SummedFile

LARGE = torch.arange(1 << 18, dtype=torch.float32)  # 1 MiB
STATES = {
    "mixed": {"a": LARGE, "b": LARGE[5:9], "c": torch.ones(3), "text": "x" * 2_000_000, "d": LARGE * 2},
    "nothing": {},
}


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_checksum_is_that_of_the_file(tmp_path, state, new_format):
    file = SummedFile(tmp_path / "x.pt")
    torch.save(STATES[state], file, _use_new_zipfile_serialization=new_format)
    file.close()
    content = (tmp_path / "x.pt").read_bytes()
    assert (file.size, file.checksum) == (len(content), zlib.crc32(content))
