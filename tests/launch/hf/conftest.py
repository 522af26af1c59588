"""A model in Hugging Face's layout and what it converts to, for the tests of files."""

import pytest
import torch

from launch import convert_hf
from tests.launch.hf.folders import make


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A folder of several files, and what it converts to."""
    folder = tmp_path_factory.mktemp("made")
    make("llama3", folder / "hf", dtype=torch.bfloat16, shard="60KB")
    assert convert_hf.main(["--from", str(folder / "hf"), "--to", str(folder / "ours")]) == 0
    return folder
