"""Universal checkpoints: BF16_Optimizer and sub-groups (``test_matrix.py`` has the rest), and
what is not converted.
"""

import os

import pytest
import torch

from coat_dist import convert_to_universal
from coat_dist.optim import CoatAdamW
from tests.coat_dist.checkpoint.universal_runs import build, load_and_compare, train_and_save
from tests.coat_dist.deepspeed.zero_runs import CASES
from tests.support import run_ranks


@pytest.mark.parametrize(
    ("source", "ranks", "target", "to"),
    [
        ("zero-3, sub-groups", 2, "zero-3", 1),
        ("zero-3", 2, "zero-1, BF16_Optimizer", 2),
        ("zero-1, BF16_Optimizer", 2, "zero-2", 1),
    ],
)
def test_other_optimizers_of_deepspeed_and_sub_groups(source, ranks, target, to, tmp_path):
    saved = run_ranks(ranks, train_and_save, CASES[source], str(tmp_path))[0]
    convert_to_universal(tmp_path / "plain", tmp_path / "universal")
    for r in run_ranks(
        to, load_and_compare, CASES[target], str(tmp_path), saved, "BF16" not in source
    ):
        assert r["problems"] == []
        # Of groups with fp32 moments; no fp32 copy of the others.
        assert r["linked"] <= {"exp_avg", "exp_avg_sq"}
        codes = {f"coat_{m}_{t}" for m in "mv" for t in "qak"}
        assert set(r["keys"]) - {"coat_seed"} == {"exp_avg", "exp_avg_sq", "step"} | codes


def test_what_deepspeeds_converter_writes_loads(tmp_path):
    """Trained parameters alone, without codes; flat where ZeRO-3 had them."""
    saved = run_ranks(2, train_and_save, CASES["zero-3"], str(tmp_path))[0]
    convert_to_universal(tmp_path / "plain", tmp_path / "universal")
    (tmp_path / "universal/zero/rest.pt").unlink()
    for path in (tmp_path / "universal/zero").glob("*/*"):
        if path.suffix == ".coat":
            path.unlink()
        elif path.stem in ("fp32", "exp_avg", "exp_avg_sq"):
            held = torch.load(path)
            torch.save({**held, "param": held["param"].flatten()}, path)
    (r,) = run_ranks(1, load_and_compare, CASES["zero-2"], str(tmp_path), saved, True)
    assert set(r["problems"]) == {"weights frozen.weight", "weights frozen.bias", "weights seen"}


def save_new(rank, world, folder):
    build(CASES["zero-2"]).save_checkpoint(folder, tag="plain")


def test_what_cannot_be_converted_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="no file matches .*accepted: a checkpoint of ZeRO stage 1, 2 or 3"
    ):
        convert_to_universal(tmp_path / "nothing", tmp_path / "out")
    run_ranks(1, save_new, str(tmp_path))
    with pytest.raises(
        ValueError, match=r"state of .*: got nothing \(saved before the first step\), accepted"
    ):
        convert_to_universal(tmp_path / "plain", tmp_path / "out")
    before = {p: p.read_bytes() for p in (tmp_path / "plain").iterdir()}
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    for target in ("plain/universal", "used"):
        with pytest.raises(
            ValueError,
            match=f"target: got .*{target}, accepted: an empty or a new folder outside of",
        ):
            convert_to_universal(tmp_path / "plain", tmp_path / target)
    assert {p: p.read_bytes() for p in (tmp_path / "plain").iterdir()} == before
    model = tmp_path / "plain" / "mp_rank_00_model_states.pt"
    os.truncate(model, model.stat().st_size // 2)
    with pytest.raises(ValueError, match="mp_rank_00_model_states.pt: cannot be read"):
        convert_to_universal(tmp_path / "plain", tmp_path / "out")


def test_fp32_moments_stop_the_first_step():
    """As DeepSpeed's own loader would fill a CoatAdamW with."""
    p = torch.nn.Parameter(torch.zeros(256))
    optimizer = CoatAdamW([p])
    optimizer.state[p] = {"step": 1, "exp_avg": torch.zeros(256), "exp_avg_sq": torch.zeros(256)}
    p.grad = torch.ones(256)
    with pytest.raises(
        ValueError, match="got exp_avg, exp_avg_sq, step, accepted with moments='fp8'"
    ):
        optimizer.step()
