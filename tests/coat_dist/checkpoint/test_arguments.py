"""Arguments that DeepSpeed would misread: one error on all ranks, before anything is written or
loaded.
"""

import inspect
import os
from pathlib import Path

import pytest
import torch

from tests.coat_dist.checkpoint.small_saves import build, listed, on_rank_0, small, step, told
from tests.coat_dist.deepspeed.zero_runs import CASES, run
from tests.support import run_ranks


def handed_back(rank, world, folder):
    """What loading returned goes into the next save, as in DeepSpeed's tutorial; the engine has
    gone on meanwhile.
    """
    from coat_dist.checkpoint.save import _DEEPSPEED_KEYS

    wrong = []
    bf16 = {"bf16": {"enabled": True}}
    for stage in (0, 1, 2, 3):
        where = f"{folder}/{stage}"
        config = {**bf16, "zero_optimization": {"stage": stage}} if stage else {}
        engine = small(config)
        step(engine)
        engine.save_checkpoint(where, client_state={"mine": 1})
        file = next(Path(where).glob("*/*model_states.pt"))
        wrong += [
            f"{stage}: {key}"
            for key in torch.load(file, weights_only=False).keys() - _DEEPSPEED_KEYS - {"mine"}
        ]
        for flags in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
            _, state = engine.load_checkpoint(where, **flags)
            step(engine)
            steps, samples = engine.global_steps, engine.global_samples
            engine.save_checkpoint(f"{where}-again", tag="x", client_state={**state, "mine": 2})
            _, state = engine.load_checkpoint(f"{where}-again")
            found = engine.global_steps, engine.global_samples, state["mine"]
            wrong += (
                []
                if found == (steps, samples, 2)
                else [f"{stage}, {flags}: {found}, not {(steps, samples)}"]
            )
    return wrong


def test_what_loading_returned_may_be_saved_again(tmp_path):
    """And all keys that DeepSpeed writes are known."""
    assert run_ranks(1, handed_back, str(tmp_path)) == [[]]


def arguments(rank, world, folder):
    """DeepSpeed's arguments and defaults; what they write; tags; two ranks."""
    engine, said = build(CASES["zero-2"]), {}
    run(engine, rank, 0, 1)
    original = type(engine).save_checkpoint
    same = inspect.signature(engine.save_checkpoint) == inspect.signature(original.__get__(engine))
    assert engine.save_checkpoint(folder) is True
    assert (
        listed(folder) == ["global_step1", "latest"]
        and Path(folder, "latest").read_text() == "global_step1"
    )
    state = {"universal_checkpoint_info": {"a": 1}, "x": 2}  # as Megatron-DeepSpeed passes it
    engine.save_checkpoint(folder, 7, state, False)
    assert state.items() <= engine.load_checkpoint(folder, 7)[1].items()
    for tag in ("", ".", "..", "/tmp/x", "a/b", "latest", ".lock", ".unfinished-a", " a", "a\n"):
        said[tag] = told(engine.save_checkpoint, folder, tag=tag)
    said["ranks"] = told(engine.save_checkpoint, folder, tag=f"rank{rank}")
    said["flags"] = told(engine.save_checkpoint, folder, save_latest=rank == 0)
    said["keys"] = told(
        engine.save_checkpoint, folder, client_state={"x": 1, "lr_scheduler": None} if rank else {}
    )
    said["list"] = told(engine.save_checkpoint, folder, client_state=[1])
    said["pickle"] = told(
        engine.save_checkpoint, folder, client_state={"f": (lambda: 0) if rank == 0 else 1}
    )
    said["file"] = told(engine.save_checkpoint, __file__)
    said["load"] = told(engine.load_checkpoint, folder, "")
    torch.distributed.barrier()
    return same, said, listed(folder)


def test_arguments_are_deepspeeds(tmp_path):
    first, second = run_ranks(2, arguments, str(tmp_path / "save"))
    assert first == second
    same, said, left = first
    assert same and left == ["7", "global_step1", "latest"]
    special = {"ranks", "flags", "keys", "list", "pickle", "file", "load"}
    start = "CheckpointError: tag: got {!r}, accepted: "
    assert all(
        text.startswith(start.format(tag)) and text.count("tag: got") == 1
        for tag, text in said.items()
        if tag not in special
    )
    assert (
        "tag: got 'rank0' on rank 0, 'rank1' on rank 1, accepted: the same on all ranks"
        in said["ranks"]
    )
    assert (
        "save_latest: got True on rank 0, False on rank 1, accepted: the same on all ranks"
        in said["flags"]
    )
    assert said["keys"].startswith(
        "CheckpointError: client_state: got keys lr_scheduler, which DeepSpeed writes itself"
    )
    assert said["list"].startswith("CheckpointError: AttributeError")
    assert "rank 0: " in said["pickle"] and "mp_rank_00_model_states.pt" in said["pickle"]
    assert f"cannot write {__file__}" in said["file"]
    assert said["load"].startswith("CheckpointError: tag: got '', which is not the name of")


def loading(rank, world, folder):
    engine, said = build(CASES["zero-2"]), {}
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="a")
    engine.save_checkpoint(f"{folder}/b", tag="c", save_latest=False)
    for name, more in {
        "itself": {"load_dir": f"{folder}/a"},
        "inner": {"load_dir": f"{folder}/b/c/"},
        "outer": {"load_dir": folder, "tag": "b"},
        "a file": {"load_dir": f"{folder}/latest"},
        "nothing": {"load_dir": None if rank else folder},
        "different": {"load_dir": folder, "load_optimizer_states": rank == 0},
    }.items():
        said[name] = told(engine.load_checkpoint, **more)
    on_rank_0(rank, lambda: (os.remove(f"{folder}/a/manifest.json"), os.mkdir(f"{folder}/empty")))
    said["plain"] = told(engine.load_checkpoint, f"{folder}/a")  # plain DeepSpeed's
    nothing = [engine.load_checkpoint(f"{folder}/{name}") for name in ("empty", "missing")]
    return said, nothing, engine.load_checkpoint(f"{folder}/b", tag="c")[0] is not None


def test_what_holds_no_checkpoints_is_not_taken_for_a_new_run(tmp_path):
    first, second = run_ranks(2, loading, str(tmp_path))
    assert first == second
    said, nothing, of_a_folder_in_it = first
    assert nothing == [(None, None)] * 2 and of_a_folder_in_it
    for name, given, where, tag in [
        ("itself", f"{tmp_path}/a", str(tmp_path), "a"),
        ("inner", f"{tmp_path}/b/c", f"{tmp_path}/b", "c"),
        ("plain", f"{tmp_path}/a", str(tmp_path), "a"),
    ]:
        call = f"load_checkpoint({where!r}, tag={tag!r})"
        assert (
            said[name]
            == f"CheckpointError: load_dir: got {given}, which is a checkpoint itself; accepted: "
            f"{call}"
        )
    for name, text in {
        "a file": f"load_dir: got {tmp_path}/latest, which is a file; accepted: a folder that "
        "holds checkpoints",
        "outer": f"tag: got 'b', which is no checkpoint in {tmp_path}, accepted: a",
        "nothing": "TypeError: ",
        "different": "load_optimizer_states: got True on rank 0, False on rank 1, accepted: the "
        "same on",
    }.items():
        assert str(said[name]).startswith(f"CheckpointError: {text}"), said[name]


def weights_of_another_tag(rank, world, folder):
    engine = build(CASES["zero-3"])
    for tag in ("a", "b"):
        engine.save_checkpoint(folder, tag=tag)
    return told(engine.load_checkpoint, folder, tag="a", load_optimizer_states=False)


def test_weights_alone_at_stage_3_are_those_of_latest(tmp_path):
    for said in run_ranks(2, weights_of_another_tag, str(tmp_path)):
        assert said.startswith(
            "CheckpointError: load_optimizer_states: got False with tag 'a' and "
            f"zero_optimization.stage 3, where DeepSpeed reads what {tmp_path}/latest names, 'b'; "
        )


class Sized(torch.nn.Sequential):
    def __init__(self, width, layers, frozen):
        super().__init__(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self[0].requires_grad_(not frozen)


def other_models(rank, world, folder, stage):
    """A checkpoint of two layers before models of other sizes, and before one in which a layer
    is frozen.
    """

    def engine(width=64, layers=2, frozen=False):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        return small(config, Sized(width, layers, frozen))

    engine().save_checkpoint(folder, tag="a")
    others = {
        "wide": {"width": 128},
        "more": {"layers": 3},
        "fewer": {"layers": 1},
        "frozen": {"frozen": True},
    }
    return {name: told(engine(**other).load_checkpoint, folder) for name, other in others.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_of_another_model_are_named(stage, tmp_path):
    first, second = run_ranks(2, other_models, str(tmp_path), stage)
    assert first.keys() == second.keys()
    for said in (first, second):
        start = f"DoesNotFit: {tmp_path}/a: model: "
        small, wide = "[64, 64]", "[128, 128]"
        assert all("convert_to_universal" in text for text in said.values())
        for name, text in {
            "wide": f"0.weight: checkpoint has {small}, this run has {wide}\n",
            "more": f"2.weight: checkpoint has nothing, this run has {small}\n",
            "fewer": f"1.weight: checkpoint has {small}, this run has nothing\n",
            "frozen": f"0.weight: checkpoint has {small}, this run has nothing\n",
        }.items():
            assert said[name].startswith(start + text), said[name]
