"""The program on real ranks over gloo: sub-groups, measurements, failures, launchers."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.common import python_path
from launch import scaling
from launch.scale import bench, crew
from tests.support import Program, forked_programs, free_port, run_ranks

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="starts ranks on the CPU")
ENVIRONMENT = {
    "PYTHONPATH": python_path(ROOT),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCHDYNAMO_DISABLE": "1",
}
TINY = ["--model", "tiny", "--vocab-size", "128", "--micro-batch", "1", "--steps", "3", "--warmup", "1",
        "--message-sizes", "4KiB,1MiB", "--model-override", "num_layers=1", "hidden_size=64", "ffn_hidden_size=128",
        "seq_length=32"]  # fmt: skip


def command(folder, *more):
    return [*TINY, "--output", str(folder), *more]


@pytest.mark.long
def test_under_a_launcher_and_again(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    argv = [*launcher, str(ROOT / "launch" / "scaling.py"), *command(out, "--variants", "coat", "--predict", "4,8")]
    process = Program(argv, tmp_path, ROOT, **ENVIRONMENT)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0, text
    assert {p.name for p in out.iterdir()} == {"measured.json", "scaling.md", "scaling.json", "scaling.png"}
    said = json.loads((out / "scaling.json").read_text())
    assert [(r["mode"], r["ranks"]) for r in said["steps"]] == [("weak", 1), ("weak", 2), ("strong", 1), ("strong", 2)]
    assert [r["kind"] for r in said["collectives"]] == [*bench.KINDS]
    assert [(r["from"], r["ranks"], r["measured"] is None) for r in said["predictions"]] == [
        (1, 2, False), (2, 4, True), (2, 8, True),
    ]  # fmt: skip
    measured = json.loads((out / "measured.json").read_text())
    ends = [one["first_loss"] for one in measured["records"] if "first_loss" in one]
    assert len(ends) == 2 and all(4 < loss < 6 for loss in ends)  # log(128) is 4.85: the model was built and trained

    # The same again, without a launcher: nothing is left to be measured.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = (out / "measured.json").read_bytes()
    further = ["--predict", "16,32", "--link", "nic=1GB/s", "--gpus", "2"]
    assert scaling.main(command(out, "--variants", "coat", *further)) == 0
    text = capsys.readouterr().out
    assert text.count("measured before") == 3 and "| coat | 2 | 32 |" in text
    assert (out / "measured.json").read_bytes() == before


@pytest.mark.slow
def test_two_nodes(tmp_path):
    """``-m slow``: two launchers that meet: what lies between them is measured with a rank of each."""
    port, processes = str(free_port()), []
    for node in ("0", "1"):
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", node, "--nproc_per_node", "1",
                    "--master_addr", "127.0.0.1", "--master_port", port]  # fmt: skip
        program = [str(ROOT / "launch" / "scaling.py"), "--only", "collectives", "--message-sizes", "4KiB,1MiB"]
        (tmp_path / node).mkdir()
        argv = [*launcher, *program, "--output", str(tmp_path / "out")]
        processes.append(Program(argv, tmp_path / node, ROOT, **ENVIRONMENT))
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    said = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert said["identity"]["nodes"] == 2 and "nodes of 1" in said["links"]
    assert {(r["kind"], r["where"]) for r in said["collectives"]} == {(kind, "between nodes") for kind in bench.KINDS}
    assert "# Scaling" in texts[0] and "# Scaling" not in texts[1]


@pytest.mark.long
def test_tiny_has_a_vocabulary(tmp_path, monkeypatch, capsys):
    """``scaling.py --model tiny`` runs as it stands: tokens are random, and so is no vocabulary needed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = ["num_layers=1", "hidden_size=64", "ffn_hidden_size=128", "seq_length=32"]
    argv = ["--model", "tiny", "--model-override", *small, "--only", "training", "--variants", "coat", "--steps", "1"]
    assert scaling.main([*argv, "--warmup", "0"]) == 0
    assert "vocabulary 32000" in capsys.readouterr().out and (tmp_path / "runs/scaling/measured.json").exists()


def a_crew_of_two(rank, world):
    """What is raised where a rank cannot run, and where one is killed; then a measurement that is not disturbed."""
    job = {"what": "collectives", "sizes": [4096], "timeout": 60}
    real, said = crew._start, []

    def killed(job, one, members, output):
        process = real(job, one, members, output)
        if one.rank == 1:
            process.kill()
        return process

    with forked_programs(), mock.patch.object(crew, "_GRACE", 0.5):
        two = crew.Crew(2)
        broken = {**job, "what": "training", "settings": {"bf16": {}, "optimizer": {}}, "model": {}, "options": []}
        for what, start in (({**broken, "micro": 1, "accumulations": [1]}, real), (job, killed)):
            with mock.patch.object(crew, "_start", start):
                try:
                    two.measure(what, [0, 1])
                except crew.Failed as problem:
                    said.append(str(problem))
        return said, two.measure(job, [0, 1])


@pytest.mark.long
def test_a_measurement_that_fails_fails_alone():
    (broken, killed), good = run_ranks(1, a_crew_of_two)[0]
    assert broken.startswith("rank ") and "model.num_layers: missing" in broken, broken
    assert killed.startswith("rank 1 on ") and "status -9" in killed
    assert len(good["samples"]) == len(bench.KINDS)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--output", "o"], "--model: missing, accepted: a description"),
        ([*TINY, "--output", "o", "--gpus", "2", "--ranks", "4"], "--ranks: got 4, accepted: up to 2, the ranks"),
        ([*TINY, "--output", "o", "--gpus", "2", "--tensor-parallel", "3"], "--tensor-parallel: got 3, accepted: "),
        ([*TINY, "--output", "o", "--ranks", "1,x"], "--ranks: got '1,x', accepted: numbers of ranks"),
        ([*TINY, "--output", "o", "--variants", "fp8"], "--variants: got 'fp8', accepted: coat, bf16"),
        ([*TINY, "--output", "o", "--link", "nvlink"], "--link: got 'nvlink', accepted: NAME=BANDWIDTH[,LATENCY]"),
        ([*TINY, "--output", "o", "--message-sizes", "4 apples"], "--message-sizes: got '4 apples', accepted: sizes"),
        ([*TINY, "--output", "o", "--steps", "0"], "--steps: got 0, accepted: an integer >= 1"),
        ([*TINY, "--output", "/dev/null/x"], "--output: got /dev/null/x, accepted: a folder to write to"),
        (["--paper", "--measured", "o"], "--measured: got 'o', accepted: not with --paper"),
        (["--paper", "--gpus", "8"], "--gpus: got 8, accepted: not with --paper, which measures nothing"),
        (["--paper", "--tensor-parallel", "2"], "--tensor-parallel: got 2, accepted: not with --paper"),
        (
            ["--measured", "o", "--micro-batch", "2"],
            "--micro-batch: got 2, accepted: not with --measured, which has its",
        ),
        (["--measured", "o", "--no-strong"], "--no-strong: got True, accepted: not with --measured"),
        (
            ["--only", "collectives", "--output", "o", "--predict", "8"],
            "--predict: got (8,), accepted: not with --only collectives",
        ),
        (
            ["--only", "collectives", "--output", "o", "--model", "nonsense"],
            "--model: got 'nonsense', accepted: not with --only collectives",
        ),
        (
            ["--model", "tiny-moe", "--vocab-size", "128", "--output", "o"],
            "model.num_moe_experts: got 8, accepted: null",
        ),
    ],
)
def test_what_is_typed_wrong_is_one_line(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = scaling.main(argv)
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert status == 2 and not out and err.startswith(f"error: {said}") and err.count("\n") == 1, err
    assert not list(tmp_path.iterdir())


def test_measurements_of_another_run_stay(tmp_path, capsys):
    from launch.scale.records import Records

    Records(tmp_path, {"model": "a", "device": "cpu"}).add({"what": "x"}, {"ranks": 1, "a_node": 1})
    assert Records(tmp_path, {"model": "a", "device": "cpu"}).done({"what": "x"})
    again = Records(tmp_path, {"model": "a", "device": "cpu"})
    for steps in (5, 10):  # the longer one takes the place of the other, which its tables would count as well
        again.add({"what": "training", "variant": "coat", "group": [0], "steps": steps}, {"ranks": 1, "a_node": 1})
    assert [one["key"].get("steps") for one in again.found] == [None, 10]
    again.add(
        {"what": "training", "variant": "coat", "group": [0], "steps": 20}, {"ranks": 1, "a_node": 1, "failed": "x"}
    )
    assert [one["key"].get("steps") for one in again.found] == [None, 10, 20]
    with pytest.raises(ValueError, match="holds measurements with another model, accepted: another folder, or --over"):
        Records(tmp_path, {"model": "b", "device": "cpu"})
    assert not Records(tmp_path, {"model": "b", "device": "cpu"}, fresh=True).found
