"""The program on real ranks over gloo: one, then two, into one table; what it refuses."""

import json
import re

import pytest

from coat_dist import CoatConfigError
from launch import scaling
from launch.scale import scaling_options
from launch.scale.tables import steps
from tests.launch.launchers import ENVIRONMENT, ROOT
from tests.support import Program, free_port, run_ranks

SMALL = ["num_layers=1", "hidden_size=64", "ffn_hidden_size=128", "seq_length=32"]
TINY = ["--model", "tiny", "--micro-batch", "1", "--steps", "3", "--warmup", "1"]
TINY += ["--model-override", *SMALL]


def measure(rank, world, argv):
    try:
        scaling._measure(scaling_options.parse(argv))
    except CoatConfigError as problem:
        return str(problem)
    return None


@pytest.mark.long
def test_scaling_adds_measurements_of_numbers_of_ranks_to_one_table(tmp_path):
    """Also under a launcher, and with the vocabulary that the model lacks."""
    out = tmp_path / "out"
    argv = [*TINY, "--output", str(out), "--strong", "2"]
    assert run_ranks(2, measure, argv) == [None, None]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "1"]
    launcher += ["--master_port", str(free_port()), str(ROOT / "launch" / "scaling.py")]
    process = Program([*launcher, *argv], tmp_path, ROOT, **ENVIRONMENT)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "vocabulary 32000" in text, text
    assert (out / "scaling.md").read_text() in text
    measured = json.loads((out / "measured.json").read_text())
    for mode, passes in (("weak", [1, 1]), ("strong", [2, 1])):
        rows = steps(measured, mode)
        assert [(r["variant"], r["ranks"]) for r in rows] == [("zero2", 1), ("zero2", 2)]
        assert [r["accumulation"] for r in rows] == passes
    # log(32000) is 10.4: the model was trained.
    assert all(9 < one["first_loss"] < 12 for one in measured["records"])

    before = (out / "measured.json").read_text()
    (other,) = run_ranks(1, measure, [*argv, "--model-override", "num_layers=2"])
    assert f"--output: got {out}, which holds measurements of another model, accepted" in other
    (other,) = run_ranks(1, measure, [*argv, "--tensor-parallel", "3"])
    assert "--tensor-parallel: got 3, accepted: " in other
    (other,) = run_ranks(1, measure, [*TINY, "--output", "/dev/null/x"])
    assert re.match(r"--output: got /dev/null/x, accepted: a folder to write to \(", other)
    assert (out / "measured.json").read_text() == before
