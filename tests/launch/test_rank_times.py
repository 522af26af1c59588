"""The slowest rank is named in the metrics, and in one warning where the others wait for it in step after step."""

import time
from unittest import mock

import pytest
import torch

from launch.train import rank_times
from launch.train.metrics import format_line, read_metrics
from launch.train.rank_times import REPORTS, RankTimes
from tests.launch.pretrain_runs import command, configuration, rank_main
from tests.launch.test_metrics import record
from tests.support import run_ranks


def times(hosts=3):
    made = RankTimes(torch.device("cpu"), whole_forward=True)
    made._hosts = [f"node{i}" for i in range(hosts)]
    return made


def test_what_is_judged(capsys):
    clock = times()
    assert clock.judge([0.5], 1, 1.0) == {}
    # Rank 1 takes 0.3 s longer than the median of the others, which a step of 1 s would not take without it.
    said = clock.judge([0.1, 0.5, 0.3], 1, 1.0)
    assert said == {"slowest_rank": 1, "slowest_rank_time_ratio": pytest.approx(1 / 0.7)}
    assert clock.judge([0.2, 0.2, 0.2], 2, 1.0)["slowest_rank_time_ratio"] == 1.0
    for step in range(3, 3 + 3 * REPORTS):
        clock.judge([0.1, 0.1, 0.5], step, 1.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: rank 2 (node2) is slow: the others waited for it in steps 3 to 7, the last of ")
    assert line.endswith("took 1.67 times as long as without that")
    for step in range(20):
        clock.judge([0.1, 0.5 * (step % 2), 0.3], step, 1.0)
    assert not capsys.readouterr().err, "not the same rank for long"


def test_only_what_no_collective_is_in_is_measured():
    for whole, expected in ((True, 0.15), (False, 0.05)):
        clock = RankTimes(torch.device("cpu"), whole_forward=whole)
        clock.begin()
        time.sleep(0.05)
        clock.batch_is_there()
        time.sleep(0.1)
        clock.forward_done()
        taken = clock.seconds()
        assert expected <= taken < expected + 0.1 and clock.seconds() == 0.0


def test_the_line_names_it_where_it_matters():
    slow = {"slowest_rank": 3, "slowest_rank_time_ratio": 1.5}
    assert "slowest rank 3: 1.50 x" in format_line(record(1, **slow), 10, 1.0, "rank")
    assert "slowest" not in format_line(record(1, **slow | {"slowest_rank_time_ratio": 1.1}), 10, 1.0, "rank")


def one_sleeps(rank, world, argv):
    from launch.train.data_source import TokenData

    inner = TokenData.batches

    def sleepy(self, split, consumed=0):
        for batch in inner(self, split, consumed):
            if rank == 1:
                time.sleep(0.3)
            yield batch

    with mock.patch.object(
        TokenData, "batches", lambda self, split, *args: sleepy(self, split, *args) if split == "train" else None
    ):
        return rank_main(rank, world, argv)


def test_a_rank_that_sleeps_is_named(work, tmp_path):
    argv = command(work, tmp_path / "run", configuration(tmp_path, 3), steps=REPORTS + 3)
    assert "finished" in run_ranks(2, one_sleeps, argv)[0]
    records = read_metrics(tmp_path / "run")[1:]
    assert {r["slowest_rank"] for r in records} == {1}
    assert all(r["slowest_rank_time_ratio"] > rank_times.THRESHOLD for r in records), records


def test_the_host_has_the_name_that_messages_have(monkeypatch):
    monkeypatch.setenv("COAT_HOST", "node-07")
    assert RankTimes(torch.device("cpu"), whole_forward=True)._hosts == ["node-07"]
