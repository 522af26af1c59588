"""A collective that fails because of another rank: the one that has ended, or did not come, is named."""

import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from coat_dist.deepspeed import heartbeat, missing
from coat_dist.deepspeed.timeouts import group_timeout
from coat_dist.ranks import of_another_rank
from tests.support import run_ranks, start_ranks


def without_one(rank, world):
    """What ranks 0 and 1 learn of rank 2, and how long after."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))  # as init_process_group(timeout=) does
    group, chosen = dist.new_group(), dist.new_group(timeout=timedelta(seconds=99))
    missing.start(None)
    assert [group_timeout(g) for g in (None, group, chosen)] == [4.0, 4.0, 99.0]
    beats = heartbeat.running()
    dist.barrier()
    if rank == 2:
        hangs_here(8.0)
        return None
    began = time.monotonic()
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as problem:
        known = of_another_rank(problem)
        found = missing.who()
        took = time.monotonic() - began
        time.sleep(6.0)  # until rank 2 comes
        return known, found, took, beats.is_alive()


def hangs_here(seconds):
    time.sleep(seconds)


def test_a_rank_that_hangs_in_python_is_named_when_collectives_time_out():
    first, second, _ = run_ranks(3, without_one)
    for known, (line, _), took, alive in (first, second):
        assert known and alive and took < 8
        assert line.startswith(f"rank 2 ({socket.gethostname()}; after step 0 at test_missing.py:"), line
        assert line.endswith(" hangs_here) did not come"), line
    assert [found[1] for _, found, *_ in (first, second)] == [True, False], "one rank says it"


def traced(rank, world, folder):
    os.dup2(os.open(f"{folder}/screen{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    missing.start(None)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def test_a_programs_traceback_ends_with_the_rank(tmp_path):
    ranks = start_ranks(2, traced, str(tmp_path), out=str(tmp_path))
    ranks[0].join(60)
    text = (tmp_path / "screen0").read_text()
    assert "Traceback" in text
    last = text.splitlines()[-1]
    assert (
        last == f"error: a collective failed, because rank 1 ({socket.gethostname()}) has ended or does not answer"
    ), text
