"""Two nodes: started by each launcher, folders that they do not share, a node that fails."""

import os
import subprocess
import sys
import time

import pytest

from launch.train.metrics import read_metrics
from tests.launch.launchers import ENVIRONMENT, PRETRAIN, ROOT, srun, start_on
from tests.launch.pretrain_runs import command, configuration, losses
from tests.support import Nodes, Program, free_port

pytestmark = pytest.mark.skipif(
    __import__("torch").cuda.is_available(), reason="starts two ranks on the CPU"
)


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


def finish(programs, seconds=200):
    end = time.monotonic() + seconds
    return [program.communicate(timeout=end - time.monotonic())[0] for program in programs]


LAUNCHERS = {
    "torchrun, c10d": torchrun,
    "torchrun, static": lambda: torchrun("static"),
    "deepspeed --no_ssh": deepspeed_without_ssh,
    "srun": srun,
}


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
        programs = start_on(nodes, LAUNCHERS[launcher](), argv, tmp_path)
        texts = finish(programs)
        assert [p.returncode for p in programs] == [0, 0], texts
        assert "".join(texts).count("after step 2;" if 2 in more else "finished 4 steps") == 1, (
            "logs are those of rank 0"
        )
    assert losses(parts) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "torchrun, static"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_fails_at_its_start_lets_no_other_wait(
    failing, launcher, nodes, work, tmp_path
):
    argv = command(work, tmp_path / "run", configuration(tmp_path, 2), steps=2)
    begin, wrong = time.monotonic(), ("--data", "nowhere")
    more = (wrong, ()) if failing == 0 else ((), wrong)
    programs = start_on(nodes, LAUNCHERS[launcher](), argv, tmp_path, more)
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
