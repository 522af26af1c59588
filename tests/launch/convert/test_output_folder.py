"""Outputs of convert_hf.py are written atomically; memory is that of one file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.convert.sources import open_weights
from tests.launch.convert.hf_folders import convert, copied, fails, make, tensors

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[3]


def test_every_written_file_has_its_checksum(sharded):
    folder = sharded / "back"
    manifest = json.loads((folder / "manifest.json").read_text())
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert manifest["files"].keys() == there - {"manifest.json"}
    for name, (size, checksum) in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (size, checksum), name


def test_where_it_may_not_write(sharded, tmp_path, capsys, monkeypatch):
    hf = copied(sharded, tmp_path, "hf")
    assert "--to: got" in fails(capsys, hf, hf, "--overwrite")
    assert "which is, or is in, or holds what is converted" in fails(capsys, hf, hf / "inside")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("Dear")
    assert "accepted: another folder, or --overwrite" in fails(capsys, hf, tmp_path / "letters")
    assert "--overwrite does not remove it" in fails(
        capsys, hf, tmp_path / "letters", "--overwrite"
    )
    other = tmp_path / "global_step3"
    other.mkdir()
    (other / "mp_rank_00_model_states.pt").touch()  # a checkpoint, which its run may remove
    assert f"which is in the checkpoint {other}" in fails(capsys, hf, other / "inside")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    assert "where 5 bytes are free and" in fails(capsys, hf, tmp_path / "out")


def test_overwrite_removes_a_model_and_nothing_else(sharded, tmp_path, capsys):
    """A trainer's folder has a config.json too, and its checkpoints."""
    hf = copied(sharded, tmp_path, "hf")
    assert "or --overwrite" in fails(capsys, sharded / "back", hf)
    for name in ("checkpoint-500/optimizer.pt", "notes.txt"):
        (hf / name).parent.mkdir(exist_ok=True)
        (hf / name).write_text("work")
        assert f"something else than a model ({name})" in fails(
            capsys, sharded / "back", hf, "--overwrite"
        )
        (hf / name).unlink()
    for _ in range(2):
        convert(sharded / "back", hf, "--overwrite")


def test_a_link_leads_to_the_folder(sharded, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "new").symlink_to("later")
    for target, more in (("link", []), ("link", ["--overwrite"]), ("new", [])):
        convert(sharded / "hf", tmp_path / target, *more)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "later", "link", "new"]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "config.json").is_file()


def test_a_single_file_comes_before_an_index(sharded, tmp_path):
    """As in transformers: ``save_pretrained`` leaves the index of an earlier save where it is."""
    folder = copied(sharded, tmp_path, "hf")
    content = tensors(folder) | {"model.norm.weight": torch.full((64,), 3, dtype=torch.bfloat16)}
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    for file in folder.glob("model-*"):
        file.unlink()
    norm = open_weights(folder).read("decoder.final_layernorm.weight")
    assert torch.equal(norm, content["model.norm.weight"])


def test_every_file_is_brought_to_disk(sharded, tmp_path, monkeypatch):
    """Before the folder has its name; a rename does not wait for what is in it."""
    real, rename, synced, found = os.fsync, os.rename, set(), []

    def fsync(descriptor):
        real(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def renamed(source, target):
        found.extend(path for path in Path(source).rglob("*") if path.stat().st_ino not in synced)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    convert(sharded / "hf", tmp_path / "out", "--max-shard-size", "100KB")
    assert list((tmp_path / "out").glob("*.index.json")) and not found


def test_nothing_is_published_that_may_not_be_on_disk(sharded, tmp_path, capsys, monkeypatch):
    """Each sync of a conversion fails once; the last is of the name itself, when the folder is
    complete.
    """
    real, left = os.fsync, [0]

    def failing(descriptor):
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    small = "--max-shard-size", "100KB"
    convert(sharded / "back", tmp_path / "good", *small)
    last, out = -left[0], tmp_path / "in" / "out"
    out.parent.mkdir()
    for at in range(1, last):
        left[0] = at
        assert "No space left" in fails(capsys, sharded / "back", out, *small), at
    left[0] = last
    convert(sharded / "back", out, *small, status=2)
    assert open_weights(out).model.num_layers == 2


def test_convert_hf_removes_what_a_kill_left(sharded, tmp_path):
    shutil.copytree(sharded / "back", tmp_path / ".unfinished-out")
    convert(sharded / "hf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


MEASURED = """
import sys
from pathlib import Path
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
small = ["--max-shard-size", "70MB"]
# Imports, and what the libraries keep.
convert_hf.main(sys.argv[3:5] + ["--to", sys.argv[2] + "/warm"])
Path("/proc/self/clear_refs").write_text("5")
before = peak()
assert convert_hf.main(["--from", sys.argv[1], "--to", sys.argv[2] + "/out", *small]) == 0
assert convert_hf.main(["--from", sys.argv[2] + "/out", "--to", sys.argv[2] + "/back", *small]) == 0
print("grown", peak() - before)
"""


@pytest.mark.slow
def test_memory_is_not_the_models(sharded, tmp_path):
    """370 MB of tensors, of which the largest has 64 MB, in files of 70 MB: a file and a few
    tensors are in memory.
    """
    sizes = dict(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4
    )
    make(
        "llama3",
        tmp_path / "hf",
        dtype=torch.bfloat16,
        vocab_size=32000,
        num_hidden_layers=8,
        **sizes,
    )
    command = [
        sys.executable,
        "-c",
        MEASURED,
        str(tmp_path / "hf"),
        str(tmp_path),
        "--from",
        str(sharded / "hf"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout.split("grown ")[1]) < 180e6, done.stdout


@pytest.mark.parametrize(
    ("call", "source", "complete"),
    [
        ("rename", "target", False),
        ("rename", ".unfinished-target", False),
        ("rmtree", ".unfinished-replaced-target", True),
    ],
)
def test_ctrl_c_while_a_model_is_replaced(
    sharded, tmp_path, capsys, monkeypatch, call, source, complete
):
    """There is a whole one at every moment."""
    target, holder = (
        copied(sharded, tmp_path, "hf").rename(tmp_path / "target"),
        shutil if call == "rmtree" else os,
    )
    old, real = (target / "config.json").read_bytes(), getattr(holder, call)

    def interrupted(path, *rest, **more):
        if Path(path).name != source or not Path(path).exists():
            return real(path, *rest, **more)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(holder, call, interrupted)
    convert(sharded / "back", target, "--overwrite", "--dtype", "float32", status=130)
    assert "interrupted; " in capsys.readouterr().err
    assert ((target / "config.json").read_bytes() == old) is not complete
    assert open_weights(target).model.num_layers == 2
    assert [p.name for p in tmp_path.iterdir() if p.name != "target"] == [
        ".unfinished-replaced-target"
    ] * complete


def test_a_source_that_is_none_is_named(sharded, tmp_path, capsys):
    out = tmp_path / "out"
    assert "is no folder (nothing is downloaded)" in fails(capsys, tmp_path / "meta-llama", out)
    (tmp_path / "empty").mkdir()
    assert "holds no weights, accepted: a Hugging Face folder" in fails(
        capsys, tmp_path / "empty", out
    )
