"""Damaged inputs of convert_hf.py are named, and nothing is left of an output."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.coat_dist.checkpoint.small_saves import flip
from tests.launch.convert.hf_folders import copied, edit, fails

pytest.importorskip("transformers")

NAME = "model.layers.1.mlp.up_proj.weight"


def rewrite(file, change):
    content = load_file(file)
    change(content)
    save_file(content, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: os.truncate(f, f.stat().st_size - 100),
            "FILE: cannot be read .*, accepted: a whole safetensors",
        ),
        (lambda f: os.truncate(f, 4), "FILE: cannot be read"),
        (lambda f: f.unlink(), "FILE: cannot be read .No such file"),
        (
            lambda f: rewrite(f, lambda c: c.pop(NAME)),
            rf"{NAME}: got nothing, accepted: \[96, 64\], by config.json",
        ),
        (
            lambda f: rewrite(f, lambda c: c.update({NAME: torch.ones(3, 64)})),
            rf"{NAME}: got \[3, 64\], accepted: \[96, 64\], by config.json",
        ),
        (
            lambda f: rewrite(f, lambda c: c.update({NAME: torch.ones(96, 64, dtype=torch.int8)})),
            f"FILE: tensor {NAME}: got type I8, accepted: BF16, F32, F16",
        ),
    ],
)
def test_a_damaged_hugging_face_folder(sharded, tmp_path, capsys, damage, message):
    folder = copied(sharded, tmp_path, "hf")
    file = (
        folder
        / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][NAME]
    )
    damage(file)
    assert re.search(message.replace("FILE", file.name), fails(capsys, folder, tmp_path / "out"))


def test_tensors_that_the_model_lacks_or_has_not(sharded, tmp_path, capsys):
    folder = copied(sharded, tmp_path, "hf")
    for layers, message in (
        (1, "model.layers.1.* accepted: nothing"),
        (3, "model.layers.2.* got nothing"),
    ):
        assert re.search(
            message, fails(capsys, edit(folder, num_hidden_layers=layers), tmp_path / "out")
        )
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert "has no tensors" in fails(capsys, folder, tmp_path / "out")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin may run code" in fails(capsys, folder, tmp_path / "out")


def test_a_hugging_face_folder_of_this_program_has_checksums_of_tensors_only(
    sharded, tmp_path, capsys
):
    folder = copied(sharded, tmp_path, "back")
    edit(folder, eos_token_id=7)
    assert "tokenizer.json" in json.loads((folder / "manifest.json").read_text())["files"]
    (folder / "tokenizer.json").write_text("{}")
    flip(folder / "model.safetensors")
    err = fails(capsys, folder, tmp_path / "out")
    assert "model.safetensors: damaged" in err and "tokenizer" not in err and "config" not in err
