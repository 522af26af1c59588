"""A run that goes on from a universal checkpoint has the learning rate that it had, whatever its
groups are.
"""

import pytest
import torch

from coat_dist import convert_to_universal
from tests.coat_dist.checkpoint.small_saves import told
from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed, train
from tests.support import run_ranks

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 100}}


def engine_of(optimizer, schedule=None, universal=False, stage=2):
    """A DeepSpeed program's: torch's AdamW has one group, a CoatAdamW has two."""
    deepspeed = quiet_deepspeed()
    config = {**CONFIG, "optimizer": {"type": optimizer, "params": {"lr": 3e-3}}}
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config["checkpoint"] = {"load_universal": universal}
    if optimizer == "AdamW":
        config.pop("coat")
        config["optimizer"]["params"]["torch_adam"] = True
    if schedule == "WarmupLR":
        config["scheduler"] = WARMUP
    given = {"lr_scheduler": schedule} if callable(schedule) else {}
    return deepspeed.initialize(model=model(), config=config, **given)[0]


def falling(optimizer):
    """The next rate is made of the last one."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def schedules_go_on(rank, world, folder):
    import coat_dist  # noqa: F401

    seen = {}
    for name, schedule in {"WarmupLR": "WarmupLR", "falling": falling}.items():
        engine = engine_of("AdamW", schedule)
        train(engine, rank, 3)
        engine.save_checkpoint(f"{folder}/{name}", tag="plain")
        convert_to_universal(f"{folder}/{name}/plain", f"{folder}/{name}/universal")
        train(engine, rank, 1)
        wanted = engine.get_lr()
        engine = engine_of("CoatAdamW", schedule, True)
        engine.load_checkpoint(f"{folder}/{name}", tag="universal")
        first = engine.get_lr()
        train(engine, rank, 1)
        seen[name] = first, engine.get_lr(), wanted
    said = []
    for case in ("no schedule then", "another kind"):
        here = engine_of("CoatAdamW", falling, True)
        engine = engine_of("AdamW", None if case == "no schedule then" else "WarmupLR")
        train(engine, rank, 1)
        engine.save_checkpoint(f"{folder}/{case}", tag="plain")
        convert_to_universal(f"{folder}/{case}/plain", f"{folder}/{case}/universal")
        before = here.module.state_dict()["0.weight"].clone()
        said.append(told(here.load_checkpoint, f"{folder}/{case}", tag="universal"))
        assert torch.equal(before, here.module.state_dict()["0.weight"]), "nothing was changed"
        here.load_checkpoint(f"{folder}/{case}", tag="universal", load_lr_scheduler_states=False)
    return seen, said


def test_the_rate_is_the_schedules(tmp_path):
    ((seen, said),) = run_ranks(1, schedules_go_on, str(tmp_path))
    for name, (_, later, wanted) in seen.items():
        assert len(set(later)) == 1 and later[0] == pytest.approx(wanted[0]), name
        assert len(later) == 2 and len(wanted) == 1
    assert seen["falling"][0] == [3e-3 / 8] * 2
    assert all("scheduler: got ExponentialLR, accepted: the schedule that" in line for line in said)


def left_in(rank, world, folder):
    """``load_universal`` stays in the configuration of a run that saves where it was loaded
    from, or elsewhere.
    """
    from pathlib import Path

    from launch.to_universal import convert

    engine = engine_of("AdamW")
    train(engine, rank, 1)
    engine.save_checkpoint(f"{folder}/old")
    convert(Path(folder, "old", "global_step1"), Path(folder, "new"))
    engine = engine_of("CoatAdamW", universal=True)
    engine.load_checkpoint(f"{folder}/new")
    engine.load_checkpoint(f"{folder}/new")  # nothing was saved beside it
    train(engine, rank, 1)
    engine.save_checkpoint(f"{folder}/new")
    engine.save_checkpoint(f"{folder}/elsewhere")
    lines = [
        told(engine.load_checkpoint, f"{folder}/{name}") for name in ("new", "elsewhere", "nothing")
    ]
    engine.load_checkpoint(f"{folder}/new", tag="global_step1")
    assert engine.global_steps == 1
    return lines


def test_load_universal_that_was_left_in_loses_no_steps(tmp_path):
    ((beside, elsewhere, nothing),) = run_ranks(1, left_in, str(tmp_path))
    assert (
        "new/global_step1 of step 1, but global_step2 of step 2 is there too; accepted: false"
        in beside
    )
    for line in (elsewhere, nothing):
        assert (
            "checkpoint.load_universal: got true, accepted: false, or a folder with "
            "latest_universal" in line
        )
