"""Ranks from SLURM's variables."""

import os

import pytest

from coat_dist import CoatConfigError
from coat_dist.deepspeed import without_launcher as slurm

SET = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
TASK = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "login,gpu[07-08,11]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.fixture
def task(monkeypatch):
    """The environment of task 5, changed: None takes a variable out."""
    for name in [*SET, *(n for n in os.environ if n.startswith(("SLURM_", "OMPI_")))]:
        monkeypatch.delenv(name, raising=False)

    def change(**changes):
        for name, value in {**TASK, **changes}.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
                name, value
            )

    return change


def now():
    return {name: os.environ[name] for name in SET if name in os.environ}


def test_take_ranks_makes_a_task_a_rank(task):
    task()
    assert slurm.take_ranks()
    assert now() == {
        **{
            "RANK": "5",
            "WORLD_SIZE": "7",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "3",
            "LOCAL_SIZE": "3",
        },
        **{"MASTER_ADDR": "gpu07", "MASTER_PORT": str(20_000 + 70124 % 12_000)},
    }


@pytest.mark.parametrize(
    "hosts, first",
    [
        ("a", "a"),
        ("node[3,5-9]", "node3"),
        ("rack[1-2]n[04-08]-ib,other", "rack1n04-ib"),
        ("host-1.site,host-2.site", "host-1.site"),
    ],
)
def test_take_ranks_makes_the_first_host_the_master(task, hosts, first):
    task(SLURM_STEP_NODELIST=None, SLURM_JOB_NODELIST=hosts)
    slurm.take_ranks()
    assert os.environ["MASTER_ADDR"] == first


def test_take_ranks_keeps_a_given_address(task):
    task(
        MASTER_ADDR="10.0.0.9", MASTER_PORT="4711", SLURM_JOB_NODELIST="[", SLURM_STEP_NODELIST=None
    )
    slurm.take_ranks()
    assert os.environ["MASTER_ADDR"] == "10.0.0.9" and os.environ["MASTER_PORT"] == "4711"


@pytest.mark.parametrize(
    "names", [{"RANK": "2"}, {"SLURM_PROCID": None}, {"OMPI_COMM_WORLD_SIZE": "4"}]
)
def test_take_ranks_under_a_launcher_changes_nothing(task, names):
    task(**names)
    before = now()
    assert not slurm.take_ranks() and now() == before


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        # A batch script's own process, which would wait for others.
        ({"SLURM_STEP_ID": None}, "SLURM_STEP_ID"),
        ({"SLURM_JOB_NODELIST": None, "SLURM_STEP_NODELIST": None}, "MASTER_ADDR"),
        ({"SLURM_STEP_NODELIST": "node[a-b]"}, "MASTER_ADDR"),
    ],
)
def test_take_ranks_names_what_is_missing(task, changes, name):
    task(**changes)
    before = now()
    with pytest.raises(CoatConfigError, match=f"^{name}: "):
        slurm.take_ranks()
    assert now() == before, "nothing is set by halves"
