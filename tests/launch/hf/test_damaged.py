"""Damaged inputs of convert_hf.py are named with tensor and file, and nothing is left of an output."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from launch import convert_hf
from tests.launch.hf.folders import copied, edit, fails

pytest.importorskip("transformers")


def rewrite(file, change):
    from safetensors.torch import load_file, save_file

    content = load_file(file)
    change(content)
    save_file(content, file, metadata={"format": "pt"})


def holder(folder, name):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def edit_header(file, change):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def flip(file, name, byte):
    content = bytearray(file.read_bytes())
    base = 8 + int.from_bytes(content[:8], "little")
    start, stop = json.loads(content[8:base])[name]["data_offsets"]
    content[base + range(start, stop)[byte]] ^= 1
    file.write_bytes(content)


def overlapping(header):
    """Another tensor of that shape has the bytes of NAME, too; nobody has its own."""
    shape = header[NAME]["shape"]
    other = next(n for n, e in header.items() if n not in ("__metadata__", NAME) and e["shape"] == shape)
    return header | {other: {**header[other], "data_offsets": header[NAME]["data_offsets"]}}


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: os.truncate(f, f.stat().st_size - 100), "cannot be read .*, accepted: a whole safetensors file"),
        (lambda f: os.truncate(f, 4), "cannot be read .*, accepted: a whole safetensors file"),
        (lambda f: f.unlink(), "cannot be read .No such file"),
        (lambda f: rewrite(f, lambda c: c.pop(NAME)), f"has no tensor {NAME}; model.safetensors.index.json says"),
        (lambda f: rewrite(f, lambda c: c.update(more=torch.ones(2))), "holds more, which .* does not list"),
        (
            lambda f: rewrite(f, lambda c: c.update({NAME: torch.ones(3, 64)})),
            rf"{NAME}: got \[3, 64\], accepted: \[96, 64\], by config.json",
        ),
        (
            lambda f: rewrite(f, lambda c: c.update({NAME: torch.ones(96, 64, dtype=torch.int8)})),
            f"tensor {NAME}: got type I8, accepted: BF16, F32, F16",
        ),
        (lambda f: f.write_bytes(f.read_bytes() + b"x"), "cannot be read"),
        (lambda f: edit_header(f, lambda h: []), "cannot be read"),
        (lambda f: edit_header(f, lambda h: {}), "cannot be read"),
        (lambda f: edit_header(f, overlapping), "cannot be read"),
    ],
)
def test_a_damaged_hugging_face_folder(sharded, tmp_path, capsys, damage, told):
    import re

    folder = copied(sharded, tmp_path, "hf")
    file = holder(folder, NAME)
    damage(file)
    err = fails(capsys, folder, tmp_path / "out")
    assert re.search(told, err), err
    assert file.name in err


def test_tensors_that_the_model_lacks_or_has_not(sharded, tmp_path, capsys):
    folder = copied(sharded, tmp_path, "hf")
    assert "which the model by config.json has not" in fails(
        capsys, edit(folder, num_hidden_layers=1), tmp_path / "out"
    )
    err = fails(capsys, edit(folder, num_hidden_layers=3), tmp_path / "out")
    assert "has no model.layers.2." in err
    assert "tie_word_embeddings true, accepted: false" in fails(
        capsys, edit(folder, num_hidden_layers=2, tie_word_embeddings=True), tmp_path / "out"
    )
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert "has no tensors" in fails(capsys, folder, tmp_path / "out")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "has pytorch_model.bin, which may run code" in fails(capsys, folder, tmp_path / "out")


def test_a_tensor_in_two_shards(sharded, tmp_path, capsys):
    """Of a folder that was half overwritten: transformers takes the other one."""
    folder = copied(sharded, tmp_path, "hf")
    first, last = holder(folder, "model.embed_tokens.weight"), sorted(folder.glob("*.safetensors"))[-1]
    rewrite(last, lambda c: c.update({"model.embed_tokens.weight": torch.ones(100, 64, dtype=torch.bfloat16)}))
    told = f"{last}: holds model.embed_tokens.weight, which model.safetensors.index.json says is in {first.name}"
    assert told in fails(capsys, folder, tmp_path / "out")


def test_a_single_file_without_tensors(sharded, tmp_path, capsys):
    folder = copied(sharded, tmp_path, "hf")
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"{folder}: has no model." in fails(capsys, folder, tmp_path / "out")


@pytest.mark.parametrize("name", ["decoder.layers.1.self_attention.linear_qkv.weight", "output_layer.weight"])
def test_flipped_bits_are_found_by_tensor(sharded, tmp_path, capsys, name):
    """In a converted folder, and in a Hugging Face folder that this program wrote."""
    folder = copied(sharded, tmp_path, "ours")
    flip(folder / "weights.safetensors", name, -1)  # of the embedding: in the padding
    err = fails(capsys, folder, tmp_path / "out")
    assert f"weights.safetensors: tensor {name} is not what was written, by the checksum in " in err

    assert convert_hf.main(["--from", str(sharded / "ours"), "--to", str(tmp_path / "hf")]) == 0
    flip(tmp_path / "hf" / "model.safetensors", "model.layers.0.mlp.down_proj.weight", 0)
    assert "tensor model.layers.0.mlp.down_proj.weight is not what" in fails(capsys, tmp_path / "hf", tmp_path / "out")


def test_a_converted_folder_that_is_not_whole(sharded, tmp_path, capsys):
    for damage, told in (
        (lambda f: (f / "manifest.json").unlink(), "manifest.json: cannot be read"),
        (lambda f: os.truncate(f / "weights.safetensors", 1000), "weights.safetensors: is 1000, was"),
        (lambda f: (f / "model.json").unlink(), "model.json: is missing"),
        (lambda f: (f / "hugging_face" / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
    ):
        folder = copied(sharded, tmp_path, "ours")
        damage(folder)
        assert told in fails(capsys, folder, tmp_path / "out")
        shutil.rmtree(folder)
