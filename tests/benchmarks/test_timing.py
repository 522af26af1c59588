"""How times are taken, with events and a clock that count: order, warm-up, repetitions and
medians.
"""

from __future__ import annotations

import pytest

from benchmarks import timing


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What happens, in order. An event's time is the number of calls before it, squared."""
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = sum(what != "record" for what in happened) ** 2
            happened.append("record")

        def elapsed_time(self, end: Event) -> int:
            assert happened[-1] == "synchronize"
            return end.at - self.at

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: happened.append("synchronize"))
    return happened


def test_the_median_is_one_of_the_values() -> None:
    assert (
        timing.median([5, 1, 3]) == 3
        and timing.median([4, 1, 3, 2]) == 3
        and timing.median([7]) == 7
    )


def test_stages_are_timed_one_after_the_other(log) -> None:
    stages = [lambda: log.append("forward"), lambda: log.append("backward")]
    forward, backward = timing.stages_ms(stages, 3)
    assert log == ["record", "forward", "record", "backward", "record"] * 3 + ["synchronize"]
    assert forward == 3**2 - 2**2 and backward == 4**2 - 3**2  # of the second repetition


def test_a_call_is_timed_after_three_to_warm_up(log) -> None:
    assert timing.timed(lambda: log.append("call"), 5) == 6**2 - 5**2
    assert log == ["call"] * 3 + ["record", "call", "record"] * 5 + ["synchronize"]


@pytest.mark.parametrize("synchronize, expected", [(False, 2000.0), (True, 5000.0)])
def test_the_hosts_clock_waits_for_the_gpu_if_told_to(monkeypatch, synchronize, expected) -> None:
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: takes(3.0))
    assert timing.wall_ms(lambda: takes(2.0), synchronize=synchronize) == expected
