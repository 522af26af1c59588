"""That Megatron's loop is measured, goes on from its checkpoint, and is compared with
Transformer Engine's FP8.
"""

import json
import sys

import pytest

from benchmarks.speed import megatron_loop as program
from megatron_patches.compat import older_than

TINY = [
    "hidden_size=128",
    "ffn_hidden_size=256",
    "num_attention_heads=4",
    "num_query_groups=4",
    "seq_length=32",
]


@pytest.mark.skipif(
    older_than("0.15"), reason="megatron-core 0.14 saves in this format with numpy 1 only"
)
@pytest.mark.long
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_losses_follow_bf16_and_go_on_from_a_checkpoint(tp, tmp_path, monkeypatch) -> None:
    line = [
        "loop",
        "--ranks",
        "2",
        "--tensor-parallel",
        str(tp),
        "--resume-ranks",
        "1",
        "--layers",
        "2",
    ]
    line += [
        "--steps",
        "3",
        "--lr",
        "1e-3",
        "--variants",
        "bf16",
        "coat",
        "--output",
        str(tmp_path),
    ]
    line += ["--model-override", *TINY, "vocab_size=256"]
    monkeypatch.setattr(sys, "argv", line)
    program.main()
    found = json.loads((tmp_path / "speed/megatron-loop-2-ranks.json").read_text())
    bf16, coat = (one["steps"][0] for one in found["variants"])
    assert (
        len(coat["losses"]) == 3
        and 0 < coat["largest_loss_gap"] < 0.005
        and bf16["largest_loss_gap"] == 0
    )
    whole, on_one = found["resumed"]
    assert len(whole["losses"]) == 12 and len(on_one["losses"]) == 6
    assert on_one["first_loss_gap"] < 1e-5 and on_one["largest_loss_gap"] < 0.01


def test_ratios_are_to_transformer_engines_fp8_and_peers_need_a_folder(capsys) -> None:
    speeds = {
        "TE bf16": (10.0, 4.0),
        "TE fp8": (20.0, 8.0),
        "bf16": (5.0, 2.0),
        "coat": (30.0, 6.0),
    }
    record = {"step_ms": 1.0, "losses": [2.0, 1.0]}
    steps = {
        v: {**record, "tokens_per_second_per_gpu": s, "peak_gib": p} for v, (s, p) in speeds.items()
    }
    program.compare([{"variant": v, "steps": [step]} for v, step in steps.items()])
    assert (steps["coat"]["tokens_per_second_ratio"], steps["coat"]["peak_ratio"]) == (1.5, 0.75)
    with pytest.raises(SystemExit):
        program.parse(["--variants", "TE fp8"])
    assert "--variants: got 'TE fp8' without --peers" in capsys.readouterr().err
