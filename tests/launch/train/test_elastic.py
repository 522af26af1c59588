"""torchrun starts ranks again after one has died, as many or fewer: the run goes on by ``--load
auto``.
"""

import re
import time

import psutil
import pytest

from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import command, configuration
from tests.launch.train.test_launchers import ENVIRONMENT, ROOT, output_of, wait_for_steps
from tests.support import Program, free_port

pytestmark = pytest.mark.skipif(
    __import__("torch").cuda.is_available(), reason="starts ranks on the CPU"
)


def torchrun(folder, options, argv, **environment):
    start = [
        "-m",
        "torch.distributed.run",
        *map(str, options),
        str(ROOT / "launch" / "pretrain.py"),
        *map(str, argv),
    ]
    return Program(start, folder, ROOT, **ENVIRONMENT, **environment)


def ranks_of(launcher):
    """Its ranks, whatever number they have on their node."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return {p.name(): p for p in children if p.name().startswith("rank ")}


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_the_run_goes_on(work, tmp_path):
    run, save = tmp_path / "run", tmp_path / "save"
    more = ["--save", save, "--save-interval", "4", "--load", "auto", "--keep-last", "2"]
    argv = command(work, run, configuration(tmp_path, 2), *more, steps=40)
    options = [
        "--nproc_per_node",
        2,
        "--max-restarts",
        1,
        "--master_port",
        free_port(),
        "--monitor-interval",
        0.1,
    ]
    launcher = torchrun(tmp_path, options, argv)
    wait_for_steps(launcher, run, 6)
    ranks_of(launcher)["rank 1"].kill()
    text = output_of(launcher)
    assert launcher.returncode == 0 and "finished 40 steps" in text, text
    assert "continuing after step " in text and "converting" not in text, text
    assert re.search(
        r"error: a collective failed, because rank 1 \(\S+\) has ended or does not answer: ", text
    ), text
    records = read_metrics(run)
    assert [r["step"] for r in records] == list(range(1, 41))
    assert [r["consumed_samples"] for r in records] == [8 * step for step in range(1, 41)]


def launchers_of_one_rank(folder, argv, **environment):
    """A function that starts torchrun on another node of a job, which goes on with one node or
    two.
    """
    port = free_port()
    quick = "last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=3"
    options = [
        "--nnodes",
        "1:2",
        "--nproc_per_node",
        1,
        "--max-restarts",
        3,
        "--monitor-interval",
        0.2,
    ]
    options += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        port,
        "--rdzv-conf",
        quick,
        "--rdzv-endpoint",
    ]
    return lambda: torchrun(folder, [*options, f"127.0.0.1:{port}"], argv, **environment)


@pytest.mark.slow
def test_a_node_that_goes_leaves_the_run_to_the_other(work, tmp_path):
    """Two launchers of one rank each, then one of them: first two ranks, then one, in one run."""
    run, save = tmp_path / "run", tmp_path / "save"
    more = ["--save", save, "--save-interval", "4", "--load", "auto"]
    node = launchers_of_one_rank(
        tmp_path, command(work, run, configuration(tmp_path, 2), *more, steps=80)
    )
    first = node()  # has the store
    time.sleep(1.0)
    second = node()
    wait_for_steps(first, run, 6)
    for process in (*ranks_of(second).values(), psutil.Process(second.pid)):
        process.kill()  # as when its host goes
    text = output_of(first)
    output_of(second)
    assert first.returncode == 0 and "finished 80 steps" in text, text
    assert (
        text.count("converting ") == 1 and "parallel.data: checkpoint has 2, this run has 1" in text
    ), text
    assert "now 1, with micro-batches of 2 and 4 of them a step" in text, text
    records = read_metrics(run)
    assert [r["step"] for r in records] == list(range(1, 81))
    assert [r["consumed_samples"] for r in records] == [8 * r["step"] for r in records]
