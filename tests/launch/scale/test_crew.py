"""The program on real ranks over gloo: sub-groups, measurements, failures, launchers."""

import json
from pathlib import Path

import pytest
import torch

from launch import scaling
from launch.scale import collective_timing
from launch.scale.crew import Crew
from launch.scale.tables import collectives, steps
from tests.launch.train.test_nodes import ENVIRONMENT
from tests.support import Program, forked_programs, free_port, run_ranks

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="starts ranks on the CPU")
SMALL = [
    "--model-override",
    "num_layers=1",
    "hidden_size=64",
    "ffn_hidden_size=128",
    "seq_length=32",
]
TINY = ["--model", "tiny", "--micro-batch", "1", "--steps", "3", "--warmup", "1", *SMALL]


@pytest.mark.long
def test_under_a_launcher(tmp_path):
    """Also the vocabulary that the model lacks."""
    out = tmp_path / "out"
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    argv = [
        *TINY,
        "--output",
        str(out),
        "--message-sizes",
        "4KiB",
        "1MiB",
        "--deepspeed_config",
        "zero2",
    ]
    process = Program(
        [*launcher, str(ROOT / "launch" / "scaling.py"), *argv], tmp_path, ROOT, **ENVIRONMENT
    )
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "vocabulary 32000" in text, text
    assert {p.name for p in out.iterdir()} == {"measured.json", "scaling.md"}
    measured = json.loads((out / "measured.json").read_text())
    for mode in ("weak", "strong"):
        assert [(r["variant"], r["ranks"]) for r in steps(measured, mode)] == [
            ("zero2", 1),
            ("zero2", 2),
        ]
    assert [r["kind"] for r in collectives(measured)] == [*collective_timing.KINDS]
    assert (out / "scaling.md").read_text() in text
    ends = [one["first_loss"] for one in measured["records"] if "first_loss" in one]
    # log(32000) is 10.4: the model was trained.
    assert len(ends) == 2 and all(9 < loss < 12 for loss in ends)


@pytest.mark.slow
def test_two_nodes(tmp_path):
    """Two launchers that meet: what lies between them is measured with a rank of each."""
    port, processes = str(free_port()), []
    for node in ("0", "1"):
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node_rank",
            node,
            "--nproc_per_node",
            "1",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            port,
        ]
        program = [
            str(ROOT / "launch" / "scaling.py"),
            "--only",
            "collectives",
            "--message-sizes",
            "4KiB",
            "1MiB",
        ]
        (tmp_path / node).mkdir()
        argv = [*launcher, *program, "--output", str(tmp_path / "out")]
        processes.append(Program(argv, tmp_path / node, ROOT, **ENVIRONMENT))
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    found = json.loads((tmp_path / "out" / "measured.json").read_text())
    assert found["identity"]["nodes"] == 2
    assert {(r["kind"], r["where"]) for r in collectives(found)} == {
        (kind, "between nodes") for kind in collective_timing.KINDS
    }
    assert "# Scaling" in texts[0] and "# Scaling" not in texts[1]


def failures(rank, world):
    """A measurement that a rank cannot do, and one that is not disturbed."""
    shared, two = {"nodes": 1, "a_node": 2, "timeout": 60}, Crew(1, 2)
    identity = {
        "settings": {"coat": {"bf16": {}, "optimizer": {}}},
        "model": {},
        "options": {},
        "micro_batch": 1,
    }
    broken = {"what": "training", "variant": "coat", "accumulations": [1], "identity": identity}
    with forked_programs():
        failed = two.measure(0, {**shared, **broken})
        return failed, two.measure(1, {**shared, "what": "collectives", "sizes": [4096]})


@pytest.mark.long
def test_a_measurement_that_fails_fails_alone():
    broken, good = run_ranks(1, failures)[0]
    assert (
        broken["failed"].startswith("rank ") and "model.num_layers: missing" in broken["failed"]
    ), broken
    assert len(good["samples"]) == len(collective_timing.KINDS)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--output", "o"], "--model: missing, accepted: a description"),
        ([*TINY, "--gpus", "2", "--ranks", "4"], "--ranks: got 4, accepted: up to 2, the ranks"),
        ([*TINY, "--gpus", "2", "--tensor-parallel", "3"], "--tensor-parallel: got 3, accepted: "),
        ([*TINY, "--ranks", "1,2"], "--ranks: got '1,2', accepted: a whole number"),
        (
            [*TINY, "--message-sizes", "4 apples"],
            "--message-sizes: got '4 apples', accepted: a size",
        ),
        ([*TINY, "--output", "/dev/null/x"], "[Errno "),
        ([*TINY, "--predict", "64"], "--predict: no such option"),
        (["--measured", "none"], "[Errno 2] No such file or directory: 'none/measured.json'"),
    ],
)
def test_errors_are_one_line(argv, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = scaling.main(argv)
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert status == 2 and not out and err.startswith(f"error: {error}") and err.count("\n") == 1, (
        err
    )
    assert not list(tmp_path.iterdir())


def test_earlier_measurements_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "measured.json").write_text("{}")
    assert scaling.main([*TINY, "--output", str(tmp_path)]) == 2
    assert (
        "which holds measurements, accepted: another folder, or --overwrite"
        in capsys.readouterr().err
    )
    assert (tmp_path / "measured.json").read_text() == "{}"
