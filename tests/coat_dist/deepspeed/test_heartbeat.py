"""Heartbeats: a rank that is stopped, stuck or killed is named by the others, and nothing else
ends a run.
"""

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from coat_dist.deepspeed import heartbeat
from coat_dist.deepspeed.heartbeat import Heartbeat, group_timeout
from coat_dist.ranks import of_another_rank
from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed
from tests.support import run_ranks, start_ranks

HOST = socket.gethostname()


class Engine:
    def __init__(self, global_steps):
        self.global_steps = global_steps


def beating(seconds, steps=3):
    """Start the thread, as if collectives waited so long, and an engine after ``steps``; that
    engine.
    """
    heartbeat.SHORTEST = 0.0
    heartbeat.group_timeout = lambda: seconds
    engine = Engine(steps)
    heartbeat.start(engine)
    return engine


def recorded():
    """Lines that would be printed, in place of the end of the process too."""
    lines = []
    heartbeat._write = lines.append
    Heartbeat._finish = lambda self, names: lines.append(names)
    return lines


def onto_screen(rank, folder):
    os.dup2(os.open(f"{folder}/screen{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{rank}.json"


def one_is_stopped(rank, world, folder):
    onto_screen(rank, folder)
    held = beating(4.0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    return held


def test_heartbeat_names_a_stopped_rank(tmp_path):
    """Also in torchrun's report."""
    ranks = start_ranks(3, one_is_stopped, str(tmp_path), out=str(tmp_path))
    for rank in (0, 2):
        ranks[rank].join(60)
        assert ranks[rank].exitcode == heartbeat.STATUS
        (line,) = (tmp_path / f"screen{rank}").read_text().splitlines()
        assert line.startswith(f"error: rank 1 ({HOST}; after step 3 at test_heartbeat.py:"), line
        # The place is that of its last datagram, which may be its first.
        assert ") has not answered for 3 s of the 4 s that collectives wait; rank" in line, line
        assert (
            f"rank {rank} ends after step 3 at test_heartbeat.py:" in line
            and "one_is_stopped" in line
        ), line
        assert (
            json.loads((tmp_path / f"error{rank}.json").read_text())["message"]["message"] == line
        )
    ranks[1].kill()


def one_sleeps(rank, world):
    """What ranks 0 and 1 learn of rank 2, and how long after."""
    # As init_process_group(timeout=) does.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    group, chosen = dist.new_group(), dist.new_group(timeout=timedelta(seconds=99))
    engine = Engine(3)
    heartbeat.start(engine)
    assert [group_timeout(g) for g in (None, group, chosen)] == [4.0, 4.0, 99.0]
    dist.barrier()
    if rank == 2:
        hangs_here(8.0)
        return None
    began = time.monotonic()
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as problem:
        found, took = heartbeat.who(), time.monotonic() - began
        time.sleep(6.0)  # until rank 2 comes
        return of_another_rank(problem), found, took


def hangs_here(seconds):
    time.sleep(seconds)


def test_who_names_a_rank_that_hangs_in_python():
    first, second, _ = run_ranks(3, one_sleeps)
    for known, (line, _), took in (first, second):
        assert known and took < 8
        assert line.startswith(f"rank 2 ({HOST}; after step 3 at test_heartbeat.py:"), line
        assert line.endswith(" hangs_here) did not come"), line
    assert [found[1] for _, found, _ in (first, second)] == [True, False], "one rank says it"


def one_is_killed(rank, world, folder):
    onto_screen(rank, folder)
    heartbeat.start()
    dist.barrier()
    time.sleep(0.5)  # until each has heard the other
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def test_excepthook_names_a_killed_rank(tmp_path):
    ranks = start_ranks(2, one_is_killed, str(tmp_path), out=str(tmp_path))
    ranks[0].join(60)
    first, *_, last = (tmp_path / "screen0").read_text().splitlines()
    assert "Traceback" in first, first
    assert (
        last == f"error: a collective failed, because rank 1 ({HOST}) has ended or does not answer"
    )


def one_waits_one_leaves(rank, world):
    lines = recorded()
    beating(1.0)
    beats = heartbeat._running
    dist.barrier()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"[" * 4000, ("127.0.0.1", beats._socket.getsockname()[1]))
    time.sleep(1.5 if rank else 3.0)  # longer than the limit: threads send while Python waits
    alive = beats.is_alive()
    beats.stop()
    beats.join(10)
    return lines, alive, beats.is_alive()


def test_heartbeat_lets_ranks_wait_and_leave():
    assert run_ranks(2, one_waits_one_leaves) == [([], True, False)] * 2


def elsewhere(rank, world):
    lines = recorded()
    held = beating(1.0, steps=5 - rank)
    time.sleep(3.0)
    dist.barrier()
    heartbeat._running.stop()
    return lines, held.global_steps


def test_heartbeat_notes_ranks_at_different_steps_once():
    ((note,), _), (second, _) = run_ranks(2, elsewhere)
    assert note.startswith("note: all ranks answer, but there was no step for ") and not second
    assert (
        f"rank 0 ({HOST}; after step 5 at test_heartbeat.py:" in note
        and f"rank 1 ({HOST}; after step 4 at " in note
    )


def alone(rank, world):
    lines = recorded()
    beats = Heartbeat(rank, world, 100.0)
    beats.hosts = ["host"] * 8
    beats._hear(7, step=1, place="x", waits=True)
    passed = min(3600.0, 2 * beats.interval)  # a pause of an hour of this very rank, in run()
    for _ in range(8):
        beats._judge(passed)
    quiet = not lines
    beats._judge(passed)
    return quiet, lines


def test_heartbeat_counts_silence_in_ticks():
    ((quiet, lines),) = run_ranks(1, alone)
    assert quiet and lines == ["rank 7 (host; after step 1 at x)"]


def engines(rank, world):
    """The thread starts with the first engine, with the group's timeout, and not at all where it
    is off.
    """
    import coat_dist

    quiet_deepspeed()
    os.environ["COAT_HEARTBEAT"] = "0"
    coat_dist.initialize(model=model(), config=CONFIG)
    off = heartbeat._running is None
    del os.environ["COAT_HEARTBEAT"]
    engine = coat_dist.initialize(model=model(), config=CONFIG)[0]
    first = heartbeat._running
    other = coat_dist.initialize(model=model(), config=CONFIG)[0]
    same = heartbeat._running is first and {engine, other} == set(first.engines)
    return off, same, first.limit, first.is_alive(), engine.coat_attached


def test_heartbeat_starts_with_the_first_engine():
    for off, same, limit, alive, attached in run_ranks(2, engines):
        assert off and same and alive
        assert limit == heartbeat.SHARE * dist.default_pg_timeout.total_seconds()
        assert "ranks hear of one another" in attached


@pytest.mark.parametrize("master", ["localhost", "no-such-host"])
def test_meet_reaches_the_first_host_at_the_master_address(master, monkeypatch):
    """Their own way there may be the loopback; one host needs no address."""
    everyone = [("a", "127.0.0.1", 1, "ab"), ("b", "10.0.0.2", 2, "cd")]
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr(heartbeat, "gather", lambda mine: everyone)
    real = socket.gethostbyname
    monkeypatch.setattr(
        socket, "gethostbyname", lambda name: "10.0.0.1" if name == "localhost" else real(name)
    )
    _, hosts, addresses, token = heartbeat._meet()
    assert (hosts, token) == (["a", "b"], b"ab")
    assert addresses == [("10.0.0.1" if master == "localhost" else "127.0.0.1", 1), ("10.0.0.2", 2)]
    everyone.pop()
    assert heartbeat._meet()[2] == [("127.0.0.1", 1)]
