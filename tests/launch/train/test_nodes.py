"""Two nodes: started by each launcher, one node that dies, resumes on one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common import python_path
from launch import to_universal
from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import command, configuration, losses
from tests.support import Nodes, Program, free_port

ROOT = Path(__file__).parents[3]
PRETRAIN = str(ROOT / "launch" / "pretrain.py")

pytestmark = pytest.mark.skipif(
    __import__("torch").cuda.is_available(), reason="starts two ranks on the CPU"
)

ENVIRONMENT = {
    "PYTHONPATH": python_path(ROOT),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@pytest.fixture
def nodes(tmp_path):
    with Nodes(tmp_path, namespaces=os.environ.get("NODES") != "loopback") as made:
        yield made


def torchrun(rendezvous="c10d"):
    """torchrun on each node, which meet at the first one."""
    port = free_port()

    def lines(node, number, first):
        meet = {
            "c10d": [
                "--rdzv_backend",
                "c10d",
                "--rdzv_id",
                "job",
                "--rdzv_endpoint",
                f"{first.address}:{port}",
            ],
            "static": [
                "--node_rank",
                str(number),
                "--master_addr",
                first.address,
                "--master_port",
                str(port),
            ],
        }[rendezvous]
        return [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc_per_node",
            "1",
            *meet,
            PRETRAIN,
        ], {}

    return lines


def deepspeed_without_ssh():
    port = free_port()

    def lines(node, number, first):
        hostfile = node.folder / "hostfile"
        hostfile.write_text("".join(f"node-{n} slots=1\n" for n in "ab"))
        address = ["--master_addr", first.address, "--master_port", str(port)]
        own = [
            "--hostfile",
            str(hostfile),
            "--no_ssh",
            "--node_rank",
            str(number),
            "--log_level",
            "error",
        ]
        return ["-m", "deepspeed.launcher.runner", *own, *address, PRETRAIN], {}

    return lines


def srun():
    """What srun would set for each task."""
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


def start(nodes, launcher, argv, tmp_path, more=((), ())):
    """A program on each node, with ``argv`` and ``more`` of its own."""
    started = []
    for number, node in enumerate(nodes):
        line, variables = launcher(node, number, nodes[0])
        line = [*line, *map(str, [*argv, *more[number]])]
        started.append(node.start(line, tmp_path, **ENVIRONMENT, **variables))
    return started


def finish(programs, seconds=200):
    end = time.monotonic() + seconds
    return [program.communicate(timeout=end - time.monotonic())[0] for program in programs]


def succeed(programs):
    """What programs printed that ended well."""
    texts = finish(programs)
    assert [program.returncode for program in programs] == [0] * len(programs), texts
    return texts


LAUNCHERS = {
    "torchrun, c10d": torchrun,
    "torchrun, static": lambda: torchrun("static"),
    "deepspeed --no_ssh": deepspeed_without_ssh,
    "srun": srun,
}


def wait_for_steps(programs, run, steps):
    end = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < steps:
        assert all(p.poll() is None for p in programs), "a program has ended"
        assert time.monotonic() < end, "no steps in time"
        time.sleep(0.05)


def alone(argv, tmp_path):
    """A run on one node, of one rank; what it printed."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    program = Program(
        [PRETRAIN, *map(str, argv)],
        tmp_path,
        ROOT,
        MASTER_PORT=str(free_port()),
        **ENVIRONMENT,
        **ranks,
    )
    return succeed([program])[0]


def test_a_node_dies_and_the_run_goes_on_with_one(nodes, work, tmp_path):
    run, save = tmp_path / "run", tmp_path / "save"
    shared = [
        "--save",
        save,
        "--save-interval",
        "2",
        "--lr-schedule",
        "constant",
        "--log-level",
        "info",
    ]
    argv = command(work, run, configuration(tmp_path, 2), *shared, steps=100_000)
    programs = start(nodes, srun(), argv, tmp_path)
    wait_for_steps(programs, run, 5)
    os.kill(programs[1].pid, signal.SIGKILL)
    dead = time.monotonic()
    first, _ = finish(programs)
    assert time.monotonic() - dead < 60
    assert programs[0].returncode == 4, first
    (line,) = [x for x in first.splitlines() if "error: " in x]
    assert line.startswith(
        "error: a collective failed, because rank 1 (node-b) has ended or does not answer: "
    ), first

    step = 2 * ((len(read_metrics(run))) // 2)
    assert to_universal.main(["--load", str(save), "--output", str(tmp_path / "universal")]) == 0
    more = configuration(tmp_path, 2, train_batch_size=8, gradient_accumulation_steps=4)
    again = [
        "--load",
        tmp_path / "universal",
        "--save",
        tmp_path / "more",
        "--lr-schedule",
        "constant",
    ]
    text = alone(command(work, run, more, *again, steps=step + 2), tmp_path)
    assert f"continuing after step {step} from" in text and f"finished {step + 2} steps" in text, (
        text
    )
    assert [r["step"] for r in read_metrics(run)] == list(range(1, step + 3))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_train(launcher, nodes, work, tmp_path):
    """Once whole, and once in two parts; to the bit the same."""
    whole, parts, config = tmp_path / "whole", tmp_path / "parts", configuration(tmp_path, 2)
    for run, save, more in (
        (whole, "save", []),
        (parts, "parts-save", ["--load", "auto", "--stop-at-step", 2]),
        (parts, "parts-save", ["--load", "auto"]),
    ):
        argv = command(work, run, config, "--save", tmp_path / save, *more, steps=4)
        programs = start(nodes, LAUNCHERS[launcher](), argv, tmp_path)
        texts = finish(programs)
        assert [p.returncode for p in programs] == [0, 0], texts
        assert "".join(texts).count("after step 2;" if 2 in more else "finished 4 steps") == 1, (
            "logs are those of rank 0"
        )
    assert losses(parts) == losses(whole)


@pytest.mark.slow
def test_folders_that_nodes_do_not_share_are_found_at_the_start(nodes, work, tmp_path):
    argv = command(work, tmp_path / "run", configuration(tmp_path, 2), "--save", "disk", steps=2)
    programs = start(nodes, srun(), argv, tmp_path)
    texts = finish(programs)
    assert [p.returncode for p in programs] == [2, 2], texts
    who = (
        r"--save: got disk, which rank 0 \(host node-a\) and rank 1 \(host node-b\) do not "
        r"share, accepted: "
    )
    assert len(re.findall(who, "".join(texts))) == 1, texts
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "torchrun, static"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_fails_at_its_start_lets_no_other_wait(
    failing, launcher, nodes, work, tmp_path
):
    argv = command(work, tmp_path / "run", configuration(tmp_path, 2), steps=2)
    begin, wrong = time.monotonic(), ("--data", "nowhere")
    more = (wrong, ()) if failing == 0 else ((), wrong)
    programs = start(nodes, LAUNCHERS[launcher](), argv, tmp_path, more)
    texts = finish(programs)
    assert time.monotonic() - begin < 150
    assert all(program.returncode for program in programs)
    assert f"error: rank {failing} (host node-{'ab'[failing]}): --data: nowhere" in texts[0], texts


SHELL = 'sh -c "$line"'


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
def test_a_hostfile(nodes, work, tmp_path):
    """``deepspeed --hostfile``, with a pdsh and an ssh that know two hosts."""
    tools = tmp_path / "tools"
    tools.mkdir()
    cases = "\n".join(f"    {node.host}) {node.within(SHELL)} & ;;" for node in nodes)
    executable(
        tools / "pdsh",
        f"""#!/bin/sh
while :; do case $1 in -S) shift ;; -f) shift 2 ;; -w) hosts=$2; shift 2 ;; *) break ;; esac; done
number=0 running= worst=0
for host in $(echo "$hosts" | tr , " "); do
    line=$(echo "$*" | sed "s/%n/$number/")
    case $host in
{cases}
    esac
    running="$running $!" number=$((number + 1))
done
for one in $running; do wait "$one" || worst=$?; done
exit $worst
""",
    )
    executable(tools / "ssh", f"#!/bin/sh\necho {nodes[0].address}\n")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{node.host} slots=1\n" for node in nodes))
    run = tmp_path / "run"
    argv = command(work, run, configuration(tmp_path, 2), "--save", tmp_path / "save", steps=2)
    line = [
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        str(hostfile),
        "--master_port",
        str(free_port()),
    ]
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    variables = {k: v for k, v in nodes[0].environment.items() if k != "COAT_HOST"}
    program = Program(
        [*line, PRETRAIN, *map(str, argv)],
        tmp_path,
        ROOT,
        ranks=False,
        PATH=path,
        **ENVIRONMENT,
        **variables,
    )
    text = finish([program], 400)[0]
    assert program.returncode == 0 and text.count("finished 2 steps") == 1, text
    assert (tmp_path / "save" / "latest").read_text() == "step00000002"


@pytest.mark.slow
def test_the_script_for_slurm(nodes, work, tmp_path):
    """``examples/slurm.sh`` with an srun that starts one task on each of two nodes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    tasks = "\n".join(
        f"SLURM_PROCID={n} SLURM_LOCALID=0 SLURM_NODEID={n} {node.within(SHELL)} & "
        'running="$running $!"'
        for n, node in enumerate(nodes)
    )
    executable(
        tools / "srun",
        f"""#!/bin/sh
while case $1 in -*) true ;; *) false ;; esac; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=4711
export SLURM_STEP_NODELIST='node-a,node-b'
line="cd $(pwd) && $*" running= worst=0
{tasks}
for one in $running; do wait "$one" || worst=$?; done
exit $worst
""",
    )
    given = {
        "PYTHON": sys.executable,
        "CONFIG": configuration(tmp_path, 2),
        "MODEL": str(work / "model.json"),
    }
    given |= {"DATA": str(work / "data"), "STEPS": "3", "RUN": str(tmp_path / "run"), **ENVIRONMENT}
    given |= {k: v for k, v in nodes[0].environment.items() if k != "COAT_HOST"}
    if nodes[0].space is None:
        given["MASTER_ADDR"] = nodes[0].address
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    line = ["bash", "examples/slurm.sh", "--split", "80,10,10", "--warmup-steps", "1"]
    environment = {**os.environ, **given, "PATH": path}
    done = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0 and "finished 3 steps" in done.stdout, done.stdout + done.stderr
    assert len(read_metrics(tmp_path / "run")) == 3
