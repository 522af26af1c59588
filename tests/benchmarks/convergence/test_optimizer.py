"""The paired training: pairs share everything but the optimizer, gaps are what they say, and it stops and resumes."""

import json
import math
import sys

import pytest
import torch

from benchmarks.convergence import optimizer as convergence
from benchmarks.convergence.optimizer import DEFAULT, VARIANTS, WideRangeAdamW, optimizer_for, remaining, run
from benchmarks.convergence.optimizer_report import gaps, summarize
from benchmarks.small_gpt import GPT, Shape, held_out_loss, prepare_bytes, train
from coat_dist import CoatAdamW

SMALL = Shape(vocabulary=64, hidden=32, layers=1, heads=2, ffn=48, sequence=16, batch=2)


def record(name, seed, loss, beta2=0.95):
    return {"run": name, "seed": seed, "beta2": beta2, "held_out": {10: 9.0, 20: loss}, "wall_seconds": 3.0}


def test_gaps_are_relative_to_the_same_seed_and_beta2():
    records = [record("adamw", 0, 2.0), record("coat", 0, 2.1), record("adamw", 1, 4.0), record("coat", 1, 3.9)]
    records += [record("coat-0.999-auto", 0, 3.3, 0.999), record("adamw-0.999", 0, 3.0, 0.999), record("coat", 2, 1.0)]
    found = gaps(records)
    assert found["coat"] == pytest.approx({0: 0.05, 1: -0.025})
    assert found["coat-0.999-auto"] == pytest.approx({0: 0.1}) and found["adamw"] == {0: 0.0, 1: 0.0}
    row = next(r for r in summarize(records) if r["run"] == "coat")
    assert row["gap"] == pytest.approx(0.0125) and row["standard_error"] == pytest.approx(0.0375)
    assert row["seeds"] == 2 and row["held_out"] == pytest.approx(3.0) and not row["within_bar"]
    alone = next(r for r in summarize(records) if r["run"] == "coat-0.999-auto")
    assert alone["standard_error"] is None and alone["largest"] == pytest.approx(0.1)


def test_budget_stops_before_a_run_that_would_not_end(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(convergence.time, "monotonic", lambda: clock[0])
    todo, records = [("adamw", 0), ("coat", 0), ("adamw", 1), ("coat", 1)], [record("adamw", 0, 1.0)]
    seen = []
    for name, seed in remaining(todo, records, 0.0, 10.0):
        seen.append((name, seed))
        clock[0] += 3.0
        records.append(record(name, seed, 1.0))
    assert seen == [("coat", 0), ("adamw", 1), ("coat", 1)]  # the last starts at 6.0 and takes 3.0
    clock[0] = 0.0
    assert len(list(remaining(todo, [record("adamw", 0, 1.0)], 0.0, 3.0))) == 0
    assert len(list(remaining(todo, [], 0.0, None))) == 4


def test_variants_are_the_optimizers_they_name():
    model = GPT(SMALL, 0)
    for name, variant in VARIANTS.items():
        optimizer = optimizer_for(name, model)
        assert isinstance(optimizer, CoatAdamW) is (variant.optimizer != "adamw")
        assert all(group["betas"] == (0.9, variant.beta2) for group in optimizer.param_groups)
        base = "adamw" if variant.beta2 == 0.95 else f"adamw-{variant.beta2}"
        assert base in DEFAULT
    assert optimizer_for("coat-int8-log8", model).param_groups[0]["second_moment"] == "log8"


def test_the_wide_range_is_a_larger_exponent_of_the_first_moment_only():
    exponents = {}
    for kind in (CoatAdamW, WideRangeAdamW):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(1280))
        optimizer = kind([p], betas=(0.9, 0.95))
        # In the first step all first moments over the root of the second are alike: from the fourth on they are not.
        for step in [CoatAdamW.step] * 3 + [kind.step]:
            p.grad = torch.randn(1280)
            step(optimizer)
        exponents[kind] = (optimizer.state[p]["coat_m_k"].int(), optimizer.state[p]["coat_v_k"])
    ours, wide = exponents.values()
    assert (wide[0] - ours[0] >= 1).all() and torch.equal(ours[1], wide[1])
    assert torch.allclose(ours[0] / wide[0], torch.tensor(math.log2(448**2 / 2) / math.log2(2 * 448**2)), atol=0.04)


def test_runs_of_a_seed_differ_in_nothing_but_the_optimizer():
    tokens = torch.randint(64, (4000,), generator=torch.Generator().manual_seed(0))
    records = {name: run(name, 5, tokens, SMALL, 6, 1e-2, 8) for name in VARIANTS}
    first = {name: r["loss"][0] for name, r in records.items()}
    assert len({first[name] for name in VARIANTS if not VARIANTS[name].nudged}) == 1
    assert first["adamw-nudged"] == pytest.approx(first["adamw"], rel=1e-4)
    last = {name: r["held_out"][6] for name, r in records.items()}
    assert all(last[name] != last["adamw"] for name in ("coat", "coat-int8-log8", "coat-wide-range", "adamw-0.999"))
    assert last["coat-0.999-auto"] != last["coat-0.999-nearest"]
    again = run("coat", 5, tokens, SMALL, 6, 1e-2, 8)
    assert again["loss"] == records["coat"]["loss"] and again["held_out"] == records["coat"]["held_out"]


def test_training_learns_and_the_held_out_loss_is_that_of_the_last_tokens():
    tokens = torch.arange(64).repeat(100)

    def once():
        model = GPT(SMALL, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        return train(model, optimizer, tokens, SMALL, steps=40, seed=3, lr=1e-2, evaluate_at=[40], windows=12), model

    (first, model), (second, _) = once(), once()
    assert first["loss"] == second["loss"] and first["held_out"] == second["held_out"]
    assert first["held_out"][40] == held_out_loss(model, tokens, SMALL, 12) < 0.5 * math.log(64) < first["loss"][0]
    changed = tokens.clone()
    changed[:-200] = 0  # which is what the last 32nd is made of
    assert held_out_loss(model, changed, SMALL, 12) == first["held_out"][40]
    whole = tokens[-200:][None, :17]
    expected = torch.nn.functional.cross_entropy(model(whole[:, :-1])[0].double(), whole[0, 1:]).item()
    assert held_out_loss(model, tokens[-200:].repeat(32), SMALL, 1) == pytest.approx(expected, rel=1e-5)


def test_bytes_are_those_of_the_files(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "torch" / "__init__.py"  # a folder that is quick to search
    package.parent.mkdir(parents=True)
    package.write_text("import nothing\n")
    monkeypatch.setattr(torch, "__file__", str(package))
    tokens = prepare_bytes(tmp_path, 200_000)
    assert 100_000 < len(tokens) <= 201_000 and tokens.dtype == torch.int64 and tokens.max() == 256
    assert b"import" in bytes(tokens[tokens < 256].tolist())


@pytest.fixture
def command(monkeypatch, tmp_path):
    tokens = torch.randint(64, (4000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(convergence, "prepare_bytes", lambda folder, most: tokens)
    monkeypatch.setitem(convergence.SHAPES, "cpu", SMALL)

    def call(*arguments):
        given = ["optimizer", "--device", "cpu", "--steps", "4", "--windows", "8", "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", given + list(arguments))
        convergence.main()
        return json.loads((tmp_path / "convergence/optimizer.json").read_text())

    return call


def test_command_line_writes_after_each_run_and_resumes(command, capsys, monkeypatch):
    runs = ["--seeds", "0", "1", "--runs", "adamw", "coat"]
    real, count = convergence.run, []

    def failing(*arguments):
        if len(count) == 3:
            raise KeyboardInterrupt
        count.append(arguments[:2])
        return real(*arguments)

    monkeypatch.setattr(convergence, "run", failing)
    with pytest.raises(KeyboardInterrupt):
        command(*runs)
    monkeypatch.setattr(convergence, "run", lambda *a: (count.append(a[:2]), real(*a))[1])
    result = command(*runs, "--resume")
    assert count == [("adamw", 0), ("coat", 0), ("adamw", 1), ("coat", 1)]
    assert [(r["run"], r["seed"]) for r in result["runs"]] == count
    assert [row["run"] for row in result["gaps"]] == ["adamw", "coat"] and result["gaps"][1]["seeds"] == 2
    assert "| coat | 2 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--resume.*written with"):
        command(*runs, "--resume", "--lr", "0.5")
    command(*runs, "--budget-seconds", "1e-9", "--resume")
    assert "left" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--runs", "coat"], "--runs: got coat without adamw"),
        (["--runs", "adamw", "coat-0.999-auto"], "without adamw-0.999"),
        (["--steps", "0"], "--steps: got 0"),
        (["--max-bytes", "-1"], "--max-bytes: got -1"),
        (["--budget-seconds", "-1"], "--budget-seconds: got -1, accepted: a number > 0"),
    ],
)
def test_bad_arguments_are_named(command, arguments, word, capsys):
    with pytest.raises(SystemExit):
        command(*arguments)
    assert word in capsys.readouterr().err


def test_a_budget_that_no_run_fits_is_an_error(command, capsys, tmp_path):
    with pytest.raises(SystemExit, match="^error: no run was finished; the result stays as it was"):
        command("--budget-seconds", "1e-9")
    assert not list(tmp_path.glob("convergence/*"))
    assert f"{3 * len(DEFAULT)} of {3 * len(DEFAULT)} runs left" in capsys.readouterr().out
