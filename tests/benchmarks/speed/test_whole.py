"""Whole models: cases that run, that run out of memory and that fail, and what the report says of them."""

import json
import subprocess
import sys

import pytest

from benchmarks.common import code_digest
from benchmarks.speed import whole, whole_report
from benchmarks.speed.whole_rank import OUT_OF_MEMORY, VARIANTS, settings_of

TINY = ["--models", "tiny", "--model-override", "vocab_size=512", "num_layers=1", "seq_length=32", "--ranks", "2"]


def test_cases_are_measured_once(tmp_path, capsys, monkeypatch) -> None:
    options = [*TINY, "--micro-batches", "2", "1", "--variants", "both", "--output", str(tmp_path)]
    whole.main(options)
    (case,) = json.loads((tmp_path / "speed/whole.json").read_text())["cases"]
    assert [step["micro_batch"] for step in case["steps"]] == [1, 2] and case["out_of_memory_at"] is None
    assert case["steps"][0]["held_bytes"]["optimizer moments"] > 0 and "held_bytes" not in case["steps"][1]
    assert all(step["tokens_per_second_per_gpu"] > 0 and step["loss"] > 0 for step in case["steps"])
    capsys.readouterr()
    monkeypatch.setattr(whole, "run", lambda *_: pytest.fail("measured again"))
    whole.main(options)
    assert capsys.readouterr().out.startswith("has tiny, 2 GPUs, both: micro-batch")
    monkeypatch.setattr(whole, "run", lambda *_: {"steps": [], "error": "a\nthe reason"})
    monkeypatch.setattr(whole, "code_digest", lambda: "other code")
    whole.main(options)
    assert "failed: the reason" in capsys.readouterr().out


@pytest.mark.parametrize(
    "first, second, limit, expected",
    [
        ("sys.exit(7)", "time.sleep(60)", 30, [OUT_OF_MEMORY, 0]),
        ("time.sleep(60)", "sys.exit(3)", 30, [0, 3]),
        ("pass", "time.sleep(60)", 0.5, [0, None]),
        ("pass", "pass", 30, [0, 0]),
    ],
)
def test_a_rank_that_ends_ends_the_others(first, second, limit, expected) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", f"import sys, time; {code}"]) for code in (first, second)]
    assert whole._wait(ranks, limit) == expected
    assert all(one.poll() is not None for one in ranks)


def test_variants() -> None:
    for name, (optimizer, activation) in VARIANTS.items():
        settings = settings_of(name, 3)
        assert settings["optimizer"]["type"] == optimizer and settings["zero_optimization"]["stage"] == 3
        plain = optimizer == "AdamW" and activation == {"enabled": False}
        assert ("coat" in settings) != plain
        if not plain:
            assert activation.items() <= settings["coat"]["activation"].items()
            assert ("optimizer" in settings["coat"]) == (optimizer == "CoatAdamW")


def test_peers_are_needed_for_peers(capsys) -> None:
    with pytest.raises(SystemExit):
        whole.parse(["--variants", "TE bf16"])
    assert "--peers" in capsys.readouterr().err
    assert "TE bf16" not in whole.parse([]).variants and "TE bf16" in whole.parse(["--peers", "x"]).variants


def case(variant, speeds, out_of_memory_at=None, code=None, **more):
    held = {"optimizer moments": 2**31, "activations": 2**30}
    steps = [
        {"micro_batch": n, "tokens_per_second_per_gpu": speed, "peak_bytes": n * 2**30}
        | ({"held_bytes": held} if i == 0 else {})
        for i, (n, speed) in enumerate(speeds.items())
    ]
    return {
        **{"model": "llama2-7b", "override": [], "variant": variant, "ranks": 2, "stage": 2, "gpu_memory": None},
        **{"steps": steps, "out_of_memory_at": out_of_memory_at},
        "measured": {"code": code or code_digest(), "commit": "abc", "gpus": ["NVIDIA H200"] * 2},
        **more,
    }


CASES = [
    case("BF16", {1: 1000.0, 2: 1500.0}, 3),
    case("both", {1: 1200.0, 2: 2000.0, 4: 3000.0, 8: 2900.0}, 10, code="old"),
    case("flow only", {}, 1),
    case("optimizer only", {}, error="so it went"),
]


def test_report(tmp_path) -> None:
    found = whole_report.groups(CASES)
    (cases,) = found.values()
    assert whole_report.title(cases[0]) == "llama2-7b, 2 x H200, ZeRO-2"
    assert whole_report.equal(cases)[2:] == [
        "| BF16 | 2 | 2.0 | 2.0 | 2.0 | 1,500 | 1.00 |",
        "| both \u2020abc | 2 | 2.0 | 2.0 | 2.0 | 2,000 | 1.33 |",
        "| flow only | does not fit | | | | | |",
    ]
    assert whole_report.largest(cases)[3] == "| both \u2020abc | 8 | 2.0 | 8.0 | 8.0 | 2,900 | 1.93 |"
    assert whole_report.cost(cases)[2:] == ["| BF16 | 1,500 | 55,556 |", "| both \u2020abc | 3,000 | 27,778 |"]
    text = "\n".join(whole_report.report(found))
    assert "optimizer only" not in text and text.endswith("at the commit named.")
    whole_report.plot(found, tmp_path / "whole.png")
    assert (tmp_path / "whole.png").stat().st_size > 10_000
