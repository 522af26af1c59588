"""``launch/to_universal.py`` on checkpoints of programs that know only DeepSpeed's API, and by
DeepSpeed's options.
"""

import json
import os
import shutil

import pytest
import torch

from coat_dist.checkpoint.manifest import read_manifest, sync_files, verify
from launch import to_universal
from tests.coat_dist.checkpoint.test_schedule import engine_of
from tests.coat_dist.deepspeed.small_engine import train
from tests.support import run_ranks


def contents(engine, kind):
    """fp32 weights; of torch's AdamW, moments too."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, p in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(p).clone()
        for key in () if kind == "CoatAdamW" else ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(p, key).clone()
    return found


def save(rank, world, kind, stage, folder):
    engine = engine_of(kind, stage=stage)
    train(engine, rank, 3)
    engine.save_checkpoint(folder, client_state={"mine": 7})
    return contents(engine, kind)


def load(rank, world, kind, stage, folder):
    engine = engine_of(kind, stage=stage, universal=True)
    _, client = engine.load_checkpoint(folder)
    assert client["mine"] == 7 and engine.global_steps == 3
    found = contents(engine, kind)
    train(engine, rank, 1)
    return found


def main(*argv):
    return to_universal.main([str(a) for a in argv])


def same(one, other):
    """Whether what both have is equal."""
    common = one.keys() & other.keys()
    return len(common) >= 6 and all(torch.equal(one[name], other[name]) for name in common)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of plain DeepSpeed on two ranks, laid out as transformers' Trainer does, and
    what it holds.
    """
    folder = tmp_path_factory.mktemp("trainer") / "checkpoint-3"
    return folder, run_ranks(2, save, "AdamW", 2, str(folder))[0]


@pytest.fixture(scope="module")
def converted(saved, tmp_path_factory):
    output = tmp_path_factory.mktemp("converted") / "universal"
    assert main("--load", saved[0], "--output", output) == 0
    return output


@pytest.mark.parametrize(("kind", "world", "stage"), [("AdamW", 2, 1), ("CoatAdamW", 1, 2)])
def test_a_plain_checkpoint_loads_in_both_kinds_of_programs(saved, converted, kind, world, stage):
    assert (converted / "latest_universal").read_text() == "global_step3"
    verify(converted / "global_step3", read_manifest(converted / "global_step3")["files"])
    found = run_ranks(world, load, kind, stage, str(converted))[0]
    assert same(found, saved[1])


def test_a_coat_engines_checkpoint_loads_in_a_plain_program(tmp_path):
    """From stage 3 on two ranks to stage 2 on one, by DeepSpeed's options, beside the
    checkpoint.
    """
    held = run_ranks(2, save, "CoatAdamW", 3, str(tmp_path))[0]
    before = (tmp_path / "latest").read_text()
    manifest = tmp_path / "global_step3" / "manifest.json"
    # Of a program that has one of the names that pretrain.py uses.
    extra = {"progress": {"step": 200}}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | extra))
    given = (
        "--input_folder",
        tmp_path / "global_step3",
        "--output_folder",
        tmp_path / "global_step3_universal",
    )
    assert main(*given) == 0
    assert (tmp_path / "latest_universal").read_text() == "global_step3_universal"
    assert (tmp_path / "latest").read_text() == before
    assert not [
        p.name for p in tmp_path.iterdir() if p.name.startswith((".unfinished", ".converting"))
    ]
    assert same(run_ranks(1, load, "AdamW", 2, str(tmp_path))[0], held)


def test_deepspeeds_options_are_taken(saved, tmp_path, capsys):
    output = tmp_path / "there_universal"
    options = [
        "--num_extract_workers",
        "8",
        "--num_merge_workers=2",
        "--keep_temp_folder",
        "--no_strict",
    ]
    given = [
        "--input_folder",
        saved[0],
        "--output_folder",
        output,
        *options,
        "--inject_missing_state",
    ]
    assert main(*given) == 0
    said = capsys.readouterr().out
    assert '"checkpoint": {"load_universal": true}' in said and str(tmp_path) in said
    assert (tmp_path / "latest_universal").read_text() == "there_universal"
    files = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    (tmp_path / ".unfinished-there_universal").mkdir()  # of a conversion that was killed
    assert main(*given) == 0  # again: replaced
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == files


def test_what_would_be_lost_or_cannot_be_converted_is_one_line(saved, converted, tmp_path, capsys):
    folder, tag = saved[0], saved[0] / "global_step3"

    def refused(*argv):
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert main(*argv) == 2
        text = capsys.readouterr().err
        assert (
            text.startswith("error: ")
            and text.count("\n") == 1
            and sorted(tmp_path.rglob("*")) == before
        ), text
        return text

    out = ("--output", tmp_path / "out")
    assert f"{folder.parent}, which is no checkpoint" in refused("--load", folder.parent, *out)
    assert "which is no checkpoint" in refused("--load", tmp_path / "none", *out)
    assert "is universal already" in refused("--load", converted, *out)
    assert "which is a checkpoint or in one" in refused("--load", folder, "--output_folder", tag)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("")
    assert "no earlier conversion" in refused(
        "--load", folder, "--output_folder", tmp_path / "mine"
    )
    for option in ("--output", "--output_folder"):
        assert f"{option}: got " in refused("--load", folder, option, tmp_path / "mine/notes.txt/x")

    cut = shutil.copytree(tag, tmp_path / "cut/global_step3")
    states = next(cut.glob("*optim_states.pt"))
    os.truncate(states, 1000)
    assert states.name in refused("--load", cut, *out)


def test_steps_that_an_optimizer_counts_by_group(saved, tmp_path):
    """As DeepSpeed's FusedAdam did."""
    shutil.copytree(saved[0], tmp_path / "save")
    for path in (tmp_path / "save/global_step3").glob("*optim_states.pt"):
        content = torch.load(path, weights_only=False)
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        for state in base["state"].values():
            del state["step"]
        for group in base["param_groups"]:
            group["step"] = 3
        torch.save(content, path)
    assert main("--load", tmp_path / "save", "--output", tmp_path / "out") == 0
    steps = sorted((tmp_path / "out").rglob("step.pt"))
    assert len(steps) == 6 and all(torch.load(path) == 3 for path in steps)


def test_a_manifest_of_another_program_is_verified(saved, tmp_path, capsys):
    """Engines of ``coat_dist.initialize`` list their files; nothing in it says what the run was."""
    tag = shutil.copytree(saved[0] / "global_step3", tmp_path / "save/global_step3")
    (tmp_path / "save/latest").write_text("global_step3")
    files = sync_files(tag)
    (tag / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    assert main("--load", tmp_path / "save", "--output", tmp_path / "out") == 0
    assert read_manifest(tmp_path / "out/global_step3")["progress"] == {"step": 3}
    states = next(tag.glob("*optim_states.pt"))
    whole = states.read_bytes()
    states.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    capsys.readouterr()
    assert main("--load", tag, "--output", tmp_path / "out2") == 2
    assert f"{states.name}: damaged" in capsys.readouterr().err and not (tmp_path / "out2").exists()
    (tag / "manifest.json").write_text(json.dumps({"format": 1, "unfinished": True}))
    assert main("--load", tag, "--output", tmp_path / "out2") == 2
    assert "was never finished" in capsys.readouterr().err
