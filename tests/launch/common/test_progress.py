"""Progress and how much programs print."""

import io
import logging
import sys

import pytest
import tqdm.std

from launch.common import log_level
from launch.common.command_line import Parser
from launch.common.log_level import add_log_level, say, set_log_level
from launch.common.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    return now


def test_a_line_now_and_then_where_there_is_no_terminal(clock, capsys):
    with Progress(5_000_000_000, "convert", unit="B", initial=1_000_000_000) as bar:
        for _ in range(30):  # 3 s each
            clock[0] += 3
            bar.update(100_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "convert: 40 %, 2.00G of 5.00G B, 33.3MB/s, ETA 01:30",
        "convert: 60 %, 3.00G of 5.00G B, 33.3MB/s, ETA 01:00",
        "convert: 80 %, 4.00G of 5.00G B, 33.3MB/s, ETA 00:30",
    ]


def test_short_work_is_silent_and_a_terminal_has_a_bar(monkeypatch):
    out, terminal = io.StringIO(), Terminal()
    for stream in (out, terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(10, "work") as bar:
            bar.update(10)
    assert (
        out.getvalue() == ""
        and "work: 100%" in terminal.getvalue()
        and terminal.getvalue().endswith("\n")
    )


@pytest.mark.parametrize("why", ["level", "rank"])
def test_nothing_is_printed(clock, monkeypatch, why):
    if why == "level":
        monkeypatch.setattr(log_level, "_level", "warning")
    if why == "rank":
        monkeypatch.setenv("RANK", "1")
    for out in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", out)
        with Progress(10, "work") as bar:
            clock[0] += 99
            bar.update(5)
        assert out.getvalue() == ""


@pytest.fixture
def loggers():
    names = ("DeepSpeed", "megatron", "torch.distributed")
    before = {name: logging.getLogger(name).level for name in names}
    yield lambda: {logging.getLogger(name).level for name in names}
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("level", "libraries", "printed"),
    [
        ("debug", logging.DEBUG, "info warning"),
        ("info", logging.WARNING, "info warning"),
        ("warning", logging.WARNING, "warning"),
        ("error", logging.ERROR, ""),
    ],
)
def test_log_level(loggers, capsys, monkeypatch, level, libraries, printed):
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    parser = Parser(prog="x")
    add_log_level(parser)
    set_log_level(parser.parse_args(["--log-level", level]).log_level)
    assert loggers() == {libraries}
    say("info")
    say("warning", "warning")
    captured = capsys.readouterr()
    assert (
        captured.out + captured.err
    ).split() == printed.split() and "warning" not in captured.out
    monkeypatch.setenv("RANK", "3")
    say("info")
    assert capsys.readouterr().out == ""
