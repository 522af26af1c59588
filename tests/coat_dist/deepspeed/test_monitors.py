"""DeepSpeed's monitors, timers and profiler on an engine with CoatAdamW: they work, and change no loss.

``test_profilers.py`` has the profilers over a patched model.
"""

import importlib
import sys
import types

import pytest

from coat_dist.config import CoatConfigError
from coat_dist.deepspeed.config.agreement import make_folders
from coat_dist.deepspeed.config.validate import check_deepspeed
from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed, train
from tests.support import run_ranks


def everything_on(folder):
    to = {"enabled": True, "output_path": f"{folder}/here"}
    return {
        "tensorboard": {**to, "job_name": "board"},
        "csv_monitor": {**to, "job_name": "csv"},
        "wandb": {"enabled": True, "project": "p"},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": f"{folder}/flops.txt"},
        "steps_per_print": 1,
    }


def watched(rank, world, folder):
    quiet_deepspeed()
    import coat_dist

    wandb, logged = types.ModuleType("wandb"), []  # stands for the package, which is not installed here
    wandb.init = lambda **kwargs: logged.append(kwargs)
    wandb.log = lambda data, step=None, commit=None: logged.append(data)
    sys.modules["wandb"] = wandb
    losses = [
        train(coat_dist.initialize(model=model(), config={**CONFIG, **more})[0], rank, 3)
        for more in ({}, everything_on(folder))
    ]
    refused = []
    for key in ("tensorboard", "csv_monitor"):
        with pytest.raises(CoatConfigError) as error:
            more = {key: {"enabled": True, "output_path": f"{folder}/a file", "job_name": "x"}}
            coat_dist.initialize(model=model(), config={**CONFIG, **more})
        refused.append(str(error.value))
    return losses, len(logged), refused


def test_monitors_write_and_change_nothing(tmp_path):
    (tmp_path / "a file").touch()
    results = run_ranks(2, watched, tmp_path)
    for losses, _, refused in results:
        assert losses[0] == losses[1]
        for key, message in zip(("tensorboard", "csv_monitor"), refused, strict=True):
            assert message.startswith(f"{key}.output_path: cannot write {tmp_path}/a file/x (")
    assert [logged > 1 for _, logged, _ in results] == [True, False], "wandb on rank 0 alone"
    assert list(tmp_path.glob("here/board/events.out.tfevents.*"))
    assert (tmp_path / "here" / "csv" / "Train_Samples_lr.csv").read_text().count("\n") >= 3
    assert "Profile Summary at step" in (tmp_path / "flops.txt").read_text()


def refused(config):
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed({**CONFIG, **config})
    return [problem.key for problem in error.value.problems]


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused({key: {"enabled": True} for key in ("wandb", "comet", "csv_monitor")}) == [
        "wandb.enabled",
        "comet.enabled",
    ]
    check_deepspeed({**CONFIG, "wandb": {"enabled": False}, "tensorboard": {}})
    make_folders({"tensorboard": {"enabled": False, "output_path": "/proc/nowhere"}})


def test_a_folder_of_runs_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "comet_ml" / "run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert refused({"comet": {"enabled": True}}) == ["comet.enabled"]
        importlib.import_module("comet_ml")  # the folder, which is in sys.modules then
    monkeypatch.delitem(sys.modules, "comet_ml")
