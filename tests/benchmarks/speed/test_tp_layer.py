"""What the tensor-parallel layer benchmark refuses before it starts ranks, and where it finds
its peer.
"""

from __future__ import annotations

import sys
import tarfile

import pytest

from benchmarks.common import ROOT
from benchmarks.speed import te_layer, tp_layer
from launch.model.gpt import load_model_config


def test_bad_arguments_are_named(monkeypatch, refused, tmp_path) -> None:
    for arguments, message in (
        (["--tokens", "5000"], "--tokens: got 5000, accepted: a multiple of 4096"),
        (["--rounds", "0"], "--rounds: got 0, accepted: an integer >= 1"),
    ):
        with refused(message):
            tp_layer.parse(arguments)
    monkeypatch.setattr(sys, "argv", ["tp_layer", "--presets", "olmo-1b", "--peers", str(tmp_path)])
    with refused(
        "error: --peers: got the preset 'olmo-1b' with normalization 'layernorm', accepted"
    ):
        tp_layer.main()


@pytest.mark.parametrize("preset", ["llama2-13b", "llama3-8b"])
def test_the_peer_builds_these(preset) -> None:
    te_layer.check(preset, load_model_config(ROOT / f"configs/models/{preset}.json"))


def test_the_peer_is_unpacked(tmp_path) -> None:
    folder, target = tmp_path / "peers", tmp_path / "target"
    folder.mkdir()
    with pytest.raises(
        ValueError, match="^--peers: got '.*peers' with 0 archives, accepted: a folder with trans"
    ):
        te_layer.unpack(str(folder), str(target))
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    with tarfile.open(folder / "transformer_engine-2.tar.xz", "w:xz") as archive:
        archive.add(package, "transformer_engine")
    assert te_layer.unpack(str(folder), str(target)) == target
    assert (target / "transformer_engine/__init__.py").exists()
    assert te_layer.unpack(str(target), "nowhere") == target
