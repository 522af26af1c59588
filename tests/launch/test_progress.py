"""Progress and how much programs say."""

import io
import logging

import pytest

from launch import log_level, progress
from launch.command_line import Parser
from launch.log_level import add_log_level, say, set_log_level
from launch.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_now_and_then_where_there_is_no_terminal(clock):
    out = io.StringIO()
    with Progress(4_000_000_000, "convert", unit="B", stream=out) as bar:
        for _ in range(30):  # 3 s each
            clock[0] += 3
            bar.update(100_000_000)
    assert out.getvalue().splitlines() == [
        "convert: 25 %, 1.00G of 4.00G B, 33.3M B/s, ETA 01:30",
        "convert: 50 %, 2.00G of 4.00G B, 33.3M B/s, ETA 01:00",
        "convert: 75 %, 3.00G of 4.00G B, 33.3M B/s, ETA 00:30",
    ]


def test_what_was_there_before_is_not_in_the_rate(clock):
    out = io.StringIO()
    with Progress(100, "merge", unit="doc", initial=60, stream=out, every=10) as bar:
        clock[0] += 10
        bar.update(20)
    assert out.getvalue() == "merge: 80 %, 80.0 of 100 doc, 2.00 doc/s, ETA 00:10\n"


def test_short_work_is_silent_and_a_terminal_has_a_bar(clock):
    out, terminal = io.StringIO(), Terminal()
    for stream in (out, terminal):
        with Progress(10, "work", stream=stream) as bar:
            bar.update(10)
    assert out.getvalue() == "" and "work: 100%" in terminal.getvalue() and terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("why", ["quiet", "level", "rank"])
def test_nothing_is_said(clock, monkeypatch, why):
    if why == "level":
        monkeypatch.setattr(log_level, "_level", "warning")
    if why == "rank":
        monkeypatch.setenv("RANK", "1")
    for out in (io.StringIO(), Terminal()):
        with Progress(10, "work", stream=out, quiet=why == "quiet") as bar:
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
    ("level", "libraries", "said"),
    [
        ("debug", logging.DEBUG, "info warning"),
        ("info", logging.WARNING, "info warning"),
        ("warning", logging.WARNING, "warning"),
        ("error", logging.ERROR, ""),
    ],
)
def test_log_level(loggers, capsys, monkeypatch, level, libraries, said):
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    parser = Parser(prog="x")
    add_log_level(parser)
    set_log_level(parser.parse_args(["--log-level", level]).log_level)
    assert loggers() == {libraries}
    say("info")
    say("warning", "warning")
    captured = capsys.readouterr()
    assert (captured.out + captured.err).split() == said.split() and "warning" not in captured.out
    monkeypatch.setenv("RANK", "3")
    say("info")
    assert capsys.readouterr().out == ""


def test_a_level_that_is_none_is_one_line(capsys):
    parser = Parser(prog="x")
    add_log_level(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--log-level", "loud"])
    assert "--log-level: got 'loud', accepted: debug, info, warning, error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "rank", "level", "said"),
    [(0.01, "0", "info", "working ...\n"), (0.01, "1", "info", ""), (0.01, "0", "warning", ""), (60, "0", "info", "")],
)
def test_a_slow_phase_is_named_once(monkeypatch, capsys, seconds, rank, level, said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(log_level, "_level", level)
    with log_level.SlowPhase("working", seconds) as phase:
        phase.join(0.5)
    phase.join(5)
    assert not phase.is_alive() and capsys.readouterr() == ("", said)


@pytest.mark.parametrize("task", ["0", "1"])
def test_of_slurms_tasks_only_the_first_speaks_before_ranks_are_known(monkeypatch, capsys, task):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_PROCID", task)
    say("once")
    assert capsys.readouterr().out == "once\n" * (task == "0")
