"""Whole models: cases that run, that run out of memory and that fail, and what the report says of them."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.common import ROOT
from benchmarks.speed import whole, whole_report
from benchmarks.speed.whole_rank import OUT_OF_MEMORY, VARIANTS, settings_of

TINY = ["--models", "tiny", "--model-override", "vocab_size=512", "num_layers=1", "seq_length=32", "--ranks", "2"]


def cases_in(folder):
    return json.loads((folder / "speed/whole.json").read_text())["cases"]


def test_cases_are_measured_once(tmp_path, capsys, monkeypatch) -> None:
    """Also micro-batches that are asked for later: only these. A failure is told, and tried again."""
    options = [*TINY, "--variants", "both", "--output", str(tmp_path), "--micro-batches"]
    whole.main([*options, "3", "1"])
    whole.main([*options, "2", "1", "3"])
    (case,) = cases_in(tmp_path)
    assert [step["micro_batch"] for step in case["steps"]] == [1, 2, 3] and case["out_of_memory_at"] is None
    held = [step["held_bytes"] for step in case["steps"]]
    assert held[0]["optimizer moments"] == held[2]["optimizer moments"] > 0
    assert held[0]["activations"] < held[1]["activations"] < held[2]["activations"]
    assert all(step["tokens_per_second_per_gpu"] > 0 and step["loss"] > 0 for step in case["steps"])
    capsys.readouterr()
    monkeypatch.setattr(whole, "run", lambda *_: pytest.fail("measured again"))
    whole.main([*options, "1", "2"])
    assert capsys.readouterr().out.startswith("has tiny, 2 GPUs, both: micro-batch")
    monkeypatch.setattr(whole, "run", lambda *_: {"steps": [], "out_of_memory_at": None, "error": "a\nthe reason"})
    monkeypatch.setattr(whole, "current", lambda case: False)
    whole.main([*options, "1", "2"])
    assert "failed: the reason" in capsys.readouterr().out
    assert cases_in(tmp_path)[0]["steps"] == [], "nothing of earlier code is kept beside what is new"


def test_again_loses_nothing(tmp_path, monkeypatch, capsys) -> None:
    """A case that is whole stays where its next measurement is cut."""
    options = [*TINY, "--variants", "both", "--output", str(tmp_path), "--micro-batches", "1"]
    whole.main(options)
    (was,) = cases_in(tmp_path)
    monkeypatch.setattr(whole, "run", lambda *_: {"steps": [], "out_of_memory_at": None, "cut": "without a step"})
    whole.main([*options, "--again"])
    assert cases_in(tmp_path) == [was] and "what the result has of it stays" in capsys.readouterr().out
    step = was["steps"][0] | {"loss": 0.0}
    monkeypatch.setattr(whole, "run", lambda *_: {"steps": [step], "out_of_memory_at": None})
    whole.main([*options, "--again"])
    assert cases_in(tmp_path)[0]["steps"] == [step]
    other = step | {"micro_batch": 2}
    monkeypatch.setattr(whole, "run", lambda *_: {"steps": [other], "out_of_memory_at": 3})
    whole.main([*options[:-1], "2", "3", "--again"])
    assert cases_in(tmp_path)[0]["steps"] == [step, other], "a micro-batch that was not asked for stays"
    monkeypatch.setattr(whole, "run", lambda *_: {"steps": [], "out_of_memory_at": 2})
    whole.main([*options[:-1], "2", "--again"])
    (now,) = cases_in(tmp_path)
    assert now["steps"] == [step] and now["out_of_memory_at"] == 2
    monkeypatch.setattr(whole, "current", lambda case: False)
    monkeypatch.setattr(whole, "run", lambda *_: {"steps": [], "out_of_memory_at": None, "cut": "without a step"})
    whole.main(options)
    assert cases_in(tmp_path) == [now], "what says nothing does not take the place of an earlier commit's numbers"


def test_micro_batches_that_are_measured_again() -> None:
    have = {"steps": [{"micro_batch": n} for n in (1, 2, 4)], "out_of_memory_at": 6}
    assert whole.apart_from(have, [2]) == {"steps": [{"micro_batch": 1}, {"micro_batch": 4}], "out_of_memory_at": 6}
    assert whole.apart_from(have, [6, 8]) == {"steps": have["steps"], "out_of_memory_at": None}
    assert whole.apart_from({}, [1]) == {"steps": [], "out_of_memory_at": None}
    found = whole.joined(have, {"steps": [{"micro_batch": 3}], "out_of_memory_at": 4})
    assert [step["micro_batch"] for step in found["steps"]] == [1, 2, 3] and found["out_of_memory_at"] == 4


def test_a_case_that_time_cuts_goes_on(tmp_path, monkeypatch) -> None:
    """With what it lacks; and cases that failed come last, so that one that hangs does not keep the others."""
    started = []

    def run(case, te, limit):
        started.append((case["variant"], case["micro_batches"]))
        if case["variant"] == "BF16":
            return {"steps": [], "out_of_memory_at": None, "error": "no step in 600 s"}
        step = {"micro_batch": case["micro_batches"][0], "tokens_per_second_per_gpu": 1.0}
        end = (
            {"out_of_memory_at": 3}
            if len(case["micro_batches"]) < 3
            else {"out_of_memory_at": None, "cut": "with steps"}
        )
        return {"steps": [step], **end}

    monkeypatch.setattr(whole, "run", run)
    options = ["--models", "tiny", "--variants", "BF16", "both", "--micro-batches", "1", "2", "3", "--seconds"]
    options = [*options, "60", "--output", str(tmp_path)]
    whole.main(options)
    assert started == [("BF16", [1, 2, 3]), ("both", [1, 2, 3])]
    cut = cases_in(tmp_path)[1]
    assert cut["cut"] and whole_report.groups(cases_in(tmp_path)) == {}
    whole.main(options)
    assert started[2:] == [("both", [2, 3]), ("BF16", [1, 2, 3])]
    done = cases_in(tmp_path)[1]
    assert [step["micro_batch"] for step in done["steps"]] == [1, 2] and done["out_of_memory_at"] == 3
    assert "cut" not in done and len(whole_report.groups(cases_in(tmp_path))) == 1
    whole.main(options)
    assert started[4:] == [("BF16", [1, 2, 3])]


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
        ([1, 2], "sys.exit(7 * (os.environ['RANK'] == '1') or time.sleep(60))", 30, {"out_of_memory_at": 4}),
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
    monkeypatch.setattr(whole.subprocess, "Popen", lambda line, **more: real([line[0], "-c", code, *line[3:]], **more))
    found = whole.run({"ranks": 2, "variant": "both", "micro_batches": [1, 2, 4]}, None, limit)
    assert [step["micro_batch"] for step in found.pop("steps")] == steps
    if "error" in expected:
        assert expected["error"] in found.pop("error")
        expected = {}
    assert found == {"out_of_memory_at": None} | expected


def test_a_rank_that_a_signal_ends_without_a_word(tmp_path, monkeypatch, capsys) -> None:
    """As of the kernel, when the host's memory is out: the case fails, and the others are still measured."""
    real, code = subprocess.Popen, "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(whole.subprocess, "Popen", lambda line, **more: real([line[0], "-c", code], **more))
    whole.main([*TINY, "--ranks", "1", "--variants", "BF16", "both", "--output", str(tmp_path)])
    assert [one["error"].strip() for one in cases_in(tmp_path)] == ["ranks ended with [-9]"] * 2
    assert capsys.readouterr().out.count("failed: ranks ended with [-9]") == 2


def test_a_program_that_is_told_to_end_keeps_its_steps(tmp_path) -> None:
    """And leaves no rank behind."""
    options = [*TINY, "--variants", "BF16", "both", "--output", str(tmp_path), "--micro-batches", "1", "100000"]
    with subprocess.Popen([sys.executable, "-m", "benchmarks.speed.whole", *options], cwd=ROOT) as program:
        ranks = []
        try:
            while len(ranks) < 2 and program.poll() is None:
                ranks = psutil.Process(program.pid).children()
                time.sleep(0.1)
            time.sleep(12)
        finally:
            program.terminate()
        assert program.wait(30) == 0
    psutil.wait_procs(ranks, 5)
    assert not any(one.is_running() for one in ranks)
    (found,) = cases_in(tmp_path)
    assert found["cut"] == ("with steps" if found["steps"] else "without a step") and "error" not in found


def test_a_case_without_a_step_for_long_has_failed(monkeypatch) -> None:
    monkeypatch.setattr(whole, "_wait", lambda processes, limit: [p.kill() or p.wait() and None for p in processes])
    found = whole.run({"ranks": 1, "variant": "both", "micro_batches": [1]}, None, whole.STUCK)
    assert found == {"steps": [], "out_of_memory_at": None, "error": "no step in 300 s"}


def test_what_is_left() -> None:
    have = {"steps": [{"micro_batch": 2}, {"micro_batch": 4}], "out_of_memory_at": 8}
    assert whole.left_of(have, [16, 8, 6, 4, 2, 1]) == [1, 6] and whole.left_of({}, [2, 1]) == [1, 2]


def test_a_case_that_got_nowhere_lets_others_go_first() -> None:
    haves = [{"error": "so it went"}, {"cut": "without a step"}, {"cut": "with steps"}, {}]
    assert [whole.turn(have) for have in haves] == [2, 1, 0, 0]


def test_ranks_do_not_outlive_an_interrupt(monkeypatch) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(whole.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        whole._wait([rank], 30)
    assert rank.poll() is not None


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
    for name, (optimizer, activation, file) in VARIANTS.items():
        settings = settings_of(name, 3)
        assert settings["optimizer"]["type"] == optimizer and settings["zero_optimization"]["stage"] == 3
        plain = optimizer == "AdamW" and activation == {"enabled": False}
        assert ("coat" in settings) != plain
        if not plain:
            assert activation.items() <= settings["coat"]["activation"].items()
            assert ("optimizer" in settings["coat"]) == (optimizer == "CoatAdamW")
            remainders = settings["coat"].get("optimizer", {}).get("master_weights") == "bf16_remainder"
            assert remainders == (file == "zero2-remainder") == ("remainders" in name)


def test_peers_are_needed_for_peers(capsys) -> None:
    with pytest.raises(SystemExit):
        whole.parse(["--variants", "TE bf16"])
    assert "--peers" in capsys.readouterr().err
    assert "TE bf16" not in whole.parse([]).variants and "TE bf16" in whole.parse(["--peers", "x"]).variants


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
        **{"model": "llama2-7b", "override": [], "variant": variant, "ranks": 2, "stage": 2, "gpu_memory": None},
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
    assert whole_report.largest(cases)[3] == "| both | 8 | 2.0 | 18.0 | 8.0 | 2 900 | 1.93 | 7 | 3 000 (4) |"
    assert whole_report.cost(cases)[2:] == ["| BF16 | 1 500 | 55 556 |", "| both | 3 000 | 27 778 |"]
    *lines, named = whole_report.report(CASES)
    assert "optimizer only" not in "\n".join(lines)
    assert lines[-2] == "Measured: commit abc, 2026-11-24 (BF16; flow only); commit def, 2026-11-24 (both)."
    assert named == "Not finished: optimizer only (llama2-7b, 2 x H200, ZeRO-2; failed)."
    whole_report.plot(CASES, tmp_path / "whole.png")
    assert (tmp_path / "whole.png").stat().st_size > 10_000


def test_where_nothing_fits() -> None:
    """A line instead of tables. One that fits has nothing that it is equal to."""
    small = [case(name, {}, 1, gpu_memory=80.0) for name in ("BF16", "both")]
    lines = whole_report.report([*CASES, *small])
    assert lines[lines.index("### llama2-7b, 2 x H200, 80 GiB of it, ZeRO-2") + 2 :][0] == (
        "Out of memory with micro-batch 1: BF16; both."
    )
    more = whole_report.largest([*small, case("flow only", {}, 4)])
    assert more == ["Out of memory with micro-batch 1: BF16; both. Out of memory with micro-batch 4: flow only."]
    assert whole_report.equal([*small, case("both, remainders", {1: 900.0}, 2, gpu_memory=80.0)]) == []


def test_report_of_what_has_no_end() -> None:
    lines = whole_report.report([case("BF16", {1: 1000.0}), case("both", {1: 1200.0}, cut=True)])
    assert "| BF16 | 1+ | 2.0 | 11.0 | 1.0 | 1 000 | 1.00 | 0 | 1 000 (1) |" in lines
    assert "+ memory was not out at the largest micro-batch that was tried." in lines
    assert lines[-1] == "Not finished: both (llama2-7b, 2 x H200, ZeRO-2; cut by time)."


def test_gpus_with_other_names_are_never_in_one_table() -> None:
    h200, h100 = case("BF16", {1: 1000.0}), case("both", {1: 1200.0})
    h100["measured"]["gpus"] = ["NVIDIA H100 80GB HBM3"] * 2
    assert len(whole_report.groups([h200, h100])) == 2
    whole.check_gpus([h200], ["NVIDIA H200"] * 2)
    whole.check_gpus([], [])
    with pytest.raises(ValueError, match="--name: got a result of NVIDIA H200, accepted on NVIDIA H100: another"):
        whole.check_gpus([h200], ["NVIDIA H100"])


def test_the_order_of_cases() -> None:
    mixed = [
        case("both", {}, ranks=1), case("BF16", {}, ranks=1), case("BF16", {}, model="tiny"),
        case("BF16", {}, gpu_memory=80.0), case("as it was called", {}), case("both", {}), case("BF16", {}),
    ]  # fmt: skip
    found = [(one["model"], one["ranks"], one["gpu_memory"], one["variant"]) for one in whole.in_order(mixed)]
    assert found == [
        ("llama2-7b", 2, None, "BF16"), ("llama2-7b", 2, None, "both"),
        ("llama2-7b", 2, None, "as it was called"), ("llama2-7b", 2, 80.0, "BF16"),
        ("llama2-7b", 1, None, "BF16"), ("llama2-7b", 1, None, "both"), ("tiny", 2, None, "BF16"),
    ]  # fmt: skip
