"""What pretraining asks of the DeepSpeed configuration, and what it takes from it."""

import json
import math
from pathlib import Path

import pytest

from coat_dist import CoatConfigError
from launch.common.settings import batch_sizes, load_settings, peak_lr
from launch.train.pretrain_options import parse
from tests.launch.pretrain_runs import REQUIRED

CONFIGS = Path(__file__).parents[3] / "configs" / "deepspeed"
GOOD = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
    "coat": {},
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_configurations_load(path):
    settings, coat = load_settings(str(path), tp=1)
    assert (coat is None) == path.stem.endswith("-bf16")
    assert settings["optimizer"]["type"] == ("AdamW" if coat is None else "CoatAdamW")


ADAMW = {
    "coat": None,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "bias_correction": True}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bf16": {"enabled": False}}, "bf16.enabled: got False, accepted: true"),
        ({"bf16": None}, "bf16.enabled: got None, accepted: true"),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}},
            "bf16.check_grad_overflow: got False",
        ),
        (
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm: got F",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: got .*accepted: absent"),
        (
            {"coat": None, "optimizer": {"type": "SGD"}},
            "optimizer.type: got 'SGD', accepted: \"CoatAdamW\"",
        ),
        ({"coat": None, "optimizer": None}, "optimizer.type: got None"),
        (ADAMW, "optimizer.params.bias_correction: got True"),
        (
            {**ADAMW, "zero_optimization": {"stage": 0}},
            "zero_optimization.stage: got 0, accepted: 1, 2 or 3",
        ),
    ],
)
def test_configurations_that_cannot_run(tmp_path, change, message):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({key: value for key, value in {**GOOD, **change}.items() if value is not None})
    )
    with pytest.raises(CoatConfigError, match=message):
        load_settings(str(path), tp=1)


MICRO, STEPS, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)


def test_batch_sizes_follow_deepspeed():
    for given, expected in [
        ({MICRO: 2}, (2, 1, 8)),
        ({MICRO: 2, STEPS: 3}, (2, 3, 24)),
        ({TOTAL: 24, STEPS: 3}, (2, 3, 24)),
        ({TOTAL: 24, MICRO: 2}, (2, 3, 24)),
        ({TOTAL: 8}, (2, 1, 8)),
    ]:
        sizes = batch_sizes(given, 4)
        assert (sizes.micro, sizes.accumulation, sizes.total) == expected
    wrong = (
        {},
        {STEPS: 2},
        {TOTAL: 9},
        {TOTAL: 2},
        {MICRO: 0},
        {MICRO: "auto"},
        {MICRO: 2, STEPS: 3, TOTAL: 8},
    )
    for given in wrong:
        with pytest.raises(CoatConfigError, match="accepted: "):
            batch_sizes(given, 4)


def test_peak_lr():
    args = parse(REQUIRED)
    assert peak_lr(args, GOOD) == 1e-3
    assert peak_lr(parse([*REQUIRED, "--lr", "0.5"]), GOOD) == 0.5
    with pytest.raises(CoatConfigError, match="optimizer.params.lr: got None"):
        peak_lr(args, {"optimizer": {"type": "AdamW"}})
    for lr in (math.inf, math.nan, -1.0, True):
        with pytest.raises(
            CoatConfigError, match="optimizer.params.lr: got .* accepted: a finite number >= 0"
        ):
            peak_lr(args, {"optimizer": {"type": "AdamW", "params": {"lr": lr}}})
