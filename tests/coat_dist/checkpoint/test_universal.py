"""Universal checkpoints: other data-parallel sizes and ZeRO stages, moments within the encoding's error."""

import pytest
import torch

from tests.coat_dist.checkpoint.universal_runs import (
    build,
    load_and_compare,
    train_and_save,
)
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks


@pytest.mark.parametrize(
    ("source", "ranks", "target", "to"),
    [
        ("zero-1", 2, "zero-1", 1),
        ("zero-2", 1, "zero-2", 2),
        ("zero-2", 2, "zero-3", 2),
        ("zero-3, sub-groups", 2, "zero-3", 1),
        ("zero-3", 2, "zero-1, BF16_Optimizer", 2),
        ("zero-1, BF16_Optimizer", 2, "zero-2", 1),
    ],
)
def test_other_sizes_and_stages(source, ranks, target, to, tmp_path):
    from coat_dist import convert_to_universal

    saved = run_ranks(ranks, train_and_save, CASES[source], str(tmp_path))[0]
    convert_to_universal(tmp_path / "plain", tmp_path / "universal")
    for r in run_ranks(to, load_and_compare, CASES[target], str(tmp_path), saved, "BF16" not in source):
        assert r["problems"] == []
        assert r["linked"] <= {"exp_avg", "exp_avg_sq"}  # of groups with fp32 moments; no fp32 copy of the others
        codes = {f"coat_{m}_{t}" for m in "mv" for t in "qak"}
        assert set(r["keys"]) - {"coat_seed"} == {"exp_avg", "exp_avg_sq", "step"} | codes


def load_refusals(rank, world, settings, folder, files):
    """Messages of loading with each of ``files`` (name: None to remove it, or another to copy) spoilt in turn."""
    import os
    import shutil

    engine = build(settings, universal=True)
    run(engine, rank, 0, 1)
    before, messages = snapshot(engine), []
    for name, other in files.items():
        path = f"{folder}/universal/zero/{name}"
        os.rename(path, f"{path}.aside")
        if other is not None:
            shutil.copy(f"{folder}/universal/zero/{other}", path)
        try:
            engine.load_checkpoint(folder, tag="universal")
        except ValueError as error:
            messages.append(str(error))
        os.rename(f"{path}.aside", path)
    return messages, changes(before, snapshot(engine))


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_a_foreign_universal_checkpoint_changes_nothing(case, tmp_path):
    from coat_dist import convert_to_universal

    run_ranks(1, train_and_save, CASES[case], str(tmp_path))
    convert_to_universal(tmp_path / "plain", tmp_path / "universal")
    spoilt = {"up.bias/exp_avg.pt": None, "up.weight/exp_avg_sq.pt": "down.weight/fp32.pt", "optimizer_state.pt": None}
    ((missing, foreign, no_globals), changed) = run_ranks(1, load_refusals, CASES[case], str(tmp_path), spoilt)[0]
    assert "up.bias/exp_avg.pt: cannot be read" in missing
    assert "up.weight/exp_avg_sq.pt: got shape [61, 129], accepted: one that gives [129, 47] on tensor-" in foreign
    assert "optimizer_state.pt: cannot be read" in no_globals
    assert changed == []


def save_new(rank, world, folder):
    build(CASES["zero-2"]).save_checkpoint(folder, tag="plain")


def test_what_cannot_be_converted_is_refused(tmp_path):
    from coat_dist import convert_to_universal

    with pytest.raises(ValueError, match="no file matches .*accepted: a checkpoint of ZeRO stage 1, 2 or 3"):
        convert_to_universal(tmp_path / "nothing", tmp_path / "out")
    run_ranks(1, save_new, str(tmp_path))
    with pytest.raises(ValueError, match=r"state of .*: got nothing \(saved before the first step\), accepted"):
        convert_to_universal(tmp_path / "plain", tmp_path / "out")
    before = {p: p.read_bytes() for p in (tmp_path / "plain").iterdir()}
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    for target in ("plain", "plain/universal", "used", "used/../plain"):
        with pytest.raises(ValueError, match=f"target: got .*{target}, accepted: an empty or a new folder outside of"):
            convert_to_universal(tmp_path / "plain", tmp_path / target)
    assert {p: p.read_bytes() for p in (tmp_path / "plain").iterdir()} == before
    for kind in ("mp_rank_00_model", "bf16_zero_pp_rank_0_mp_rank_00_optim"):
        file = tmp_path / "plain" / f"{kind}_states.pt"
        (tmp_path / "plain" / file.name.replace("mp_rank_00", "mp_rank_01")).write_bytes(file.read_bytes())
    model = torch.load(tmp_path / "plain" / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save({**model, "mp_world_size": 2}, tmp_path / "plain" / "mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match="2 tensor-parallel ranks and without universal_checkpoint_info, accepted"):
        convert_to_universal(tmp_path / "plain", tmp_path / "out")
    whole = (tmp_path / "plain" / "mp_rank_00_model_states.pt").read_bytes()
    (tmp_path / "plain" / "mp_rank_00_model_states.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="mp_rank_00_model_states.pt: cannot be read"):
        convert_to_universal(tmp_path / "plain", tmp_path / "out")


def loaded_by_deepspeed(rank, world, folder):
    """The first step after DeepSpeed's own loader filled a CoatAdamW that ``coat_dist.initialize`` did not build."""
    from tests.coat_dist.deepspeed.zero_runs import build as build_without

    engine = build_without({**CASES["zero-2"], "checkpoint": {"load_universal": True}})
    engine.load_checkpoint(folder, tag="universal")
    try:
        return run(engine, rank, 5, 6)
    except ValueError as error:
        return str(error)


def test_fp32_moments_that_nobody_encoded_stop_the_first_step(tmp_path):
    from coat_dist import convert_to_universal

    run_ranks(1, train_and_save, CASES["zero-2"], str(tmp_path))
    convert_to_universal(tmp_path / "plain", tmp_path / "universal")
    assert (
        "got exp_avg, exp_avg_sq, step, accepted with moments='fp8'"
        in run_ranks(1, loaded_by_deepspeed, str(tmp_path))[0]
    )
