"""A pretraining run loses no finished checkpoint, whatever is killed or fails.

Three tables: what is killed under which launcher, and how the run goes on; a kill at any point of
saving; and every call that touches the disk, failing in turn while a checkpoint is saved.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from coat_dist.checkpoint.manifest import CheckpointError, read_manifest, verify
from coat_dist.checkpoint.write.publish import find
from launch.train import checkpoint
from launch.train.metrics import read_metrics
from tests.launch.conftest import work  # noqa: F401 - a fixture
from tests.launch.disk import PLACES, Failing
from tests.launch.launchers import (
    DEEPSPEED,
    TORCHRUN,
    alone,
    begin,
    begin_from_nothing,
    output_of,
    ranks_of,
    srun,
    start_on,
    torchrun,
    wait_for_steps,
)
from tests.launch.pretrain_runs import command, configuration, make_universal
from tests.launch.saved_steps import Engine, progress, start
from tests.support import Nodes, free_port, run_ranks, slow

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="starts ranks on the CPU")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill in the middle of a run."""

    reason: str
    begin: Callable
    """``begin(argv, folder)``: the programs; the first one's output is looked at."""
    strike: Callable
    """``strike(programs)``"""
    said: str
    """A pattern in the output."""
    status: int | None = None
    """Exit status of the first program; None = any."""
    again: Callable | None = None
    """``again(argv, folder)`` continues the run, and returns what that printed; None = the program
    does so itself, to step :data:`STEPS`, or nobody.
    """
    goes_on: bool = False
    by_hand: bool = False
    """Converted by to_universal.py before it continues."""
    slow: bool = True


STEPS = 60


def restarted_by_torchrun(argv, folder):
    options = ["--nproc_per_node", 2, "--max-restarts", 1, "--monitor-interval", 0.1]
    return [torchrun(folder, [*options, "--master_port", free_port()], argv)]


def two_elastic_nodes(argv, folder):
    """Two launchers of one rank each, which go on with one of them."""
    port = free_port()
    quick = "last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=3"
    options = ["--nnodes", "1:2", "--nproc_per_node", 1, "--max-restarts", 3]
    options += ["--monitor-interval", 0.2, "--rdzv-backend", "c10d", "--rdzv-id", port]
    options += ["--rdzv-conf", quick, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    first = torchrun(folder, options, argv)  # has the store
    time.sleep(1.0)
    return [first, torchrun(folder, options, argv)]


def kill_all_of(launcher):
    for process in (*ranks_of(launcher).values(), psutil.Process(launcher.pid)):
        process.kill()  # as when its host goes


def continued_by_torchrun(argv, folder):
    process = begin_from_nothing(TORCHRUN, argv)
    text = output_of(process)
    assert process.returncode == 0, text
    return text


KILLS = {
    "SIGTERM to the deepspeed launcher": Kill(
        reason="it forwards no signal: ranks notice that it has gone, and save",
        begin=lambda argv, folder: [begin_from_nothing(DEEPSPEED, ["--deepspeed", *argv])],
        strike=lambda programs: os.kill(programs[0].pid, signal.SIGTERM),
        said=r"stopped by end of the launcher after step \d+; checkpoint \S+",
        again=continued_by_torchrun,
    ),
    "Ctrl-C": Kill(
        reason="it reaches every process of the group, and launchers repeat it to their ranks",
        begin=lambda argv, folder: [begin(DEEPSPEED, argv, folder)],
        strike=lambda programs: os.killpg(programs[0].pid, signal.SIGINT),
        said=r"stopped by (SIGINT|SIGTERM) after step \d+; checkpoint",
        slow=False,
    ),
    "a rank under torchrun": Kill(
        reason="torchrun starts all ranks again, as many as before",
        begin=restarted_by_torchrun,
        strike=lambda programs: ranks_of(programs[0])["rank 1"].kill(),
        said=r"error: a collective failed, because rank 1 \(\S+\) has ended or does not answer: ",
        status=0,
        goes_on=True,
    ),
    "a node under torchrun": Kill(
        reason="the other node goes on alone, with the samples of both",
        begin=two_elastic_nodes,
        strike=lambda programs: kill_all_of(programs[1]),
        said=r"parallel.data: checkpoint has 2, this run has 1(.|\n)*"
        "now 1, with micro-batches of 2 and 4 of them a step",
        status=0,
        goes_on=True,
    ),
    "a node under srun": Kill(
        reason="the other one names it, and ends; its checkpoint continues on one rank",
        begin=lambda argv, folder: start_on(folder.nodes, srun(), argv, folder.path),
        strike=lambda programs: os.kill(programs[1].pid, signal.SIGKILL),
        said=r"error: a collective failed, because rank 1 \(node-b\) has ended or does not answer",
        status=4,
        again=lambda argv, folder: alone(argv, folder.path),
        by_hand=True,
        slow=False,
    ),
}


@dataclass(frozen=True)
class OnNodes:
    path: Path
    nodes: list


@on_a_cpu
@pytest.mark.long
@pytest.mark.parametrize("name", [slow(n) if k.slow else n for n, k in KILLS.items()])
def test_pretrain_continues_after_a_kill(work, tmp_path, name):  # noqa: F811
    case, run, save = KILLS[name], tmp_path / "run", tmp_path / "save"
    more = ["--save-interval", "4", "--lr-schedule", "constant"]
    more += [] if case.by_hand else ["--load", "auto"]
    config = configuration(tmp_path, 2)
    steps = STEPS if case.goes_on else 100_000
    argv = command(work, run, config, "--save", save, *more, steps=steps)
    with Nodes(tmp_path, namespaces=os.environ.get("NODES") != "loopback") as nodes:
        folder = OnNodes(tmp_path, nodes) if "srun" in name else tmp_path
        programs = case.begin(argv, folder)
        wait_for_steps(programs, run, 6)
        case.strike(programs)
        struck = time.monotonic()
        texts = [output_of(program) for program in programs]
    text = texts[0]
    assert re.search(case.said, text), text
    assert case.status in (None, programs[0].returncode), text
    if case.status == 4:
        assert time.monotonic() - struck < 60
        assert len([x for x in text.splitlines() if "error: " in x]) == 1, text
    step = read_manifest(find(save))["progress"]["step"]
    last = STEPS if case.goes_on else step
    assert case.status == 4 or len(read_metrics(run)) == last
    if case.again is not None:
        last = step + 2
        if case.by_hand:
            made = tmp_path / "universal"
            make_universal(save, made)
            config = configuration(tmp_path, 2, train_batch_size=8, gradient_accumulation_steps=4)
            more += ["--load", made]
            save = tmp_path / "more"
        argv = command(work, run, config, "--save", save, *more, steps=last)
        text = case.again(argv, folder)
        assert f"finished {last} steps" in text
    if last != step:
        assert "continuing after step " in text, text
    records = read_metrics(run)
    assert [r["step"] for r in records] == list(range(1, last + 1))
    assert [r["consumed_samples"] for r in records] == [8 * r["step"] for r in records]


def which(folder):
    """What the checkpoint that ``find`` finds says of itself, after it was read as a load would."""
    found = find(folder)
    manifest = read_manifest(found)
    verify(found, manifest["files"])
    return manifest["progress"]["which"]


def attempt(folder, step, name):
    """Save; the error's text or None."""
    try:
        checkpoint.save(Engine(), folder, {}, {**progress(step), "which": name}, keep_last=1)
    except CheckpointError as problem:
        return str(problem)
    return None


def fail_everywhere(folder, place, for_good, second):
    """Let the place fail at its first call, its second, ... until a save passes without; how
    often it failed.
    """
    folder, nth, failed = f"{folder}/{place}", 0, True
    while failed:
        nth += 1
        shutil.rmtree(folder, ignore_errors=True)
        assert attempt(folder, 1, "old") is None
        with Failing(place, nth, for_good) as failure:
            problem = attempt(folder, second, "new")
        failed, state = failure.failed > 0, which(folder)
        if problem is None:
            assert state == "new", f"{place}, call {nth}"
        else:
            assert "Input/output error" in problem or "file write failed" in problem, problem
        assert attempt(folder, 3, "next") is None and which(folder) == "next"
        left = sorted(os.listdir(folder))
        assert left == ["latest", "step00000003"], f"{place}, call {nth}: left {left}"
    return nth - 1


def all_places(rank, world, folder, for_good, second):
    start()
    return {place: fail_everywhere(folder, place, for_good, second) for place in PLACES}


@pytest.mark.parametrize(
    ("for_good", "second"),
    [
        (True, 2),
        (False, 1),
        *(slow(*case) for case in ((False, 2), (True, 1))),
    ],
)
def test_save_leaves_a_whole_checkpoint_after_an_error_anywhere(tmp_path, for_good, second):
    """Also while a step is saved for the second time, with --keep-last 1."""
    (times,) = run_ranks(1, all_places, str(tmp_path), for_good, second)
    for place in ("rename", "replace", "torch.save", "copyfile", "scandir", "listdir"):
        assert times[place] >= 1, times
    assert times["fsync"] >= 5 and times["open"] >= 5
