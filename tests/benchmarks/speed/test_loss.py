"""The benchmark of output layer and loss on a CPU, tiny, with a clock and an allocator that count nothing: its calls
work. Numbers need a GPU."""

from __future__ import annotations

import torch

from benchmarks.speed import loss


def test_loss(monkeypatch, capsys) -> None:
    monkeypatch.setattr(loss, "timed", lambda call, *_: call() is None or 1.0)
    monkeypatch.setattr(loss, "peak", lambda call: call() or 1)
    x, weight = (torch.randn(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (8, 300))
    rows = loss.losses(x, weight, torch.randint(0, 300, (8,)))
    assert [r["loss"] for r in rows][:3] == ["torch, fp32 logits", "plain", "chunked"]
    assert "chunked, 2048 entries" in capsys.readouterr().out
