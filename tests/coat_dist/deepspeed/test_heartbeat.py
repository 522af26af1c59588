"""Ranks that hear of one another: one that is stopped is named by all others, and nothing else ends a run."""

import json
import os
import signal
import socket
import time
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from coat_dist.deepspeed import heartbeat
from coat_dist.deepspeed.heartbeat import Heartbeat
from tests.support import run_ranks, start_ranks


def beating(rank, world, seconds=4.0, end=None, steps=3):
    heartbeat.SHORTEST = 0.0
    beats = Heartbeat(rank, world, seconds, dist.group.WORLD, end)
    engine = types.SimpleNamespace(global_steps=steps)
    engine = type("Engine", (), vars(engine))()
    beats.engines.add(engine)
    beats.start()
    return beats, engine


def one_is_stopped(rank, world, folder):
    os.dup2(os.open(f"{folder}/screen{rank}", os.O_WRONLY | os.O_CREAT), 2)
    held = beating(rank, world)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    return held


def test_a_stopped_rank_is_named_by_all_others(tmp_path):
    ranks = start_ranks(3, one_is_stopped, str(tmp_path), out=str(tmp_path))
    for rank in (0, 2):
        ranks[rank].join(60)
        assert ranks[rank].exitcode == heartbeat.STATUS
        (line,) = (tmp_path / f"screen{rank}").read_text().splitlines()
        assert line.startswith(f"error: rank 1 ({socket.gethostname()}; after step 3 at test_heartbeat.py:"), line
        # The place is that of its last datagram, which may be its first.
        assert ") has not answered for 3 s of the 4 s that collectives wait; rank" in line, line
        assert f"rank {rank} ends after step 3 at test_heartbeat.py:" in line and "one_is_stopped" in line, line
    ranks[1].kill()


def some_leave(rank, world):
    """Rank 1 says that it leaves, rank 0 waits for long with the process group in use; both then end as usual."""
    ended, notes = [], []
    heartbeat._write = notes.append
    beats, engine = beating(rank, world, 1.0, ended.append)
    dist.barrier()
    time.sleep(1.5 if rank else 3.0)  # longer than the limit: threads send while Python waits
    where = time.monotonic()
    beats.stop()
    return ended, notes, time.monotonic() - where, beats.is_alive()


def test_ranks_that_wait_or_leave_end_nothing():
    for ended, notes, _, alive in run_ranks(2, some_leave):
        assert not ended and not alive
        assert not notes, "both ranks are at the same place"


def test_the_thread_may_have_closed_its_socket_before_it_is_woken():
    closed = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    closed.close()
    Heartbeat._tell(types.SimpleNamespace(rank=0, _token="", _addresses={}, _socket=closed), [0], {"wake": True})


def test_torchrun_repeats_the_line(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(heartbeat.os, "_exit", ended.append)
    monkeypatch.setattr(heartbeat, "_write", ended.append)
    heartbeat._end_process("error: rank 1 has not answered")
    assert ended == ["error: rank 1 has not answered", heartbeat.STATUS]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == ended[0]


def strangers(rank, world):
    ended = []
    beats, engine = beating(rank, world, 1.0, ended.append)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for data in (b"[" * 4000, b"\xff\xfe", b"1" * 4096, b"null", b'{"token": 1}', b"x" * 60000):
            s.sendto(data, ("127.0.0.1", beats._socket.getsockname()[1]))
    dist.barrier()
    time.sleep(1.5)
    alive = beats.is_alive()
    dist.barrier()
    beats.stop()
    return alive, ended


def test_what_strangers_send_ends_nothing():
    assert run_ranks(2, strangers) == [(True, [])] * 2


def elsewhere(rank, world):
    notes = []
    heartbeat._write = notes.append
    beats, engine = beating(rank, world, 1.0, notes.append, steps=5 - rank)
    dist.barrier()
    time.sleep(3.0)
    dist.barrier()
    beats.stop()
    return notes


def test_ranks_that_are_alive_at_different_steps_are_told_once():
    first, second = run_ranks(2, elsewhere)
    (note,) = first
    assert note.startswith("note: all ranks answer, but there was no step for ") and not second
    assert "rank 0 after step 5 at test_heartbeat.py:" in note and "rank 1 after step 4 at " in note


def alone(rank, world):
    beats = Heartbeat(rank, world, 100.0, dist.group.WORLD, end=pytest.fail)
    beats._heard, beats._silent = {7: {"step": 1, "place": "x"}}, {7: 0.0}
    beats._addresses, beats._hosts = {}, ["host"] * 8
    # A pause of an hour of this very rank counts as two ticks of the others' silence.
    passed = min(3600.0, 2 * beats.interval)
    beats._judge(passed)
    silent = beats._silent[7]
    said = []
    beats._end = said.append
    for _ in range(20):
        beats._judge(beats.interval)
    return silent, passed, said[:1], heartbeat.group_timeout()


def test_silence_is_counted_in_ticks():
    ((silent, passed, said, timeout),) = run_ranks(1, alone)
    assert silent == passed == 10.0 and "rank 7 (host; after step 1 at x) has not answered for 80 s" in said[0]
    assert timeout == dist.default_pg_timeout.total_seconds()


def engines(rank, world):
    """With an engine: the thread starts with the first, with the group's timeout, and not at all where it is off."""
    import coat_dist

    def build():
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
        }
        return coat_dist.initialize(model=torch.nn.Linear(64, 64), config=config)[0]

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["COAT_HEARTBEAT"] = "0"
    build()
    off = heartbeat._running is None
    del os.environ["COAT_HEARTBEAT"]
    engine = build()
    first = heartbeat._running
    other = build()
    same = heartbeat._running is first and {engine, other} == set(first.engines)
    limit, alive = first.limit, first.is_alive()
    group = dist.new_group(timeout=timedelta(seconds=7))
    dist.barrier(group)
    first.stop()
    return off, same, limit, alive, first.is_alive(), engine.coat_attached


def test_it_begins_with_an_engine():
    for off, same, limit, alive, after, attached in run_ranks(2, engines):
        assert off and same and alive and not after
        assert limit == heartbeat.SHARE * dist.default_pg_timeout.total_seconds()
        assert "ranks hear of one another" in attached


def test_the_screen_of_a_normal_end_is_empty(tmp_path):
    """Also where rank 0 has ended before."""
    ranks = start_ranks(2, quiet_end, str(tmp_path), out=str(tmp_path))
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert not any(Path(tmp_path, f"screen{rank}").read_text() for rank in range(2))


def quiet_end(rank, world, folder):
    os.dup2(os.open(f"{folder}/screen{rank}", os.O_WRONLY | os.O_CREAT), 2)
    held = beating(rank, world, 1.0)
    dist.barrier()
    if rank == 0:
        held[0].stop()
        torch.save((True, None), f"{folder}/0.pt")
        os._exit(0)
    time.sleep(2.0)
    held[0].stop()
    os._exit(0)
