"""The line of a rank that fails is printed once, by one rank."""

import argparse
import io
import json
import os
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from launch import failing, pretrain
from tests.support import run_ranks


def fail(rank, world, lines, folder):
    """Every rank ends with its line; None: a collective fails because of another rank."""
    screen = sys.stderr = io.StringIO()
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}.json"
    line = lines[rank]
    failing.end(line or "Connection closed by peer", rank, consequence=line is None)
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
def test_one_line(lines, screens, tmp_path):
    found = run_ranks(2, fail, lines, str(tmp_path))
    assert tuple(screen for screen, _ in found) == screens
    assert [told for _, told in found] == [f"error: {line or 'Connection closed by peer'}" for line in lines]


def test_one_rank_tells_a_consequence(tmp_path):
    assert sum(screen != "" for screen, _ in run_ranks(2, fail, (None, None), str(tmp_path))) == 1


def test_the_line_does_not_wait_for_a_store_that_has_gone(monkeypatch, capsys):
    class Gone:
        def set_timeout(self, timeout):
            assert timeout.total_seconds() <= 0.1

        def clone(self):
            raise dist.DistNetworkError("The client socket has timed out")

    monkeypatch.setattr(failing, "WAIT", 0.1)
    monkeypatch.setattr(failing.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(failing.dist.distributed_c10d, "_get_default_store", Gone)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    failing.end("one", 1)
    assert capsys.readouterr().err == "rank 1: error: one\n"


def test_a_port_that_is_taken_is_named(monkeypatch):
    """Two jobs on one machine: not another rank that has ended."""
    given = argparse.Namespace(log_level="info", dry_run=False, gpus=None, local_rank=0, distributed_timeout_minutes=1)
    said = []
    monkeypatch.setattr(failing, "end", lambda line, rank, **how: said.append(line))
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        assert pretrain.run(lambda: given, lambda args, world: None, list) == 4
    (line,) = said
    assert line.startswith("the ranks cannot meet: ") and f"port: {port}" in line and "EADDRINUSE" in line, line


def start(rank, world, failed, comes, folder):
    """The start of a rank a node, of which rank 1 fails (with ``failed``), or does not come."""
    screen = sys.stderr = io.StringIO()
    dist.destroy_process_group()
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", COAT_HOST=f"node-{rank}", TORCHELASTIC_ERROR_FILE="")
    said, began = "came", time.monotonic()
    try:
        if rank == 1 and failed:
            failing.end(failed, rank)
        elif comes or rank != 1:
            failing.meet(timedelta(seconds=60 if comes else 4))
    except failing.NotComing as problem:
        said = str(problem)
    took, printed = time.monotonic() - began, screen.getvalue()
    sys.stderr = sys.__stderr__
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    time.sleep(3.0)  # rank 0 holds the store
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world)
    return said, printed, took


def test_ranks_of_other_nodes_learn_why_one_fails_at_its_start(tmp_path):
    zero, one, two = run_ranks(3, start, "data: got nowhere", True, str(tmp_path))
    why = "rank 1 (host node-1) ended at its start: data: got nowhere"
    assert (zero[0], two[0]) == (why, why)
    assert zero[1] == f"error: {why}\n" and two[1] == f"rank 2 (host node-2): error: {why}\n"
    assert one[1] == "rank 1 (host node-1): error: data: got nowhere\n"
    assert max(zero[2], one[2], two[2]) < 30, "long before the timeout"


def test_a_rank_that_never_comes_is_named(tmp_path):
    zero, _, two = run_ranks(3, start, "", False, str(tmp_path))
    assert zero[0] == two[0] == "rank 1 did not come within 4 s, accepted: all ranks"


def test_ranks_of_several_nodes_come(tmp_path):
    assert [said for said, *_ in run_ranks(3, start, "", True, str(tmp_path))] == ["came"] * 3


def test_tasks_of_slurm_that_find_the_same_wrong_say_it_once(monkeypatch):
    """They have no ranks yet, and no store: each knows its number, and all but the first let it speak."""
    for name in ("RANK", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS"):
        monkeypatch.delenv(name, raising=False)
    said = []
    monkeypatch.setattr(failing, "end", lambda line, rank: said.append((line.partition(":")[0], rank)))
    for task in ("0", "3", "x"):
        monkeypatch.setenv("SLURM_PROCID", task)
        assert pretrain.run(list, list, list) == 2
    assert said == [("SLURM_NTASKS", 0), ("SLURM_NTASKS", 3), ("SLURM_NTASKS", 0)]
