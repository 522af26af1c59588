"""The benchmark of packing on a CPU, tiny: its calls work. Numbers need a GPU."""

from __future__ import annotations

from benchmarks.speed import packing
from launch.model.gpt import ModelConfig
from tests.support import megatron_on_one_rank


def test_packing(capsys) -> None:
    arguments = packing.parse(["--seq-length", "64", "--micro", "2", "--median", "12", "--repeat", "1"])
    arguments.conversations = 60
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2}
    with megatron_on_one_rank():
        rows = packing.compare(ModelConfig(**sizes, seq_length=64, vocab_size=128), arguments)
    assert [(row["layers"], row["way"]) for row in rows] == [
        (layers, way) for layers in ("bf16", "coat") for way in ("padded", "packed")
    ]
    assert all(packed["filled"] > padded["filled"] for padded, packed in (rows[:2], rows[2:]))
    assert "coat  packed is" in capsys.readouterr().out
