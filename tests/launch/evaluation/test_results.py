"""What evaluate.py writes, keeps, prints and compares."""

import json
import math
from pathlib import Path

import pytest
import torch

from coat_dist import CoatConfigError
from launch import evaluate as program
from tests.launch.evaluation.runs import evaluated
from tests.support import Program

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def two_forwards(tiny, tmp_path_factory):
    """Results in BF16 and, by the command line and beside the first, in FP8: both folders, and
    what was printed.
    """
    folder = tmp_path_factory.mktemp("results")
    inputs = ["--load", tiny.hf, "--text", tiny.jsonl, "--choices", tiny.questions]
    program.report.write_report(str(folder / "bf16"), evaluated(*inputs), details=False)
    argv = [*inputs, "--forward", "fp8", "--output", "fp8", "--baseline", "bf16", "--details"]
    started = Program([str(a) for a in (ROOT / "launch/evaluate.py", *argv)], folder, folder)
    printed, _ = started.communicate(timeout=240)
    assert started.returncode == 0, printed
    return folder, printed


def test_an_earlier_evaluation_stays(tmp_path, capsys):
    empty = {"text": [], "data": [], "choices": []}
    for step in range(3):
        program.report.write_report(str(tmp_path), {**empty, "step": step}, details=step == 0)
    found = {
        path.name: json.loads(path.read_text())["step"] for path in tmp_path.glob("evaluation*")
    }
    assert found == {"evaluation.json": 2, "evaluation-1.json": 0, "evaluation-2.json": 1}
    assert (tmp_path / "details-1.jsonl").exists() and capsys.readouterr().out.count(
        "renamed: "
    ) == 3


def test_bf16_and_fp8_are_compared_with_one_command_each(tiny, two_forwards):
    folder, printed = two_forwards
    bf16, fp8 = (
        json.loads((folder / name / "evaluation.json").read_text()) for name in ("bf16", "fp8")
    )
    assert fp8["coat"]["source"].startswith("defaults") and bf16["coat"] is None
    assert fp8["command"].startswith("evaluate.py --load ") and fp8["versions"].keys() >= {
        "torch",
        "megatron-core",
    }
    page = (ROOT / "docs" / "evaluation.md").read_text()
    inside = {
        key for kind in ("text", "choices", "differences") for one in fp8[kind] for key in one
    }
    assert not [key for key in {*fp8, *inside} - {"format"} if f"`{key}`" not in page]
    loss, acc, acc_norm = fp8["differences"]
    assert (loss["what"], acc["what"], acc_norm["what"]) == ("loss", "acc", "acc_norm")
    assert (
        0 < abs(loss["difference"]) < 0.1 and loss["paired_stderr"] < fp8["text"][0]["loss_stderr"]
    )
    assert math.isclose(
        loss["difference"], fp8["text"][0]["loss"] - bf16["text"][0]["loss"], abs_tol=1e-12
    )
    assert math.isclose(
        acc["difference"], fp8["choices"][0]["acc"] - bf16["choices"][0]["acc"], abs_tol=1e-12
    )
    assert all(
        word in printed
        for word in ("acc_norm", "perplexity", "paired standard error", "25 questions")
    )
    details = [
        json.loads(line) for line in (folder / "fp8" / "details.jsonl").read_text().splitlines()
    ]
    assert [d["question"] for d in details if d["kind"] == "choices"][:2] == [
        f"{tiny.questions}:{n}" for n in (1, 2)
    ]
    assert not (folder / "bf16" / "details.jsonl").exists()


def test_two_results_are_compared_without_a_model(two_forwards, capsys):
    folder, printed = two_forwards
    assert (
        program.main(["--compare", str(folder / "bf16"), str(folder / "fp8" / "evaluation.json")])
        == 0
    )
    assert capsys.readouterr().out.strip() in printed
    other = json.loads((folder / "bf16" / "evaluation.json").read_text())
    for one in (*other["text"], *other["choices"]):
        one["digest"] = "0"
    (folder / "other.json").write_text(json.dumps(other))
    program.compare(str(folder / "bf16"), str(folder / "other.json"))
    assert "text.jsonl, " in capsys.readouterr().err  # nothing in common
    other["choices"] = json.loads((folder / "bf16" / "evaluation.json").read_text())["choices"]
    (folder / "other.json").write_text(json.dumps(other))
    # The text alone is another one.
    program.compare(str(folder / "other.json"), str(folder / "bf16"))
    said = capsys.readouterr()
    assert (
        "acc_norm" in said.out
        and "text.jsonl with the same content: no difference there" in said.err
    )
    (folder / "other.json").write_text("{}")
    with pytest.raises(
        program.CoatConfigError, match="--compare: got .*other.json, accepted: an evaluation.json"
    ):
        program.compare(str(folder / "bf16"), str(folder / "other.json"))


def test_results_are_not_lost_where_they_cannot_be_written(tmp_path, monkeypatch, capsys):
    """An error of the folder comes before the model is built; after that, results are printed."""
    with pytest.raises(
        CoatConfigError, match="--output: got /proc/x, accepted: a folder to write to"
    ):
        program._make_output("/proc/x")
    saved = tmp_path / "checkpoints" / "step00000004"
    saved.mkdir(parents=True)
    (saved / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "link").symlink_to(saved)
    for inside in (saved, saved / "eval" / "bf16", tmp_path / "link"):  # its run removes both
        with pytest.raises(
            CoatConfigError,
            match=f"--output: got {inside}, which is, or is in, the checkpoint {saved}",
        ):
            program._make_output(str(inside))
    program._make_output(str(saved.parent))

    def full(*args):
        raise OSError(28, "No space left on device")

    one = {
        "name": "a.txt",
        "loss": 1.5,
        "loss_stderr": None,
        "perplexity": 4.5,
        "bits_per_byte": None,
    }
    one |= {"tokens_scored": 9, "row_losses": [13.5], "row_tokens": [9]}
    monkeypatch.setattr(
        program, "evaluate", lambda *args: {"text": [one], "data": [], "choices": []}
    )
    monkeypatch.setattr(program.report, "write_text", full)
    monkeypatch.setattr(program, "alone", lambda: None)
    monkeypatch.setattr(program.runtime, "start", lambda rank: torch.device("cpu"))
    assert program.main(["--load", "x", "--text", "a.txt", "--output", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert (
        "1.500000" in said.out
        and "No space left on device" in said.err
        and "written: " not in said.out
    )
