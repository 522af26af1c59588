"""Arguments that DeepSpeed would misread: one error on all ranks, before anything is written or loaded."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import torch

from coat_dist.checkpoint.save import Extras
from tests.coat_dist.checkpoint.small_saves import small, step
from tests.coat_dist.checkpoint.test_loading import build
from tests.coat_dist.checkpoint.test_whole import told
from tests.coat_dist.deepspeed.zero_runs import CASES, run
from tests.support import run_ranks

ITSELF = "which DeepSpeed writes itself; accepted: other names"
SAVING = {
    "several": (
        {"client_state": {"mine": 1, "lr_scheduler": None, "global_steps": 9}},
        f"client_state: got keys global_steps, lr_scheduler, {ITSELF}",
    ),
    "not a dict": ({"client_state": [1]}, "AttributeError"),
    "latest": ({"save_latest": False}, "save_latest: got True on rank 0; False on rank 1, accepted: the same on"),
    "tag": ({"tag": "x"}, "tag: got 'global_step1' on rank 0; 'x' on rank 1, accepted: the same on all ranks"),
}


def saving(rank, world, folder):
    """Each wrong argument on rank 1 alone."""
    engine = build(CASES["zero-2"])
    run(engine, rank, 0, 1)
    said = {
        name: told(engine.save_checkpoint, folder, **(wrong if rank else {})) for name, (wrong, _) in SAVING.items()
    }
    untouched = not os.path.exists(folder)
    state = {"universal_checkpoint_info": {"a": 1}, "epoch": 2}  # as Megatron-DeepSpeed passes it
    engine.save_checkpoint(folder, client_state=state, save_latest=1, extras=Extras(keep_last=0))
    return said, untouched, {k: v for k, v in engine.load_checkpoint(folder)[1].items() if k in state} == state


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    for said, untouched, allowed in run_ranks(2, saving, str(tmp_path / "save")):
        for name, (_, text) in SAVING.items():
            assert str(said[name]).startswith(f"CheckpointError: {text}"), said[name]
        assert untouched and allowed


def handed_back(rank, world, folder):
    """What loading returned goes into the next save, as in DeepSpeed's tutorial; the engine has gone on meanwhile."""
    from coat_dist.checkpoint.save import _DEEPSPEEDS

    wrong = []
    bf16 = {"bf16": {"enabled": True}}
    for stage in (0, 1, 2, 3):
        where = f"{folder}/{stage}"
        config = {**bf16, "zero_optimization": {"stage": stage}} if stage else {}
        engine = small(config)
        step(engine)
        engine.save_checkpoint(where, client_state={"mine": 1})
        file = next(Path(where).glob("*/*model_states.pt"))
        wrong += [f"{stage}: {key}" for key in torch.load(file, weights_only=False).keys() - _DEEPSPEEDS - {"mine"}]
        for flags in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
            _, state = engine.load_checkpoint(where, **flags)
            step(engine)
            steps, samples = engine.global_steps, engine.global_samples
            engine.save_checkpoint(f"{where}-again", tag="x", client_state={**state, "mine": 2})
            _, state = engine.load_checkpoint(f"{where}-again")
            found = engine.global_steps, engine.global_samples, state["mine"]
            wrong += [] if found == (steps, samples, 2) else [f"{stage}, {flags}: {found}, not {(steps, samples)}"]
    return wrong


def test_what_loading_returned_may_be_saved_again(tmp_path):
    """And all keys that DeepSpeed writes are known."""
    assert run_ranks(1, handed_back, str(tmp_path)) == [[]]


def loading(rank, world, folder):
    engine, said = build(CASES["zero-2"]), {}
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="a")
    engine.save_checkpoint(f"{folder}/b", tag="c", save_latest=False)
    for name, more in {
        "itself": {"load_dir": f"{folder}/a"},
        "and by tag": {"load_dir": Path(folder, "a"), "tag": "a"},
        "inner": {"load_dir": f"{folder}/b/c/"},
        "outer": {"load_dir": folder, "tag": "b"},
        "a file": {"load_dir": f"{folder}/latest"},
        "nothing": {"load_dir": None if rank else folder},
        "different": {"load_dir": folder, "load_optimizer_states": rank == 0},
    }.items():
        said[name] = told(engine.load_checkpoint, **more)
    with contextlib.chdir(f"{folder}/a"):
        said["here"] = told(engine.load_checkpoint, ".")
    torch.distributed.barrier()
    if rank == 0:
        os.remove(f"{folder}/a/manifest.json")  # as of plain DeepSpeed
        shutil.copytree(f"{folder}/a", f"{folder}/.unfinished-d")
        os.mkdir(f"{folder}/empty")
    torch.distributed.barrier()
    said["plain"] = told(engine.load_checkpoint, f"{folder}/a")
    said["unfinished"] = told(engine.load_checkpoint, f"{folder}/.unfinished-d")
    nothing = [engine.load_checkpoint(f"{folder}/{name}") for name in ("empty", "missing")]
    return said, nothing, engine.load_checkpoint(f"{folder}/b", tag="c")[0] is not None


def test_what_holds_no_checkpoints_is_not_taken_for_a_new_run(tmp_path):
    first, second = run_ranks(2, loading, str(tmp_path))
    assert first == second
    said, nothing, of_a_folder_in_it = first
    assert nothing == [(None, None)] * 2 and of_a_folder_in_it
    itself = (
        "CheckpointError: load_dir: got {}, which is a checkpoint itself; accepted: load_checkpoint({!r}, tag={!r})"
    )
    for name, given, where, tag in [
        ("itself", f"{tmp_path}/a", str(tmp_path), "a"),
        ("and by tag", f"{tmp_path}/a", str(tmp_path), "a"),
        ("inner", f"{tmp_path}/b/c", f"{tmp_path}/b", "c"),
        ("here", ".", str(tmp_path), "a"),
        ("plain", f"{tmp_path}/a", str(tmp_path), "a"),
    ]:
        assert said[name] == itself.format(given, where, tag)
    for name, text in {
        "a file": f"load_dir: got {tmp_path}/latest, which is a file; accepted: a folder that holds checkpoints",
        "outer": f"tag: got 'b', which is no checkpoint in {tmp_path}, accepted: a",
        "unfinished": f"load_dir: got {tmp_path}/.unfinished-d, which is a checkpoint itself; accepted: ",
        "nothing": "TypeError: ",
        "different": "load_optimizer_states: got True on rank 0; False on rank 1, accepted: the same on",
    }.items():
        assert str(said[name]).startswith(f"CheckpointError: {text}"), said[name]


class Sized(torch.nn.Sequential):
    def __init__(self, width, layers, frozen):
        super().__init__(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self[0].requires_grad_(not frozen)


def other_models(rank, world, folder, stage):
    """A checkpoint of two layers before models of other sizes, and before one in which a layer is frozen."""
    import coat_dist
    from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed

    quiet_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }

    def engine(width=64, layers=2, frozen=False):
        return coat_dist.initialize(model=Sized(width, layers, frozen), config=config)[0]

    engine().save_checkpoint(folder, tag="a")
    others = {"wide": {"width": 128}, "more": {"layers": 3}, "fewer": {"layers": 1}, "frozen": {"frozen": True}}
    return {name: told(engine(**other).load_checkpoint, folder) for name, other in others.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_model_is_told_from_another_layout(stage, tmp_path):
    first, second = run_ranks(2, other_models, str(tmp_path), stage)
    assert first.keys() == second.keys()
    for said in (first, second):
        start = f"DoesNotFit: {tmp_path}/a: model: "
        small, wide = "[64, 64]", "[128, 128]"
        for name, text in {
            "wide": f"0.weight (and 3 more): checkpoint has {small}, this run has {wide}\n",
            "more": f"2.weight (and 1 more): checkpoint has nothing, this run has {small}\n",
            "fewer": f"1.weight (and 1 more): checkpoint has {small}, this run has nothing\n",
        }.items():
            assert said[name].startswith(start + text), said[name]
            assert "convert" not in said[name] and said[name].endswith("or the model that wrote it")
        assert "or other groups or frozen parameters: " in said["frozen"] and "convert_to_universal" in said["frozen"]
