"""What identifies a run in its result."""

from __future__ import annotations

import sys

import pytest

from benchmarks import common


@pytest.mark.parametrize("option", ["--peers", "--data", "--extend", "--plot"])
def test_the_command_holds_no_paths(monkeypatch, option) -> None:
    for given in ([option, "/home/me/a"], [f"{option}=/home/me/a=b"]):
        arguments = ["--runs", "a b:0", *given, "--steps=20", "--output=/home/me", "--tiny", "--output", "/home/me"]
        monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
        assert common.command().endswith(f" --runs 'a b:0' {option} PATH --steps=20 --tiny")
