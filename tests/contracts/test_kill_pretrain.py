"""A pretraining run loses no finished checkpoint, whatever is killed or fails.

Three tables: what is killed under which launcher, and how the run goes on; a kill at any point of
saving; and every call that touches the disk, failing in turn while a checkpoint is saved.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import resource
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from coat_dist.checkpoint.manifest import CheckpointError, read_manifest, verify
from coat_dist.checkpoint.write.durable import write_text
from coat_dist.checkpoint.write.publish import find
from launch import to_universal
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
from tests.launch.pretrain_runs import command, configuration
from tests.launch.saved_steps import Engine, progress, start
from tests.support import Nodes, free_port, run_ranks, start_ranks

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
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if k.slow else n for n, k in KILLS.items()]
)
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
            assert to_universal.main(["--load", str(save), "--output", str(made)]) == 0
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


TIMES = 20


def save_for_ever(rank, world, folder, config):
    """Continue from the latest checkpoint and save one step after the other; a file says which
    are done.
    """
    import coat_dist
    from megatron_patches import initialize_model_parallel

    import deepspeed  # isort: skip
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    initialize_model_parallel(1)
    torch.manual_seed(0)
    engine, *_ = coat_dist.initialize(model=torch.nn.Linear(256, 256), config=config)
    step, found = 0, find(folder)
    if found is not None:
        progress = checkpoint.restore(engine, checkpoint.examine(found, {}))  # verifies every file
        step = progress["step"]
        if digest(engine) != progress["digest"]:  # to the byte what was saved, on this rank too
            raise RuntimeError(f"rank {rank}: {found} does not hold what was saved")
    x = torch.randn(2, 256).bfloat16()
    write_text(Path(folder, f"loaded{rank}"), str(step))
    while True:
        engine.backward(engine(x).float().square().mean())
        engine.step()
        step += 1
        checkpoint.save(engine, folder, {}, {"step": step, "digest": digest(engine)}, keep_last=2)
        write_text(Path(folder, f"done{rank}"), str(step))


def digest(engine):
    """CRC-32 of all ranks' master weights, FP8 states and 16-bit weights."""

    import torch

    tensors = [p for g in engine.optimizer.optimizer.param_groups for p in g["params"]]
    tensors += [
        t
        for p in tensors
        for t in engine.optimizer.optimizer.state[p].values()
        if isinstance(t, torch.Tensor)
    ]
    tensors += list(engine.module.parameters())
    mine = 0
    for t in tensors:
        mine = zlib.crc32(
            t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), mine
        )
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def number(path):
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def test_save_survives_a_kill_at_any_point(tmp_path):
    chance = random.Random()
    config = configuration(
        tmp_path, 2, {"activation": {"enabled": False}}, gradient_accumulation_steps=1
    )
    done, interrupted = 0, set()
    for kill in range(TIMES):
        for name in ("loaded0", "loaded1"):
            (tmp_path / name).unlink(missing_ok=True)
        out = tmp_path / f"ranks{kill}"
        out.mkdir()
        ranks = start_ranks(2, save_for_ever, str(tmp_path), config, out=str(out))
        give_up, came_back = time.monotonic() + 120, 0.0
        while number(tmp_path / "done0") <= done:  # one step and save more than before
            failed = [(out / f"{r}.pt").exists() for r in range(2)]
            assert not any(failed) and time.monotonic() < give_up, (
                f"kill {kill}: ranks did not come back: {failed}"
            )
            if not came_back and (tmp_path / "loaded0").exists():
                came_back = time.monotonic()
            time.sleep(0.005)
        assert number(tmp_path / "loaded0") >= done, f"kill {kill}: a finished checkpoint was lost"
        # Any point of the next step and save.
        time.sleep(chance.uniform(0, time.monotonic() - came_back))
        for process in ranks:
            process.kill()
            process.join()
        done = max(number(tmp_path / f"done{r}") for r in range(2))
        interrupted |= {(p.name, p.stat().st_ctime_ns) for p in tmp_path.glob(".unfinished-*")}
        found = find(tmp_path)
        assert found is not None and read_manifest(found)["progress"]["step"] >= done
    assert done >= TIMES
    assert len(interrupted) >= 2, "too few kills in the middle of a save to mean anything"
    print(f"{done} checkpoints, {len(interrupted)} of {TIMES} kills in the middle of writing one")


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


def fail_everywhere(rank, world, folder, place, for_good, failing_rank, second):
    """Let the place fail at its first call, its second, ... until a save passes without; how
    often it failed.
    """
    folder += f"/{place}"
    nth = 0
    while True:
        nth += 1
        shutil.rmtree(folder, ignore_errors=True) if rank == 0 else None
        torch.distributed.barrier()
        assert attempt(folder, 1, "old") is None
        with Failing(place, nth if rank == failing_rank else 10**9, for_good) as failure:
            problem = attempt(folder, second, "new")
        torch.distributed.barrier()
        state = which(folder)
        everyone = [None] * world
        torch.distributed.all_gather_object(everyone, (problem is None, failure.failed > 0))
        assert len({passed for passed, _ in everyone}) == 1, (
            f"{place}, call {nth}: ranks differ: {everyone}"
        )
        if problem is not None:
            assert "Input/output error" in problem or "file write failed" in problem, problem
        else:
            assert state == "new", f"{place}, call {nth}"
        torch.distributed.barrier()
        assert attempt(folder, 3, "next") is None and which(folder) == "next"
        # Rank 0 removes.
        left = sorted(os.listdir(folder)) if rank == 0 else ["latest", "step00000003"]
        assert left == ["latest", "step00000003"], f"{place}, call {nth}: left {left}"
        torch.distributed.barrier()
        if not any(failed for _, failed in everyone):
            return nth - 1


@pytest.mark.parametrize(
    ("for_good", "second"),
    [
        (True, 2),
        (False, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 2), (True, 1))),
    ],
)
def test_save_leaves_a_whole_checkpoint_after_an_error_anywhere(tmp_path, for_good, second):
    """Also while a step is saved for the second time, with --keep-last 1."""
    times = run_ranks(1, all_places, str(tmp_path), for_good, 0, second)[0]
    for place in (
        "fsync",
        "rename",
        "replace",
        "open",
        "torch.save",
        "copyfile",
        "scandir",
        "listdir",
    ):
        assert times[place] >= 1, times
    assert times["fsync"] >= 5 and times["open"] >= 5


def all_places(rank, world, folder, for_good, failing_rank, second, places=tuple(PLACES)):
    start()
    return {
        p: fail_everywhere(rank, world, folder, p, for_good, failing_rank, second) for p in places
    }


def test_save_fails_on_all_ranks_after_an_error_on_one(tmp_path):
    places = ("fsync", "open", "torch.save")
    for times in run_ranks(2, all_places, str(tmp_path), False, 1, 2, places):
        assert all(times[p] >= 1 for p in places), times


def real_engine(rank, world, folder):
    """DeepSpeed's own writing fails on one rank, once in its torch.save for want of room and
    once beside it.
    """
    import coat_dist

    import deepspeed  # isort: skip

    start()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
        "coat": {"activation": {"enabled": False}},
    }
    engine, *_ = coat_dist.initialize(model=torch.nn.Linear(256, 256), config=config)

    def save(step):
        try:
            return str(checkpoint.save(engine, folder, {}, progress(step), keep_last=1))
        except CheckpointError as problem:
            return str(problem)

    results = [save(1)]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    results.append(save(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    module = importlib.import_module("deepspeed.runtime.engine")
    original, module.copyfile = module.copyfile, Failing("copyfile", 1, True)
    results.append(save(2))
    module.copyfile = original
    found = find(folder)
    verify(found, read_manifest(found)["files"])
    torch.distributed.barrier()
    return [*results, str(found), save(2)]


def test_save_fails_on_all_ranks_after_an_error_of_deepspeeds_writing(tmp_path):
    one, two = (str(tmp_path / f"step0000000{i}") for i in (1, 2))
    for first, room, script, found, last in run_ranks(2, real_engine, str(tmp_path)):
        assert (first, found, last) == (one, one, two)
        unfinished = f"cannot write {tmp_path}/.unfinished-step00000002: "
        assert (
            room.startswith(f"{unfinished}rank 1: ")
            and "optim_states.pt" in room
            and "rank 0" not in room
        )
        assert script.startswith(f"{unfinished}rank 0: ") and "Input/output error" in script
    assert [p.name for p in tmp_path.glob("*step*")] == ["step00000002"]
