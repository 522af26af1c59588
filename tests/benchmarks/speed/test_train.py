"""What training end to end can be asked for: configurations, peers, models with Transformer Engine's layers."""

import json
import subprocess
import sys

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


def test_peers_are_run_where_they_are() -> None:
    assert train.parse([]).configs == ["zero2-bf16", "zero2"]
    assert train.parse(["--peers", "x"]).configs == ["TE bf16", "TE fp8 delayed", "zero2-bf16", "zero2"]


def a_run(config, step_ms, losses):
    return {
        **{"config": config, "micro_batch": 2, "step_ms": step_ms, "tokens_per_second_per_gpu": 2000.0 / step_ms},
        **{"peak_memory_gib": 20.0, "losses": losses},
    }


def test_ratios_are_to_the_baseline_and_losses_to_bf16_of_this_program(capsys) -> None:
    te, bf16, ours = (
        a_run("TE bf16", 400.0, [4.0, 1.0]),
        a_run("zero2-bf16", 200.0, [4.0, 2.0]),
        a_run("zero2", 100.0, [4.2, 2.0]),
    )
    train.compare([te, bf16, ours])
    assert (ours["step_time_ratio"], ours["tokens_per_second_ratio"], ours["peak_memory_ratio"]) == (0.25, 4.0, 1.0)
    assert ours["first_loss_gap"] == ours["largest_loss_gap"] == pytest.approx(0.05)
    assert ours["final_loss_gap"] == 0 and te["final_loss_gap"] == 0.5 and bf16["largest_loss_gap"] == 0
    assert {one["losses_beside"] for one in (te, bf16, ours)} == {"zero2-bf16"}
    assert "(4.00x)" in capsys.readouterr().out
    train.compare([te, ours])
    assert ours["losses_beside"] == "TE bf16" and ours["final_loss_gap"] == 1.0


def test_the_same_command_goes_on(tmp_path, monkeypatch, capsys) -> None:
    """Runs that are done are kept when another fails, and are measured anew where something else is asked for."""
    started, broken = [], {"zero2"}

    def run(name, micro_batch, *_):
        started.append((name, micro_batch))
        if name in broken:
            raise subprocess.CalledProcessError(3, name)
        return a_run(name, 100.0, [4.0, 2.0]) | {"micro_batch": micro_batch}

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train, "prepare_text", lambda *_: None)

    def go(*given):
        monkeypatch.setattr(sys, "argv", ["train", "--micro-batch", "2", "4", "--output", str(tmp_path), *given])
        train.main()

    with pytest.raises(SystemExit, match="goes on with what failed: zero2, micro-batch 2: exit 3; zero2, micro-ba"):
        go()
    assert len(started) == 4 and not (tmp_path / "speed/train-1-rank.json").exists()
    started.clear()
    with pytest.raises(SystemExit):
        go("--steps", "7")
    assert len(started) == 4, "other options"
    started.clear()
    broken.clear()
    go("--steps", "7")
    assert started == [("zero2", 2), ("zero2", 4)]
    found = json.loads((tmp_path / "speed/train-1-rank.json").read_text())["runs"]
    names = [(one["config"], one["micro_batch"]) for one in found]
    assert names == [("zero2-bf16", 2), ("zero2", 2), ("zero2-bf16", 4), ("zero2", 4)]
    assert not list(tmp_path.glob("**/*unfinished*")) and "step_time_ratio" in found[1]


def test_only_tensor_parallel_peers_have_another_environment() -> None:
    assert te_train.peer_environment(1) == {"UB_SKIPMC": "1"}
    assert te_train.peer_environment(2) == {"UB_SKIPMC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_what_is_bf16() -> None:
    names = ["TE bf16", "zero2", "zero2-bf16", "zero2-bf16 over NCCL"]
    assert [train.is_bf16(name) for name in names] == [False, False, True, True]


def test_layers_that_are_not_transformer_engines() -> None:
    """An error names the key; whether its layers can be built is not asked where it is not installed."""
    for name, key in (("olmo2-7b", "norm_placement"), ("mixtral-8x7b", "num_moe_experts")):
        model = load_model_config(ROOT / f"configs/models/{name}.json", [])
        with pytest.raises(ValueError, match=f"^{key}: got .*, accepted with Transformer Engine's layers"):
            te_train.spec(model, None)


def test_fp8_weights_of_a_peer_are_quantized_in_every_step(monkeypatch) -> None:
    """Nobody tells its layers when a step begins: what they kept would be the weights of the first step."""
    monkeypatch.setattr(te_train.gpt, "transformer_config", lambda model, **given: given)
    with te_train.te_layers("delayed"):
        config = te_train.gpt.transformer_config(None)
        assert config["fp8"] == "hybrid" and config["disable_parameter_transpose_cache"]
    with te_train.te_layers("none"):
        assert not {"fp8", "disable_parameter_transpose_cache"} & te_train.gpt.transformer_config(None).keys()


def test_peers_in_fp8_take_steps_of_one_micro_batch(capsys) -> None:
    train.parse(["--peers", "x", "--configs", "TE bf16", "zero2", "--accumulation", "2"])
    with pytest.raises(SystemExit):
        train.parse(["--peers", "x", "--accumulation", "2"])
    assert "--accumulation: got 2 with a peer in FP8, accepted: 1" in capsys.readouterr().err
