"""That optimizers are measured under FSDP2, and that what two ranks saved is the same on one."""

import json
import sys

import pytest
import torch

from benchmarks.speed import fsdp

pytest.importorskip("transformers")


@pytest.mark.long
def test_losses_follow_torchs_and_one_rank_loads_the_bytes_of_two(tmp_path, monkeypatch) -> None:
    line = [
        "fsdp",
        "--model",
        "tiny",
        "--sequence",
        "32",
        "--micro-batch",
        "2",
        "--steps",
        "3",
        "--trunk",
        "2",
    ]
    variants = ["--variants", "torch fused AdamW", "CoatAdamW + layers"]
    monkeypatch.setattr(sys, "argv", [*line, *variants, "--output", str(tmp_path)])
    fsdp.main()
    torchs, ours = json.loads((tmp_path / "speed/fsdp.json").read_text())["variants"]
    assert ours["same_weights"] and ours["same_states"] and "load_error" not in ours
    torchs, ours = torchs["steps"][0], ours["steps"][0]
    assert torchs["state_bytes_per_parameter"] == pytest.approx(8, abs=0.01)
    assert ours["state_bytes_per_parameter"] == pytest.approx(2 + 6 / 128, abs=0.05)
    assert ours["losses"] == pytest.approx(torchs["losses"], rel=0.005) and len(ours["losses"]) == 3


def test_digests_are_of_every_byte_and_gaps_have_a_sign(capsys) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    first = fsdp.digests(model, optimizer)
    next(iter(optimizer.state.values()))["exp_avg_sq"][0] += 2.0**-149
    assert (
        fsdp.digests(model, optimizer)
        == {**first, "states": fsdp.digests(model, optimizer)["states"]}
        != first
    )
    record = {"tokens_per_second_per_gpu": 2.0, "peak_gib": 1.0, "state_bytes_per_parameter": 8.0}
    base, one = ({"steps": [{**record, "losses": [9.0, *[x] * 20]}]} for x in (2.0, 1.0))
    fsdp.compare(one, base)
    assert (
        one["steps"][0]["last_twenty_gap"] == -0.5
        and "(-50.000%; of all" in capsys.readouterr().out
    )
