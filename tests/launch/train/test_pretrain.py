"""Pretraining on two gloo ranks: exact restarts, non-finite numbers, refusals. Tiny shapes,
random tokens.
"""

import math

import pytest

from launch.train.metrics import read_metrics
from tests.coat_dist.checkpoint.small_saves import flip
from tests.launch.pretrain_runs import (
    FP32_GRADIENTS,
    command,
    configuration,
    hyperparameters,
    make_universal,
    pretrain_on,
    rank_main,
    without_a_model,
)
from tests.support import run_ranks, slow


@pytest.mark.parametrize(
    ("stage", "coat", "more"),
    [
        slow(1, True, {}),
        (2, True, {}),
        (3, True, {}),
        slow(3, False, {}),
        slow(1, False, FP32_GRADIENTS),
    ],
)
def test_non_finite_steps_are_skipped_and_change_nothing(work, tmp_path, stage, coat, more):
    """A bad number on one rank in the first of two micro-batches: all skip, and weights, moments
    and counters stay.
    """
    config = configuration(tmp_path, stage, coat, **more)
    poisoned = [(3, "gradient", 1), (5, "loss", 0), (6, "gradient", 0)]
    ends = pretrain_on(
        2, work, tmp_path / "run", config, "--max-bad-steps", "3", steps=8, poisoned=poisoned
    )
    assert ends[0].startswith("finished 8 steps")
    records = read_metrics(tmp_path / "run")
    why = {3: "non-finite gradient norm", 5: "non-finite loss", 6: "non-finite gradient norm"}
    assert {r["step"]: r["skipped"] for r in records if "skipped" in r} == why
    assert [r["changed"] for r in records] == [r["step"] not in why for r in records]
    assert (
        all(r["grad_norm"] is None for r in records if r["step"] in why)
        and records[4]["loss"] is None
    )
    assert all(
        math.isfinite(r["loss"]) and math.isfinite(r["grad_norm"])
        for r in records
        if r["step"] not in why
    )


def test_bad_steps_in_a_row_stop_the_run_and_name_the_checkpoint(work, tmp_path):
    config, save = configuration(tmp_path, 2), tmp_path / "save"
    poisoned = [(s, "loss", 1) for s in (2, 5, 6, 7, 8)]
    more = ["--max-bad-steps", "3", "--save", save, "--save-interval", "4"]
    ends = pretrain_on(2, work, tmp_path / "run", config, *more, poisoned=poisoned)
    for end in ends:
        assert (
            end.startswith("BadSteps: 3 steps in a row, up to step 7, had a non-finite loss")
            and f"{save}/step00000004" in end
        )
    assert len(read_metrics(tmp_path / "run")) == 7


def test_signal_on_one_rank_stops_all_after_the_step_and_saves(work, tmp_path):
    run, save = tmp_path / "run", tmp_path / "save"
    given = work, run, configuration(tmp_path, 2)
    ends = pretrain_on(2, *given, "--save", save, poisoned=[(4, "signal", 1)])
    assert ends[1] == f"stopped by SIGTERM after step 4; checkpoint {save}/step00000004"
    assert ends[0].startswith("stopped by a signal on another rank after step 4")
    assert len(read_metrics(run)) == 4
    # Reached before, as by the same command given again: nothing is trained.
    again = f"stopped by --stop-at-step after step 4; checkpoint {save}/step00000004"
    for step in (3, 4):
        more = ["--save", save, "--load", "auto", "--stop-at-step", step]
        assert set(pretrain_on(2, *given, *more)) == {again}
    assert len(read_metrics(run)) == 4
    assert [p.name for p in save.glob("*step*")] == ["step00000004"]


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(work, tmp_path):
    config, save, run = configuration(tmp_path, 2), tmp_path / "save", tmp_path / "run"
    assert "finished 2" in pretrain_on(2, work, run, config, "--save", save, steps=2)[0]

    def refused(*more, load=save, ranks=2):
        argv = command(work, run, config, "--load", load, *more, steps=4)
        return run_ranks(ranks, without_a_model, argv)[0]

    universal, wide = tmp_path / "universal", ("--model-override", "ffn_hidden_size=384")
    make_universal(save, universal)
    assert "model.ffn_hidden_size: checkpoint has 256" in refused(*wide, load=universal, ranks=1)
    flip(next(universal.rglob("*linear_fc1.weight/exp_avg.pt")))
    assert "linear_fc1.weight/exp_avg.pt: damaged" in refused(load=universal, ranks=1)
    bigger = refused(*wide)
    assert "to_universal" not in bigger
    assert bigger.startswith(
        f"CheckpointError: {save}/step00000002 was made by a different "
        "run:\nmodel.ffn_hidden_size: checkpoint has 256"
    )
    other = refused(ranks=1)
    assert "parallel.data: checkpoint has 2, this run has 1\nlaunch/to_universal.py" in other
    assert len(read_metrics(run)) == 2  # a refused start leaves the record of the run alone
    assert "--load: got" in refused(load=tmp_path / "empty")
    states = next((save / "step00000002").glob("*optim_states.pt"))
    flip(states)
    assert f"{states.name}: damaged" in refused()


SIZES = {
    "one": (1, []),
    "two": (2, ["--tensor-parallel", "2"]),
    "two sp": (2, ["--tensor-parallel", "2", "--sequence-parallel"]),
    "four": (4, ["--tensor-parallel", "4"]),
    "four sp": (4, ["--tensor-parallel", "4", "--sequence-parallel"]),
}


@pytest.mark.parametrize(
    ("names", "steps"),
    [(("one", "two", "two sp"), 5), slow(tuple(SIZES), 20)],
    ids=["two", "four"],
)
def test_tensor_parallel_sizes_agree(work, tmp_path, names, steps):
    """Losses to the bit, with tp_invariant. A rank's rows of every weight are whole groups of FP8
    moments at each size.

    Without clipping: the norm is summed shard by shard, and its last bit is enough to part runs,
    now and then.
    """
    coat = {"optimizer": {"stochastic_rounding": False}, "activation": {"tp_invariant": True}}
    config = configuration(tmp_path, 2, coat=coat, gradient_clipping=0.0)
    wide = [
        "--model-override",
        "hidden_size=512",
        "ffn_hidden_size=512",
        "num_attention_heads=4",
        "hidden_dropout=0.0",
    ]
    losses, norms = {}, {}
    for name in names:
        world, more = SIZES[name]
        argv = command(work, tmp_path / name, config, *more, *wide, steps=steps)
        assert f"finished {steps}" in run_ranks(world, rank_main, argv)[0]
        losses[name], norms[name] = zip(
            *((r["loss"], r["grad_norm"]) for r in read_metrics(tmp_path / name)), strict=True
        )
    assert (
        all(of_size == losses["one"] for of_size in losses.values())
        and len(set(losses["one"])) == steps
    )
    assert all(of_size == pytest.approx(norms["one"], rel=1e-6) for of_size in norms.values())


def test_hyperparameters_are_the_configurations_after_a_restart(work, tmp_path):
    save, run = tmp_path / "save", tmp_path / "run"
    config = configuration(tmp_path, 3)
    assert "finished 2" in pretrain_on(2, work, run, config, "--save", save, steps=2)[0]
    changed = {
        "type": "CoatAdamW",
        "params": {"lr": 5e-3, "betas": [0.8, 0.99], "weight_decay": 0.3},
    }
    config = configuration(tmp_path, 3, optimizer=changed)
    argv = command(work, run, config, "--load", save, steps=3)
    groups = run_ranks(2, hyperparameters, argv)[0]
    assert groups == [["decay/fp8", 0.3, (0.8, 0.99)], ["no_decay/fp32", 0.0, (0.8, 0.99)]]


def test_ranks_started_differently_are_told(work, tmp_path):
    different = "--seed", "{rank}", "--max-bad-steps", "{rank}1"
    for end in pretrain_on(2, work, tmp_path / "run", configuration(tmp_path, 2), *different):
        assert end.startswith("CoatConfigError: ranks were started differently: ")
        assert "seed: 0 on rank 0, 1 on rank 1" in end
        assert "arguments.max_bad_steps: 1 on rank 0, 11 on rank 1" in end
    assert not (tmp_path / "run").exists()


def test_evaluation_without_a_valid_split_is_refused(work, tmp_path):
    argv = command(work, tmp_path / "run", configuration(tmp_path, 2), "--eval-interval", "2")
    argv[argv.index("--split") + 1] = "100,0,0"
    (end,) = run_ranks(1, rank_main, argv)
    assert "--split: valid gets 0 of " in end and end.endswith(", or give --eval-interval 0"), end


ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("zero", "coat", "layout"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, True, []),
        ({"stage": 1}, True, ["--pipeline-parallel", "2"]),
        slow({"stage": 1}, False, []),
        slow({"stage": 2}, True, ["--tensor-parallel", "2"]),
        slow(ZERO3, True, []),
        slow(ZERO3, False, []),
    ],
)
def test_eval_only_repeats_the_evaluations_of_training_and_saves_nothing(
    work, tmp_path, zero, coat, layout
):
    """To the bit with the run's configuration; close with the other numerics."""
    save = tmp_path / "save"
    more = [*layout, "--eval-interval", "1", "--eval-steps", "2", "--save", save]

    def run(name, coat, *argv):
        config = configuration(tmp_path, zero["stage"], coat, zero_optimization=zero)
        argv = command(work, tmp_path / name, config, *more, *argv, steps=2)
        return run_ranks(2, rank_main, argv)[0], read_metrics(tmp_path / name)

    _, trained = run("run", coat, "--save-interval", "1")
    files = sorted(save.rglob("*"))
    for step, load in ((1, save / "step00000001"), (2, "auto")):
        evaluate = "--load", load, "--eval-only"
        end, (same,) = run(f"eval-{step}", coat, *evaluate)
        assert end.startswith(f"stopped by --eval-only after step {step}; nothing saved")
        _, (other,) = run(f"other-{step}", not coat, *evaluate)
        assert same["step"] == other["step"] == step
        for loss in {"valid_loss", "test_loss"} & trained[step - 1].keys():
            assert same[loss] == trained[step - 1][loss] != other[loss]
            assert same[loss] == pytest.approx(other[loss], rel=0.01)
    assert same.keys() == {"step", "valid_loss", "test_loss"}
    assert sorted(save.rglob("*")) == files
