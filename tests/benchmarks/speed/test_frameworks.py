"""A model in the frameworks that train it."""

import sys
from typing import Any

import pytest
import torch

from benchmarks.speed import frameworks

CASE = {"model": "tiny", "micro_batches": [2], "sequence": 8, "warm_up": 2, "steps": 3, "stage": 2}


def test_a_run_gets_rows_for_its_steps_and_no_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(
        name: str, model: Any, ds: dict[str, Any], rows: torch.Tensor, steps: Any, folder: str
    ) -> None:
        assert (name, rows.shape) == ("lightning", (10, 8))
        assert "gradient_accumulation_steps" not in ds
        for loss in range(5):
            steps.on_log(logs={"loss": loss})

    monkeypatch.setattr(frameworks, "train", train)
    (record,) = frameworks.measure(CASE | {"variant": "lightning+adamw"}, torch.device("cpu"))
    assert (record["first_loss"], record["last_loss"]) == (0, 4)


def test_a_framework_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frameworks, "FRAMEWORKS", {"trainer": "no_such_package"})
    monkeypatch.setattr(sys, "argv", ["frameworks"])
    frameworks.main()
    assert capsys.readouterr().out == "trainer: no package no_such_package\n"
