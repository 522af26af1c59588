"""What training end to end can be asked for: configurations, peers, models with Transformer Engine's layers."""

import pytest

from benchmarks.common import ROOT
from benchmarks.speed import te_train, train
from launch.model.config import load_model_config


@pytest.mark.parametrize(
    "given, expected",
    [
        (["--configs", "zero2-bf61"], "--configs: got 'zero2-bf61', accepted: a name of configs/deepspeed"),
        (["--configs", "TE bf16", "zero2"], "--configs: got a peer without --peers"),
        (["--peer-config", "zero"], "--configs: got 'zero', accepted"),
    ],
)
def test_what_cannot_be_run_is_an_error_before_anything_is_run(given, expected, capsys) -> None:
    with pytest.raises(SystemExit):
        train.parse(given)
    assert expected in capsys.readouterr().err


def test_what_can() -> None:
    names = ["TE fp8 delayed", "zero2", "zero2 over NCCL"]
    arguments = train.parse(["--configs", *names, "--peers", "folder", "--micro-batch", "2", "4"])
    assert arguments.configs == names and arguments.micro_batch == [2, 4]


def test_ratios_are_to_the_baseline(capsys) -> None:
    base = {"config": "zero2-bf16", "micro_batch": 2, "step_ms": 200.0, "tokens_per_second_per_gpu": 10.0}
    base |= {"peak_memory_gib": 20.0, "losses": [4.0, 2.0]}
    one = base | {"config": "zero2", "step_ms": 100.0, "tokens_per_second_per_gpu": 20.0, "losses": [4.0, 2.1]}
    train.compare(one, base)
    assert (one["step_time_ratio"], one["tokens_per_second_ratio"], one["peak_memory_ratio"]) == (0.5, 2.0, 1.0)
    assert one["largest_loss_gap"] == one["final_loss_gap"] == pytest.approx(0.05)
    assert "(2.00x)" in capsys.readouterr().out


def test_layers_that_are_not_transformer_engines() -> None:
    """An error names the key; whether its layers can be built is not asked where it is not installed."""
    for name, key in (("olmo2-7b", "norm_placement"), ("mixtral-8x7b", "num_moe_experts")):
        model = load_model_config(ROOT / f"configs/models/{name}.json", [])
        with pytest.raises(ValueError, match=f"^{key}: got .*, accepted with Transformer Engine's layers"):
            te_train.spec(model, None)
