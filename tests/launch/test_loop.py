"""Where a step's numbers are read: beside the optimizer once they are known, and after all of the step otherwise."""

import contextlib
from types import SimpleNamespace

import torch

from launch.train.loop import Loop


def test_numbers_are_read_beside_the_optimizer(monkeypatch) -> None:
    order = []

    class Stream:
        def __init__(self):
            order.append("made")

        def wait_event(self, event):
            order.append(f"waits for {event}")

    @contextlib.contextmanager
    def on(stream):
        order.append("on" if isinstance(stream, Stream) else "elsewhere")
        yield
        order.append("off")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    loop, applied = Loop.__new__(Loop), [True]
    loop._numbers = None
    zero = SimpleNamespace(coat_norm_known="the norm")
    loop.engine = SimpleNamespace(optimizer=zero, was_step_applied=lambda: applied[0])
    for _ in range(2):
        with loop._beside_the_optimizer():
            order.append("read")
    again = ["waits for the norm", "on", "read", "off"]
    assert order == ["made", *again, *again]
    order.clear()
    applied[0] = False
    with loop._beside_the_optimizer():
        order.append("read")
    assert order == ["read"]
