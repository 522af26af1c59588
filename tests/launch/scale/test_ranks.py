"""The program on real ranks over gloo: sub-groups, what is measured, a size that is held out, failures, launchers."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.common import python_path
from launch import scaling
from launch.scale import bench, crew
from launch.scale.links import Link
from launch.scale.network import of_records
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
KNOWN = Link("known", 4e9, 25e-6)


class Clock:
    """Goes on by what the link says, whatever the machine does meanwhile."""

    now = 0.0

    def perf_counter(self):
        return self.now


def over_a_known_link(rank, world):
    """Collectives of gloo, timed by a clock that obeys the link."""
    real, clock = bench._call, Clock()

    def known(kind, size, device):
        call, ranks = real(kind, size, device), 2 if kind == "p2p" else world
        seconds = KNOWN.seconds(kind, ranks, size) * (2 if kind == "p2p" else 1)

        def both(later):
            call(False)
            clock.now += seconds

        return both

    halves = {"kind": "all_reduce", "size": 1, "computing": 1.0, "collective": 1.0, "together": 1.5}
    with (
        mock.patch.object(bench, "_call", known),
        mock.patch.object(bench, "time", clock),
        mock.patch.object(bench, "_times", lambda size, device: 1),
        mock.patch.object(bench, "_beside_products", lambda kind, size, device: {**halves, "kind": kind}),
    ):
        return bench.measure(torch.device("cpu"), (2**12, 2**16, 2**20))


@pytest.mark.long
def test_four_ranks_are_predicted_from_two_over_gloo():
    """Collectives measured on real ranks: latency, bandwidth, and the range that is stated for twice as many ranks."""
    records = {n: {"ranks": n, "a_node": n, **run_ranks(n, over_a_known_link)[0]} for n in (2, 4)}
    from_two = of_records([records[2]], 4, {})
    both = of_records(list(records.values()), 4, {})
    assert not records[2]["missing"] and not records[4]["missing"]
    for one in records[4]["samples"]:
        if one["kind"] != "p2p":
            said = from_two.seconds(one["kind"], from_two.group(4), one["size"])
            assert said.holds(one["seconds"]), (one, said)
    for kind, found in both.inside.items():
        assert found.bandwidth == pytest.approx(KNOWN.bandwidth, rel=1e-3), kind
        assert found.latency == pytest.approx(KNOWN.latency, rel=1e-3), kind
    assert both.overlap["all_reduce"].part == pytest.approx(0.5)


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
    assert [r["kind"] for r in said["collectives"]] == [*bench.KINDS] and [r["ranks"] for r in said["predictions"]] == [
        4,
        8,
    ]
    measured = json.loads((out / "measured.json").read_text())
    ends = [one["first_loss"] for one in measured["records"] if "first_loss" in one]
    assert len(ends) == 2 and all(4 < loss < 6 for loss in ends)  # log(128) is 4.85: the model was built and trained

    # The same again, without a launcher: nothing is left to be measured.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = (out / "measured.json").read_bytes()
    further = ["--predict", "16,32", "--link", "nic=1GB/s", "--gpus", "2"]
    assert scaling.main(command(out, "--variants", "coat", *further)) == 0
    text = capsys.readouterr().out
    assert text.count("measured before") == 3 and "| coat | 32 |" in text
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
    assert said["identity"]["nodes"] == 2 and said["gpus_per_node"] == 1
    assert {(row["kind"], row["where"]) for row in said["collectives"]} == {(kind, "between") for kind in bench.KINDS}
    assert "# Scaling" in texts[0] and "# Scaling" not in texts[1]


@pytest.mark.slow
def test_a_held_out_size_of_training(tmp_path):
    """``-m slow``: 1, 2 and 4 ranks without a launcher, more of them than cores on most machines."""
    argv = [str(ROOT / "launch" / "scaling.py"), *command(tmp_path / "out", "--gpus", "4", "--steps", "10")]
    process = Program(argv, tmp_path, ROOT, **ENVIRONMENT)
    text = process.communicate(timeout=600)[0]
    assert process.returncode == 0, text
    rows = json.loads((tmp_path / "out" / "scaling.json").read_text())["held_out"]
    steps = [row for row in rows if row["what"].startswith("step")]
    assert steps and {row["ranks"] for row in rows} == {4} and any(row["inside"] for row in steps), text


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
        (["--model", "tiny"], "--output: missing, accepted: a folder"),
        (["--output", "o"], "--model: missing, accepted: a description"),
        (["--model", "tiny", "--output", "o"], "model.vocab_size: got null, accepted: a number, or --vocab-size"),
        ([*TINY, "--output", "o", "--gpus", "2", "--ranks", "4"], "--ranks: got 4, accepted: up to 2, the ranks"),
        ([*TINY, "--output", "o", "--gpus", "2", "--tensor-parallel", "3"], "--tensor-parallel: got 3, accepted: "),
        ([*TINY, "--output", "o", "--ranks", "1,x"], "--ranks: got '1,x', accepted: numbers of ranks"),
        ([*TINY, "--output", "o", "--variants", "fp8"], "--variants: got 'fp8', accepted: coat, bf16"),
        ([*TINY, "--output", "o", "--link", "nvlink"], "--link: got 'nvlink', accepted: nvlink=BANDWIDTH[,LATENCY]"),
        ([*TINY, "--output", "o", "--message-sizes", "4 apples"], "--message-sizes: got '4 apples', accepted: sizes"),
        ([*TINY, "--output", "o", "--steps", "0"], "--steps: got 0, accepted: an integer >= 1"),
        ([*TINY, "--output", "/dev/null/x"], "--output: got /dev/null/x, accepted: a folder to write to"),
        (["--paper", "--measured", "o"], "--measured: got 'o', accepted: not with --paper"),
        (["--paper", "--gpus", "8"], "--gpus: got 8, accepted: not with --paper, which measures nothing and finds"),
        (["--paper", "--tensor-parallel", "2"], "--tensor-parallel: got 2, accepted: not with --paper"),
        (
            ["--measured", "o", "--micro-batch", "2"],
            "--micro-batch: got 2, accepted: not with --measured, which has its",
        ),
        (["--measured", "o", "--no-strong"], "--no-strong: given, accepted: not with --measured"),
        ([*TINY, "--output", "o", "--gpu", "h200"], "--gpu: got 'h200', accepted: only with --paper"),
        (
            ["--only", "collectives", "--output", "o", "--predict", "8"],
            "--predict: got (8,), accepted: not with --only c",
        ),
        (
            ["--only", "collectives", "--output", "o", "--model", "nonsense"],
            "--model: got 'nonsense', accepted: not with --only collectives",
        ),
        ([*TINY, "--output", "o", "--only", "training", "--message-sizes", "4KiB"], "--message-sizes: got "),
        (["--world-size", "4"], "--world-size: no such option (did you mean --ranks?)"),
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
