"""What training end to end can be asked for: configurations, peers, models with Transformer
Engine's layers.
"""

import pytest

from benchmarks.speed import te_train, train


@pytest.mark.parametrize(
    "given, expected",
    [
        (
            ["--configs", "zero2-bf61"],
            "--configs: got 'zero2-bf61', accepted: a name of configs/deepspeed",
        ),
        (["--configs", "TE bf16", "zero2"], "--configs: got a peer without --peers"),
        (["--peer-config", "zero"], "--configs: got 'zero', accepted"),
    ],
)
def test_what_cannot_be_run_is_an_error_before_anything_is_run(given, expected, capsys) -> None:
    with pytest.raises(SystemExit):
        train.parse(given)
    assert expected in capsys.readouterr().err


def a_run(config, step_ms, losses):
    return {
        **{
            "config": config,
            "micro_batch": 2,
            "step_ms": step_ms,
            "tokens_per_second_per_gpu": 2000.0 / step_ms,
        },
        **{"peak_memory_gib": 20.0, "losses": losses},
    }


def test_ratios_are_to_the_baseline_and_losses_to_bf16_of_this_program(capsys) -> None:
    te, bf16, ours = (
        a_run("TE bf16", 400.0, [4.0, 1.0]),
        a_run("zero2-bf16", 200.0, [4.0, 2.0]),
        a_run("zero2", 100.0, [4.2, 2.0]),
    )
    train.compare([te, bf16, ours])
    assert (
        ours["step_time_ratio"],
        ours["tokens_per_second_ratio"],
        ours["peak_memory_ratio"],
    ) == (0.25, 4.0, 1.0)
    assert ours["first_loss_gap"] == ours["largest_loss_gap"] == pytest.approx(0.05)
    assert (
        ours["final_loss_gap"] == 0
        and te["final_loss_gap"] == 0.5
        and bf16["largest_loss_gap"] == 0
    )
    assert {one["losses_beside"] for one in (te, bf16, ours)} == {"zero2-bf16"}
    assert "(4.00x)" in capsys.readouterr().out
    train.compare([te, ours])
    assert ours["losses_beside"] == "TE bf16" and ours["final_loss_gap"] == 1.0


def test_fp8_weights_of_a_peer_are_quantized_in_every_step(monkeypatch) -> None:
    """Nobody tells its layers when a step begins: what they kept would be the weights of the
    first step.
    """
    monkeypatch.setattr(te_train.gpt, "transformer_config", lambda model, **given: given)
    with te_train.te_layers("delayed"):
        config = te_train.gpt.transformer_config(None)
        assert config["fp8"] == "hybrid" and config["disable_parameter_transpose_cache"]
    with te_train.te_layers("none"):
        assert (
            not {"fp8", "disable_parameter_transpose_cache"}
            & te_train.gpt.transformer_config(None).keys()
        )


def test_peers_in_fp8_take_steps_of_one_micro_batch(capsys) -> None:
    train.parse(["--peers", "x", "--configs", "TE bf16", "zero2", "--accumulation", "2"])
    with pytest.raises(SystemExit):
        train.parse(["--peers", "x", "--accumulation", "2"])
    assert "--accumulation: got 2 with a peer in FP8, accepted: 1" in capsys.readouterr().err
