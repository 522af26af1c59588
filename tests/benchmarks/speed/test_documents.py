"""The benchmark of documents on a CPU, tiny, with a clock that counts nothing: its calls work. Numbers need a GPU."""

from __future__ import annotations

import torch

from benchmarks.speed import documents


def test_documents(monkeypatch, capsys) -> None:
    monkeypatch.setattr(documents, "DEVICE", "cpu")
    monkeypatch.setattr(documents, "timed", lambda call, *_: call() is None or 2.0)
    monkeypatch.setattr(documents, "wall_ms", lambda call, **_: call() is None or 1.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert sum(documents.lengths("mixed", 16384)) == 16384 and min(documents.lengths("mixed", 16384)) > 0
    mixed = [223, 139, 109, 41]  # kernels are interpreted here, and what the benchmark draws takes minutes
    real = documents.lengths
    monkeypatch.setattr(documents, "lengths", lambda kind, n: mixed if kind == "mixed" else real(kind, n))
    for kind, count in (("one", 1), ("4 equal", 4), ("mixed", 3)):
        found = documents.one(kind, sum(mixed), 2, 1, 32)
        rows = {row["way"]: row for row in found["ways"]}
        assert found["documents"] >= count and rows["flow"]["of_causal"] == 1.0
        # The GPU's own ways have a reason instead of numbers here.
        assert "problem" in rows["torch varlen_attn"] and "problem" in rows["cudnn, cumulative lengths"]
        for name in ("flow", "padded"):
            if name in rows:
                assert max(rows[name][f"error_{of}"] for of in ("out", "dq", "dk", "dv")) < 0.02, rows[name]
        assert 0 < rows["flow, fp8"]["error_out"] < 0.05
    assert "4 equal: 4 documents, the longest 128; 2 heads, 1 groups" in capsys.readouterr().out
    assert documents.parse([]).tokens == 16384
