"""``python program.py``: this process is the only rank; and what launchers set is left alone."""

import os

import pytest
import torch

from coat_dist.deepspeed import engine, without_launcher

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    *without_launcher._OF_OTHERS,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(without_launcher, "find_spec", lambda name: None)


def test_prepare_makes_a_lone_process_the_only_rank(capsys):
    without_launcher.prepare()
    assert [os.environ[name] for name in NAMES[:4]] == ["0", "1", "0", "127.0.0.1"]
    assert int(os.environ["MASTER_PORT"]) > 0
    assert capsys.readouterr().err.startswith(
        "note: started without a launcher, so this process is the only rank"
    )


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "SLURM_NTASKS"])
def test_prepare_under_a_launcher_changes_nothing(name, monkeypatch, capsys):
    monkeypatch.setenv(name, "4")
    without_launcher.prepare()
    assert {n: os.environ[n] for n in NAMES if n in os.environ} == {
        name: "4"
    } and not capsys.readouterr().err


def test_prepare_of_a_baseline_is_the_same(monkeypatch):
    """A BF16 baseline is started as the run that it is compared with."""
    deepspeed = pytest.importorskip("deepspeed")
    seen = {}

    def start(model=None, config=None):
        seen.update({name: os.environ.get(name) for name in NAMES[:4]})
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "original", lambda: start)
    # Left to DeepSpeed, as this is the only rank.
    monkeypatch.setattr(deepspeed, "init_distributed", None)
    with pytest.raises(KeyboardInterrupt):
        engine.called_as_deepspeed(
            (torch.nn.Linear(4, 4),), {"config": {"optimizer": {"type": "AdamW"}}}
        )
    assert [*seen.values()] == ["0", "1", "0", "127.0.0.1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_prepare_leaves_out_the_compiled_operation():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = True
    without_launcher.prepare()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
