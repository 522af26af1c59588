"""Signals and random states."""

import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from coat_dist import CoatConfigError
from launch.train import runtime
from tests.support import run_ranks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_a_request_and_its_echo_nothing(number):
    stop = runtime.StopSignal(echo_seconds=60)
    try:
        assert not stop.requested()
        for again in (number, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), again)
        assert stop.requested() and stop.name == signal.Signals(number).name
    finally:
        stop.restore()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_says_at_once_that_it_was_asked_to_stop(rank, monkeypatch, capfd):
    monkeypatch.setenv("RANK", rank)
    stop = runtime.StopSignal(echo_seconds=60)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        line = "SIGINT: stopping after this step; a second one stops at once\n"
        assert capfd.readouterr().err == (line if rank == "0" else "")
    finally:
        stop.restore()


def test_a_later_signal_ends_at_once():
    program = """
        import os, signal, time
        from launch.train.runtime import StopSignal
        stop = StopSignal(echo_seconds=0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        print("still here", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM and done.stdout == "still here\n"


def test_a_dead_launcher_is_a_request():
    """The parent of the watching process dies, as a killed launcher does."""
    program = """
        import os, time
        from launch.train.runtime import StopSignal
        read, write = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                stop = StopSignal()
                os.write(write, b"ready")
                end = time.monotonic() + 60
                while not stop.requested() and time.monotonic() < end:
                    time.sleep(0.02)
                print(stop.name, flush=True)
                os._exit(0)
            os.read(read, 5)
            os._exit(0)
        os.wait()
        time.sleep(0.01)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "end of the launcher\n"


def draws(rank, world, path):
    """Draw from every generator, before and after a round trip through a file."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_patches import initialize_model_parallel

    runtime.seed_python_and_numpy(7)
    initialize_model_parallel(world, seed=7)

    def draw():
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(3)
        return random.random(), np.random.rand(), torch.rand(3).tolist(), inside.tolist()

    draw()
    torch.save(runtime.get_random_state(), f"{path}/{rank}.pt")
    first = [draw() for _ in range(3)]
    runtime.set_random_state(torch.load(f"{path}/{rank}.pt", weights_only=True))
    return first, [draw() for _ in range(3)]


def test_random_states_survive_a_file(tmp_path):
    results = run_ranks(2, draws, str(tmp_path))
    for first, again in results:
        assert first == again
    assert results[0][0][0][3] != results[1][0][0][3]  # tensor-parallel regions draw differently on each rank


def _without_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.delenv(name, raising=False)


def test_a_task_of_srun_without_its_number_is_told_so(monkeypatch):
    _without_launcher(monkeypatch)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(CoatConfigError) as caught:
        runtime.start(None)
    assert str(caught.value) == (
        "SLURM_PROCID: not set beside SLURM_STEP_NUM_TASKS, accepted: the task's number, as `srun python "
        "launch/pretrain.py ...` sets it; or RANK, WORLD_SIZE, as a launcher does"
    )


def test_needs_a_launcher(monkeypatch):
    _without_launcher(monkeypatch)
    with pytest.raises(CoatConfigError, match="RANK: not set, accepted: start with `deepspeed launch/pretrain.py"):
        runtime.start(None)
    monkeypatch.setattr("sys.argv", ["launch/finetune.py"])
    with pytest.raises(CoatConfigError, match="or `torchrun launch/finetune.py"):
        runtime.start(None)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CoatConfigError, match="^WORLD_SIZE: not set, accepted: start with"):
        runtime.start(None)
