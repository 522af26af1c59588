"""Universal checkpoints: models that train other parameters, files of DeepSpeed's converter, codes,
and what is not converted. ``tests/contracts/test_resume.py`` has kinds of engines.
"""

import os
from pathlib import Path

import pytest
import torch

from coat_dist import convert_to_universal
from tests.coat_dist.checkpoint.small_saves import build, refused
from tests.coat_dist.checkpoint.universal_runs import WithBuffer, load_and_compare, train_and_save
from tests.coat_dist.deepspeed.zero_runs import CASES, run
from tests.support import run_ranks


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
    (found,) = run_ranks(1, load_and_compare, CASES["zero-2"], str(tmp_path), saved)
    assert set(found) == {"weights frozen.weight", "weights frozen.bias", "weights seen"}


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


def weights(engine):
    """The model's own, whole, and masters in fp32 of what is trained."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(
        list(named.values()), enabled=hasattr(named["scale"], "ds_id")
    ):
        held = {n: p.detach().clone() for n, p in named.items()}
    return held, {
        n: safe_get_full_fp32_param(p).clone() for n, p in named.items() if p.requires_grad
    }


def frozen_now_and_then(rank, world, settings, folder):
    """A universal checkpoint loaded by models that train less, more and other things."""
    engine = build(settings)
    engine.module.amaxes.value, engine.module.counts.value = (
        torch.arange(4.0),
        {"seen": 7, "names": ["a"]},
    )
    engine.module.seen += torch.tensor([1, 2, 3])
    run(engine, rank, 0, 3)
    held, masters = weights(engine)
    engine.save_checkpoint(folder, tag="plain")
    engine.destroy()
    if rank == 0:
        convert_to_universal(f"{folder}/plain", f"{folder}/universal")
    torch.distributed.barrier()
    arguments, wrong = {"load_dir": Path(folder), "tag": "universal"}, []

    engine = build(settings, frozen=("frozen", "up", "norm.weight"), universal=True)
    run(engine, rank, 5, 6)
    engine.load_checkpoint(**arguments)
    got, trained = weights(engine)
    wrong += [f"frozen now: {n}" for n, x in got.items() if not torch.equal(x, held[n])]
    wrong += [
        f"frozen now: {n}"
        for n, x in got.items()
        if n in masters and not torch.equal(x, masters[n].bfloat16())
    ]
    wrong += [
        f"frozen now: master {n}" for n, x in trained.items() if not torch.equal(x, masters[n])
    ]
    wrong += (
        []
        if len(trained) == 4 and torch.equal(engine.module.seen, torch.tensor([1, 2, 3]))
        else ["buffer"]
    )
    wrong += [] if torch.equal(engine.module.amaxes.value, torch.arange(4.0)) else ["amaxes"]
    wrong += [] if engine.module.counts.value == {"seen": 7, "names": ["a"]} else ["counts"]
    wrong += [] if all(0 < x < 10 for x in run(engine, rank, 6, 7)) else ["loss"]
    engine.destroy()

    engine = build(settings, frozen=("nothing",), universal=True)
    run(engine, rank, 5, 6)
    messages = [refused(engine, **arguments)]
    engine.load_checkpoint(**arguments, load_optimizer_states=False)
    got, trained = weights(engine)
    wrong += [f"frozen then: {n}" for n, x in got.items() if not torch.equal(x, held[n])]
    masters |= {n: x.float() for n, x in held.items() if n not in masters}
    wrong += [
        f"frozen then: master {n}" for n, x in trained.items() if not torch.equal(x, masters[n])
    ]
    wrong += [] if len(trained) == len(held) else ["frozen then: not all are trained"]
    engine.destroy()
    return wrong, messages


@pytest.mark.parametrize("case", ["zero-1", "zero-1, BF16_Optimizer", "zero-3"])
def test_what_was_trained_and_is_frozen_and_the_other_way_round(case, tmp_path):
    for wrong, (message,) in run_ranks(2, frozen_now_and_then, CASES[case], str(tmp_path)):
        assert wrong == []
        assert "frozen.weight, frozen.bias had no moments when this was saved" in message or (
            "frozen." in message
            and "load_optimizer_states=False, which loads weights alone" in message
        )


class Fewer(WithBuffer):
    """Without extra states, and with a buffer that was not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("newer", torch.ones(2))
        self.amaxes = self.counts = None


def other_names(rank, world, settings, folder):
    """A model without two modules of the checkpoint, and with a buffer that it does not have."""
    engine = build(settings)
    run(engine, rank, 0, 2)
    engine.save_checkpoint(folder, tag="plain")
    if rank == 0:
        convert_to_universal(f"{folder}/plain", f"{folder}/universal")
    engine.destroy()
    engine = build(settings, model=Fewer, universal=True)
    run(engine, rank, 5, 6)
    said = refused(engine, load_dir=folder, tag="universal")
    engine.load_checkpoint(folder, tag="universal", load_module_strict=False)
    return said, engine.global_steps


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_names_of_another_model_are_refused_unless_load_module_strict_is_false(case, tmp_path):
    for said, steps in run_ranks(2, other_names, CASES[case], str(tmp_path)):
        assert "got amaxes._extra_state, counts._extra_state" in said
        assert "missing newer, accepted: " in said and "load_module_strict" in said
        assert steps == 2


def test_a_tensor_parallel_ranks_part_of_what_was_frozen(tmp_path):
    """Gate and up of a frozen gated MLP, joined by [gate; gate; up; up] of two ranks; extra
    states of each rank.
    """
    from coat_dist.checkpoint.universal.folder import UniversalFolder

    zero = tmp_path / "zero"
    zero.mkdir()
    torch.save({}, zero / "optimizer_state.pt")
    entry = {"param": torch.arange(8.0).view(8, 1), "cat_dim": 0, "param_n_sub_params": 2}
    torch.save({"fc1.weight": entry}, zero / "rest.pt")
    torch.save(
        {"a._extra_state": [{"x": 1}, {"x": 2}], "b._extra_state": [3, 3]}, zero / "extra_state.pt"
    )
    for rank, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        source = UniversalFolder(tmp_path, (rank, 2))
        assert source.part("fc1.weight", torch.Size([4, 1])).flatten().tolist() == rows
        assert source.extra_state("a._extra_state") == {"x": rank + 1}
    one = UniversalFolder(tmp_path, (0, 1))
    assert one.extra_state("b._extra_state") == 3
    with pytest.raises(
        ValueError, match="a._extra_state: got one for each of 2 tensor-parallel ranks, accepted"
    ):
        one.extra_state("a._extra_state")
