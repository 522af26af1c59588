"""Ranks that ``srun`` numbers, and what its variables lack or contradict."""

import os

import pytest

from coat_dist import CoatConfigError
from coat_dist.deepspeed import without_launcher
from coat_dist.deepspeed.build import slurm

SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    return change


def now():
    return {name: os.environ[name] for name in SET if name in os.environ}


def test_a_task_becomes_a_rank(task):
    task()
    assert slurm.take_ranks()
    assert now() == {
        **{"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "LOCAL_SIZE": "3"},
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
def test_the_first_host_is_the_master(task, hosts, first):
    task(SLURM_STEP_NODELIST=None, SLURM_JOB_NODELIST=hosts)
    slurm.take_ranks()
    assert os.environ["MASTER_ADDR"] == first


def test_what_is_given_stays(task):
    lists = {"SLURM_JOB_NODELIST": "[", "SLURM_STEP_NODELIST": None}  # not needed then
    task(MASTER_ADDR="10.0.0.9", MASTER_PORT="4711", WORLD_SIZE="7", LOCAL_RANK="1", **lists)
    slurm.take_ranks()
    assert os.environ["MASTER_ADDR"] == "10.0.0.9" and os.environ["MASTER_PORT"] == "4711"


@pytest.mark.parametrize("names", [{"RANK": "2"}, {"SLURM_PROCID": None}, {"OMPI_COMM_WORLD_SIZE": "4"}])
def test_launchers_are_believed(task, names):
    task(**names)
    before = now()
    assert not slurm.take_ranks() and now() == before


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"SLURM_NTASKS": None, "SLURM_STEP_NUM_TASKS": None}, "SLURM_NTASKS: not set beside SLURM_PROCID, accepted: "),
        ({"SLURM_NTASKS": "x"}, "SLURM_NTASKS: got 'x', accepted: a number of tasks"),
        ({"SLURM_NTASKS": "8"}, "SLURM_NTASKS=8, SLURM_STEP_NUM_TASKS=7: contradict each other, accepted: .*srun"),
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID: got '7', accepted: 0 to 6"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID: got '-1', accepted: 0 to 6"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID: not set, accepted: 0 to 6"),
        ({"SLURM_LOCALID": "6"}, "SLURM_LOCALID: got 6 beside SLURM_PROCID 5, accepted: 0 to 5"),
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID: got 3, accepted: below the 3 tasks of this node"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE: got '8' without RANK, but SLURM's variables say 7, accepted: 7"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK: got '0' without RANK, but SLURM's variables say 1, accepted: 1"),
        ({"SLURM_JOB_NODELIST": None, "SLURM_STEP_NODELIST": None}, "MASTER_ADDR: not set, and neither is SLURM_JOB_"),
        ({"SLURM_STEP_NODELIST": "node[a-b]"}, r"SLURM_STEP_NODELIST: got 'node\[a-b\]', accepted: hosts such as"),
        ({"SLURM_STEP_NODELIST": "[,"}, r"SLURM_STEP_NODELIST: got '\[,', accepted: hosts such as"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(task, changes, said):
    task(**changes)
    before = now()
    with pytest.raises(CoatConfigError, match=said):
        slurm.take_ranks()
    assert now() == before, "nothing is set by halves"


def test_a_batch_scripts_own_process_is_told_what_it_waits_for(task, capsys):
    task(SLURM_STEP_ID=None, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_STEP_NUM_TASKS=None)
    slurm.take_ranks()
    assert "waiting for 7 tasks; in a batch script, begin with `srun python`" in capsys.readouterr().err


def test_any_program_that_calls_deepspeed_initialize_gets_them(task):
    task(SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    without_launcher.prepare()
    assert now()["RANK"] == "0" and now()["WORLD_SIZE"] == "1" and now()["MASTER_ADDR"] == "127.0.0.1"
