"""Whole models: cases that run, that run out of memory and that fail, and what the report says
of them.
"""

import json
import subprocess

import pytest

from benchmarks.speed import whole, whole_report
from benchmarks.speed.whole_rank import VARIANTS, settings_of

TINY = [
    "--models",
    "tiny",
    "--model-override",
    "vocab_size=512",
    "num_layers=1",
    "seq_length=32",
    "--ranks",
    "2",
]


def cases_in(folder):
    return json.loads((folder / "speed/whole.json").read_text())["cases"]


def test_cases_are_measured_once(tmp_path, capsys, monkeypatch) -> None:
    """Also micro-batches that are asked for later: only these. A failure is told, and tried
    again.
    """
    options = [*TINY, "--variants", "both", "--output", str(tmp_path), "--micro-batches"]
    whole.main([*options, "3", "1"])
    whole.main([*options, "2", "1", "3"])
    (case,) = cases_in(tmp_path)
    assert [step["micro_batch"] for step in case["steps"]] == [1, 2, 3] and case[
        "out_of_memory_at"
    ] is None
    held = [step["held_bytes"] for step in case["steps"]]
    assert held[0]["optimizer moments"] == held[2]["optimizer moments"] > 0
    assert held[0]["activations"] < held[1]["activations"] < held[2]["activations"]
    assert all(step["tokens_per_second_per_gpu"] > 0 and step["loss"] > 0 for step in case["steps"])
    capsys.readouterr()
    monkeypatch.setattr(whole, "run", lambda *_: pytest.fail("measured again"))
    whole.main([*options, "1", "2"])
    assert capsys.readouterr().out.startswith("has tiny, 2 GPUs, both: micro-batch")
    monkeypatch.setattr(
        whole, "run", lambda *_: {"steps": [], "out_of_memory_at": None, "error": "a\nthe reason"}
    )
    monkeypatch.setattr(whole, "current", lambda case: False)
    whole.main([*options, "1", "2"])
    assert "failed: the reason" in capsys.readouterr().out
    assert cases_in(tmp_path)[0]["steps"] == [], (
        "nothing of earlier code is kept beside what is new"
    )


RANK = """import json, os, pathlib, sys, time
steps, path = {steps}, pathlib.Path(sys.argv[-1])
with path.open("a") as file:
    for n in steps if os.environ["RANK"] == "0" else []:
        file.write(json.dumps({{"micro_batch": n}}) + "\\n")
while path.read_text().count("\\n") < len(steps):
    time.sleep(0.02)
{end}
"""


@pytest.mark.parametrize(
    "steps, end, limit, expected",
    [
        (
            [1, 2],
            "sys.exit(7 * (os.environ['RANK'] == '1') or time.sleep(60))",
            30,
            {"out_of_memory_at": 4},
        ),
        ([], "sys.exit(7)", 30, {"out_of_memory_at": 1}),
        ([1, 2, 4], "", 30, {}),
        ([1, 2, 4], "time.sleep(60)", 2, {}),
        ([1], "time.sleep(60)", 2, {"cut": "with steps"}),
        ([], "time.sleep(60)", 2, {"cut": "without a step"}),
        ([], "raise ValueError('so it went')", 30, {"error": "ValueError: so it went\n"}),
    ],
)
def test_how_a_case_ends(steps, end, limit, expected, monkeypatch) -> None:
    real, code = subprocess.Popen, RANK.format(steps=steps, end=end)
    monkeypatch.setattr(
        whole.subprocess,
        "Popen",
        lambda line, **more: real([line[0], "-c", code, *line[3:]], **more),
    )
    found = whole.run({"ranks": 2, "variant": "both", "micro_batches": [1, 2, 4]}, None, limit)
    assert [step["micro_batch"] for step in found.pop("steps")] == steps
    if "error" in expected:
        assert expected["error"] in found.pop("error")
        expected = {}
    assert found == {"out_of_memory_at": None} | expected


def test_variants() -> None:
    for name, (optimizer, activation, file) in VARIANTS.items():
        settings = settings_of(name, 3)
        assert (
            settings["optimizer"]["type"] == optimizer
            and settings["zero_optimization"]["stage"] == 3
        )
        plain = optimizer == "AdamW" and activation == {"enabled": False}
        assert ("coat" in settings) != plain
        if not plain:
            assert activation.items() <= settings["coat"]["activation"].items()
            assert ("optimizer" in settings["coat"]) == (optimizer == "CoatAdamW")
            remainders = (
                settings["coat"].get("optimizer", {}).get("master_weights") == "bf16_remainder"
            )
            assert remainders == (file == "zero2-remainder") == ("remainders" in name)


def case(variant, speeds, out_of_memory_at=None, commit="abc", **more):
    steps = [
        {
            **{"micro_batch": n, "tokens_per_second_per_gpu": speed, "peak_bytes": n * 2**30},
            "allocator_retries": 7 if n == 8 else 0,
            "held_bytes": {"optimizer moments": 2**31, "activations": (10 + n) * 2**30},
        }
        for n, speed in speeds.items()
    ]
    return {
        **{
            "model": "llama2-7b",
            "override": [],
            "variant": variant,
            "ranks": 2,
            "stage": 2,
            "gpu_memory": None,
        },
        **{"steps": steps, "out_of_memory_at": out_of_memory_at},
        "measured": {"commit": commit, "date": "2026-11-24", "gpus": ["NVIDIA H200"] * 2},
        **more,
    }


CASES = [
    case("BF16", {1: 1000.0, 2: 1500.0}, 3),
    case("both", {1: 1200.0, 2: 2000.0, 4: 3000.0, 8: 2900.0}, 10, commit="def"),
    case("flow only", {}, 1),
    case("optimizer only", {}, error="so it went"),
]


def test_report(tmp_path) -> None:
    found = whole_report.groups(CASES)
    (cases,) = found.values()
    assert whole_report.title(cases[0]) == "llama2-7b, 2 x H200, ZeRO-2"
    assert whole_report.equal(cases)[2:] == [
        "| BF16 | 2 | 2.0 | 12.0 | 2.0 | 1 500 | 1.00 | 0 |",
        "| both | 2 | 2.0 | 12.0 | 2.0 | 2 000 | 1.33 | 0 |",
    ]
    assert whole_report.largest(cases)[-1] == "Out of memory with micro-batch 1: flow only."
    assert (
        whole_report.largest(cases)[3]
        == "| both | 8 | 2.0 | 18.0 | 8.0 | 2 900 | 1.93 | 7 | 3 000 (4) |"
    )
    assert whole_report.cost(cases)[2:] == [
        "| BF16 | 1 500 | 55 556 |",
        "| both | 3 000 | 27 778 |",
    ]
    *lines, named = whole_report.report(CASES)
    assert "optimizer only" not in "\n".join(lines)
    assert (
        lines[-2]
        == "Measured: commit abc, 2026-11-24 (BF16; flow only); commit def, 2026-11-24 (both)."
    )
    assert named == "Not finished: optimizer only (llama2-7b, 2 x H200, ZeRO-2; failed)."
    whole_report.plot(CASES, tmp_path / "whole.png")
    assert (tmp_path / "whole.png").stat().st_size > 10_000
