"""Signals, random states, and the loss of a step."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coat_dist import CoatConfigError
from launch.train import runtime
from launch.train.steps import MicroBatches


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, "0"), (signal.SIGINT, "1")])
def test_first_signal_is_a_request_and_its_echo_nothing(handlers, monkeypatch, capfd, number, rank):
    monkeypatch.setenv("RANK", rank)
    stop = runtime.StopSignal(echo_seconds=60)
    assert not stop.requested()
    for again in (number, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), again)
    assert stop.requested() and stop.name == signal.Signals(number).name
    line = "SIGTERM: stopping after this step; a second one stops at once\n"
    assert capfd.readouterr().err == (line if rank == "0" else "")


def run(program):
    line = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


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
    done = run(program)
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
    done = run(program)
    assert done.stdout == "end of the launcher\n"


def test_needs_a_launcher(monkeypatch, no_launcher):
    monkeypatch.setattr("sys.argv", ["launch/pretrain.py"])
    with pytest.raises(
        CoatConfigError, match=r"^RANK: not set, accepted: start with `deepspeed launch/pretrain.py"
    ):
        runtime.start(None)


def test_a_steps_loss_is_there_before_the_optimizer_begins():
    """As the loop reads it while a GPU still writes weights."""
    operations, losses = [], torch.rand(3)

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(func)
            return func(*args, **(kwargs or {}))

    engine = SimpleNamespace(backward=lambda loss: None, step=operations.clear)
    with Record():
        mean = MicroBatches(engine, lambda _, loss: loss, 3, torch.device("cpu")).step(iter(losses))
    assert operations == [], "these would run after the optimizer"
    assert mean.item() == pytest.approx(losses.double().mean().item(), rel=1e-15)


def test_imports_of_megatron_warn_of_nothing_in_programs():
    code = "import launch, megatron.core.models.gpt, megatron.core.optimizer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not re.search("apex|transformer engine", done.stderr, re.IGNORECASE), done.stderr
