"""The line of a rank that fails is printed once, by one rank."""

import argparse
import io
import json
import os
import socket
import sys

import pytest

from coat_dist import CoatConfigError
from launch import pretrain
from launch.common import failing
from tests.support import run_ranks


def fail(rank, world, lines, folder, kind=""):
    """Every rank ends with its line; None: a collective fails because of another rank."""
    screen = sys.stderr = io.StringIO()
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}.json"
    line = lines[rank]
    failing.end(line or "Connection closed by peer", rank, kind, consequence=line is None)
    sys.stderr = sys.__stderr__
    with open(f"{folder}/{rank}.json", encoding="utf-8") as file:
        return screen.getvalue(), json.load(file)["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    "lines, screens",
    [
        (("one", "one"), ("error: one\n", "")),
        (("one", "two"), ("error: one\n", "rank 1: error: two\n")),
        ((None, "two"), ("", "rank 1: error: two\n")),
        (("one", None), ("error: one\n", "")),
    ],
)
def test_end_prints_one_line_of_one_rank(lines, screens, tmp_path):
    found = run_ranks(2, fail, lines, str(tmp_path))
    assert tuple(screen for screen, _ in found) == screens
    assert [told for _, told in found] == [
        f"error: {line or 'Connection closed by peer'}" for line in lines
    ]


@pytest.mark.parametrize(("lines", "kind"), [((None, None), ""), (("1 MB", "2 MB"), "memory")])
def test_end_prints_one_line_of_a_kind(lines, kind, tmp_path):
    """Of a consequence, and of errors whose text differs between ranks."""
    screens = [screen for screen, _ in run_ranks(2, fail, lines, str(tmp_path), kind)]
    assert sum(screen != "" for screen in screens) == 1


def test_a_port_that_is_taken_is_named(monkeypatch):
    """Two jobs on one machine: not another rank that has ended."""
    given = argparse.Namespace(
        log_level="info", dry_run=False, gpus=None, local_rank=0, distributed_timeout_minutes=1
    )
    said = []
    monkeypatch.setattr(failing, "end", lambda line, rank, **how: said.append(line))
    monkeypatch.setattr(pretrain.pretrain_options, "parse", lambda argv: given)
    monkeypatch.setattr(pretrain, "plan", lambda args, world: None)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ranks = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        assert pretrain.main() == 4
    (line,) = said
    assert (
        line.startswith("the ranks cannot meet: ")
        and f"port: {port}" in line
        and "EADDRINUSE" in line
    ), line


def plan_on_nodes(rank, world):
    """A rank of a node of its own plans; rank 1 lacks a file."""
    os.environ.update(COAT_HOST=f"node-{rank}", NODE_RANK=str(rank))

    def make():
        if rank == 1:
            raise CoatConfigError("data: got nowhere, accepted: a data set")
        return "plan"

    with pytest.raises(CoatConfigError) as caught:
        pretrain._on_all(make)
    return str(caught.value)


def test_all_nodes_learn_what_one_lacks():
    for error in run_ranks(2, plan_on_nodes):
        assert error.startswith("rank 1") and error.endswith(
            ": data: got nowhere, accepted: a data set"
        )


def test_main_gives_end_the_number_of_a_task_that_slurm_has_not_started(monkeypatch):
    """Tasks have no ranks yet, and no store: all but the first let it speak."""
    for name in ("RANK", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    said = []
    monkeypatch.setattr(
        failing, "end", lambda line, rank: said.append((line.partition(":")[0], rank))
    )
    for task in ("0", "3"):
        monkeypatch.setenv("SLURM_PROCID", task)
        assert pretrain.main([]) == 2
    assert said == [("SLURM_STEP_ID", 0), ("SLURM_STEP_ID", 3)]
