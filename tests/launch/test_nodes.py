"""Two nodes: started by each launcher, checkpoints on shared and on own disks, one node that dies, resumes on one."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from launch.training.metrics import read_metrics
from tests.launch.pretrain_runs import command, configuration, losses
from tests.support import Nodes, free_port

ROOT = Path(__file__).parents[2]
PRETRAIN = str(ROOT / "launch" / "pretrain.py")

pytestmark = pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="starts two ranks on the CPU")

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@pytest.fixture
def nodes(tmp_path):
    with Nodes(tmp_path) as made:
        yield made


def torchrun(rendezvous="c10d"):
    """torchrun on each node, which meet at the first one."""
    port = free_port()

    def lines(node, number, first):
        meet = {
            "c10d": ["--rdzv_backend", "c10d", "--rdzv_id", "job", "--rdzv_endpoint", f"{first.address}:{port}"],
            "static": ["--node_rank", str(number), "--master_addr", first.address, "--master_port", str(port)],
        }[rendezvous]
        return ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *meet, PRETRAIN], {}

    return lines


def deepspeed_without_ssh():
    port = free_port()

    def lines(node, number, first):
        hostfile = node.folder / "hostfile"
        hostfile.write_text("".join(f"node-{n} slots=1\n" for n in "ab"))
        address = ["--master_addr", first.address, "--master_port", str(port)]
        own = ["--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(number), "--log_level", "error"]
        return ["-m", "deepspeed.launcher.runner", *own, *address, PRETRAIN], {}

    return lines


def srun():
    """What srun would set for each task."""
    port = free_port()

    def lines(node, number, first):
        task = {"PROCID": number, "LOCALID": 0, "NODEID": number, "NTASKS": 2, "STEP_NUM_TASKS": 2, "STEP_ID": 0}
        task |= {"JOB_ID": port, "STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": "node-a,node-b"}
        own = {} if node.space else {"MASTER_ADDR": first.address}  # there are no such names
        return [PRETRAIN], {**own, **{f"SLURM_{k}": str(v) for k, v in task.items()}}

    return lines


def start(nodes, launcher, argv, tmp_path):
    started = []
    for number, node in enumerate(nodes):
        line, variables = launcher(node, number, nodes[0])
        started.append(node.start([*line, *map(str, argv)], tmp_path, **ENVIRONMENT, **variables))
    return started


def finish(programs, seconds=60):
    end = time.monotonic() + seconds
    return [program.communicate(timeout=end - time.monotonic())[0] for program in programs]


LAUNCHERS = {
    "torchrun, c10d": torchrun,
    "torchrun, static": lambda: torchrun("static"),
    "deepspeed --no_ssh": deepspeed_without_ssh,
    "srun": srun,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_train(launcher, nodes, work, tmp_path):
    run = tmp_path / "run"
    programs = start(
        nodes,
        LAUNCHERS[launcher](),
        command(work, run, configuration(tmp_path, 2), "--save", tmp_path / "save", steps=2),
        tmp_path,
    )
    texts = finish(programs)
    print(*texts, sep="\n-----\n")
    assert [p.returncode for p in programs] == [0, 0], texts
    assert "finished 2 steps" in "".join(texts) and len(read_metrics(run)) == 2
