"""Bad options of every room's programs: one line that names them, before anything is measured or
written.
"""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from benchmarks.common import argument_parser

COUNT, NUMBER, MODEL = (
    "accepted: an integer >= 1",
    "accepted: a number > 0",
    "accepted: one of configs/models: llama-30b",
)


@pytest.mark.parametrize(
    ("program", "given", "words"),
    [
        ("accuracy.trajectories", "--device cuda", "--device: got cuda, accepted: cpu"),
        ("convergence.branches", "--per-gpu 0", f"--per-gpu: got 0, {COUNT}"),
        (
            "convergence.branch_report",
            "--result nowhere.json",
            "--result: got nowhere.json, accepted: a readable file",
        ),
        (
            "convergence.branch_report",
            "--result configs/models/tiny.json",
            "without settings, runs, failed, accepted:",
        ),
        ("speed.flow_kernels", "--hidden 130", "--hidden: got 130, accepted: a multiple of 128"),
        ("speed.layer", "--tokens 5", "--tokens: got 5, accepted: a multiple of 4096"),
        ("speed.saved_bytes", "--presets nope", f"--presets: got nope, {MODEL}"),
        (
            "speed.train",
            "--peers nowhere",
            "--peers: got 'nowhere' with 0 archives, accepted: a folder with",
        ),
        (
            "speed.train",
            "--model nope",
            "--model: got nope, accepted: a file, or one of configs/models: ",
        ),
        ("speed.whole", "--ranks 1", "--name: got a result of "),
        (
            "speed.optimizer",
            "--output setup.py/results",
            "--output: got setup.py/results, accepted: a folder to write",
        ),
    ],
)
def test_bad_options_are_named(monkeypatch, refused, program, given, words) -> None:
    module = importlib.import_module(f"benchmarks.{program}")
    monkeypatch.setattr(sys, "argv", [program, *given.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        f"benchmarks.{program}.write_result", lambda *_, **__: pytest.fail("written"), raising=False
    )
    if program == "speed.whole":  # its result is of H200s
        monkeypatch.setattr(module, "gpus", list)
    with refused(words):
        module.main()


def test_where_results_can_be_written(tmp_path, refused) -> None:
    (tmp_path / "file").touch()
    parser = argument_parser("A program.")
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new/below"):
        assert parser.parse_args(["--output", str(folder)]).output == str(folder)
    assert not (tmp_path / "new").exists()
    for wrong in (tmp_path / "file", tmp_path / "file/below"):
        with refused(
            f"--output: got {wrong}, accepted: a folder to write to; {tmp_path}/file is a file"
        ):
            parser.parse_args(["--output", str(wrong)])
