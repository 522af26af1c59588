"""A model in Hugging Face's layout and what it converts to, for the tests of files."""

import pytest
import torch

from tests.launch.convert.hf_folders import convert, make


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    """``hf``, of several files, and ``back``, what it converts to."""
    folder = tmp_path_factory.mktemp("made")
    make("llama3", folder / "hf", dtype=torch.bfloat16, shard="60KB")
    convert(folder / "hf", folder / "back")
    return folder
