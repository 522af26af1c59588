"""The program under its launchers: deepspeed and torchrun, signals, exit status."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common import python_path
from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import command, configuration
from tests.support import Program, free_port

ROOT = Path(__file__).parents[3]
DEEPSPEED = [
    "-m",
    "deepspeed.launcher.runner",
    "--num_gpus",
    "2",
    "--log_level",
    "error",
    "--master_port",
]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]

pytestmark = pytest.mark.skipif(
    __import__("torch").cuda.is_available(), reason="starts two ranks on the CPU"
)


ENVIRONMENT = {
    "PYTHONPATH": python_path(ROOT),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONUNBUFFERED": "1",
    "TORCHDYNAMO_DISABLE": "1",  # no rank imports torch.compile's backends, which Megatron asks for
}


def line(launcher, argv):
    return [*launcher, str(free_port()), str(ROOT / "launch" / "pretrain.py"), *map(str, argv)]


def begin(launcher, argv, folder):
    return Program(line(launcher, argv), folder, ROOT, **ENVIRONMENT)


def begin_from_nothing(launcher, argv):
    return subprocess.Popen(
        [sys.executable, *line(launcher, argv)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(process, run, steps):
    end = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < steps:
        assert process.poll() is None, output_of(process)
        assert time.monotonic() < end, "no steps in five minutes"
        time.sleep(0.05)


def output_of(process):
    """Everything printed until the last rank has gone: ranks outlive a launcher that is killed."""
    try:
        return process.communicate(timeout=300)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_killed_launcher_saves_and_torchrun_continues(work, tmp_path):
    run, save = tmp_path / "run", tmp_path / "save"
    shared = [
        configuration(tmp_path, 2),
        "--save",
        save,
        "--load",
        "auto",
        "--lr-schedule",
        "constant",
    ]
    process = begin_from_nothing(
        DEEPSPEED, ["--deepspeed", *command(work, run, *shared, steps=100_000)]
    )
    wait_for_steps(process, run, 2)
    os.kill(process.pid, signal.SIGTERM)
    text = output_of(process)
    stopped = re.search(r"stopped by end of the launcher after step (\d+); checkpoint (\S+)", text)
    assert stopped, text
    step = int(stopped[1])
    assert len(read_metrics(run)) == step and Path(stopped[2]) == save / f"step{step:08d}"

    process = begin_from_nothing(TORCHRUN, command(work, run, *shared, steps=step + 2))
    text = output_of(process)
    assert (
        process.returncode == 0
        and f"continuing after step {step} from" in text
        and f"finished {step + 2} steps" in text
    ), text
    assert [r["step"] for r in read_metrics(run)] == list(range(1, step + 3))


def test_interrupt_from_the_keyboard_saves(work, tmp_path):
    """Ctrl-C reaches every process of the group, and launchers repeat it to their ranks."""
    run, save = tmp_path / "run", tmp_path / "save"
    process = begin(
        DEEPSPEED,
        command(work, run, configuration(tmp_path, 1), "--save", save, steps=100_000),
        tmp_path,
    )
    wait_for_steps(process, run, 2)
    os.killpg(process.pid, signal.SIGINT)
    text = output_of(process)
    stopped = re.search(r"stopped by (SIGINT|SIGTERM) after step (\d+); checkpoint", text)
    assert stopped and (save / f"step{int(stopped[2]):08d}" / "manifest.json").exists(), text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_a_misspelt_option_is_one_line_of_one_rank(launcher, work, tmp_path):
    """``-m slow``: the ranks import everything before they look at their arguments."""
    process = begin_from_nothing(
        launcher,
        [*command(work, tmp_path / "run", configuration(tmp_path, 2)), "--learning-rate", "1"],
    )
    text = output_of(process)
    assert process.returncode != 0 and "usage: " not in text
    # torchrun's report may repeat it.
    assert len(re.findall("^error: .*no such option", text, re.M)) == 1, text
    assert "error: --learning-rate: no such option (did you mean --lr?)\n" in text
    assert not (tmp_path / "run").exists()
