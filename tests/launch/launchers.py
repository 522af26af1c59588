"""pretrain.py under its launchers: commands, environments, waiting for steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.common import python_path
from launch.train.metrics import read_metrics
from tests.support import Program, free_port

ROOT = Path(__file__).parents[2]
PRETRAIN = str(ROOT / "launch" / "pretrain.py")
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--log_level", "error"]
DEEPSPEED += ["--master_port"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
ENVIRONMENT = {
    "PYTHONPATH": python_path(ROOT),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    # No rank imports torch.compile's backends, which Megatron asks for.
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def line(launcher, argv):
    return [*launcher, str(free_port()), PRETRAIN, *map(str, argv)]


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


def torchrun(folder, options, argv):
    """torchrun with options of its own."""
    start = ["-m", "torch.distributed.run", *map(str, options), PRETRAIN, *map(str, argv)]
    return Program(start, folder, ROOT, **ENVIRONMENT)


def alone(argv, folder):
    """A run of one rank without a launcher; what it printed."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    port = {"MASTER_PORT": str(free_port())}
    program = Program([PRETRAIN, *map(str, argv)], folder, ROOT, **port, **ENVIRONMENT, **ranks)
    text = output_of(program)
    assert program.returncode == 0, text
    return text


def srun():
    """What srun would set for each task of two nodes."""
    port = free_port()

    def lines(node, number, first):
        task = {
            "PROCID": number,
            "LOCALID": 0,
            "NODEID": number,
            "NTASKS": 2,
            "STEP_NUM_TASKS": 2,
            "STEP_ID": 0,
        }
        task |= {"JOB_ID": port, "STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": "node-a,node-b"}
        own = {} if node.space else {"MASTER_ADDR": first.address}  # there are no such names
        return [PRETRAIN], {**own, **{f"SLURM_{k}": str(v) for k, v in task.items()}}

    return lines


def start_on(nodes, launcher, argv, folder, more=((), ())):
    """A program on each node, with ``argv`` and ``more`` of its own."""
    started = []
    for number, node in enumerate(nodes):
        words, variables = launcher(node, number, nodes[0])
        words = [*words, *map(str, [*argv, *more[number]])]
        started.append(node.start(words, folder, **ENVIRONMENT, **variables))
    return started


def wait_for_steps(programs, run, steps):
    end = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < steps:
        for program in programs:
            assert program.poll() is None, output_of(program)
        assert time.monotonic() < end, "no steps in five minutes"
        time.sleep(0.05)


def output_of(process, seconds=300):
    """Everything printed until the last rank has gone: ranks outlive a launcher that is killed."""
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ranks_of(launcher):
    """Its ranks, whatever number they have on their node."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return {p.name(): p for p in children if p.name().startswith("rank ")}
