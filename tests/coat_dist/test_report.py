"""The installation report finds what it claims to find."""

import subprocess
import sys

import pytest

from coat_dist import report

GOOD = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "megatron-core": "0.16.1", "triton": "3.6.0"}


def problems(**changes):
    installed = {**GOOD, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return list(report.check(installed))


def test_check_of_supported_versions_finds_nothing():
    assert not [text for _, text in problems() if any(text.startswith(name) for name in GOOD)]


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("megatron_core", "0.13.1", "problem"),
        ("megatron_core", None, "warning"),
        ("deepspeed", None, "warning"),
        ("torch", None, "problem"),
        ("deepspeed", "0.14.0", "problem"),
        ("torch", "2.4.0+cu121", "problem"),
    ],
)
def test_check_names_versions_out_of_range(name, version, level):
    found = [
        (lev, text)
        for lev, text in problems(**{name: version})
        if text.startswith(name.replace("_", "-"))
    ]
    assert len(found) == 1 and found[0][0] == level
    assert "accepted" in found[0][1] and (version is None or version in found[0][1])


def test_report_prints_versions_and_paths():
    done = subprocess.run(
        [sys.executable, "-m", "coat_dist.report"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in (
        "python",
        "torch",
        "deepspeed",
        "megatron-core",
        "GPU",
        "optimizer step",
        "FP8 GEMM",
    ):
        assert word in done.stdout


def test_paths_with_each_kind_of_gpu():
    native, old, none = (
        report.paths_with(*has) for has in ((True, True), (True, False), (False, False))
    )
    assert native.keys() == old.keys() == none.keys()
    assert (
        native["FP8 GEMM"] == "torch._scaled_mm"
        and "BF16" in old["FP8 GEMM"]
        and "definition" in none["FP8 GEMM"]
    )
    assert "arithmetic" in old["optimizer step"] and "arithmetic" not in native["optimizer step"]


def test_check_names_switches_of_the_environment(monkeypatch):
    monkeypatch.setenv("COAT_FP8_ARITHMETIC", "1")
    assert [
        level for level, text in report.check(GOOD) if text.startswith("COAT_FP8_ARITHMETIC=1")
    ] == ["warning"]
