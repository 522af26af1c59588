"""Mixtures of experts: fused files of transformers 5, grouped weights, both names of a key."""

from __future__ import annotations

import pytest
import torch

from launch.convert.checkpoint_weights import Ungrouped
from launch.convert.config_json_out import config_for
from launch.convert.fill import each_expert, grouped
from launch.convert.sources import open_weights
from tests.launch.convert.hf_folders import CASES, config, convert, edit, make, tensors
from tests.support import equal

transformers = pytest.importorskip("transformers")

MIXED = [name for name, (kind, _) in CASES.items() if "Mo" in kind or "Mixtral" in kind]


@pytest.mark.parametrize("name", MIXED)
def test_stacked_experts_of_transformers_5(tmp_path, name):
    """What ``save_original_format=False`` writes reads as what the hub has, and is written as
    that.
    """
    model = make(name, tmp_path / "each", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(tensor.dim() == 3 for tensor in tensors(tmp_path / "stacked").values())
    for folder in ("each", "stacked"):
        convert(tmp_path / folder, tmp_path / f"{folder}-again")
    one, other = tensors(tmp_path / "each-again"), tensors(tmp_path / "stacked-again")
    assert one.keys() == other.keys() == tensors(tmp_path / "each").keys()
    assert equal(one, other)


def test_grouped_experts_hold_the_same_weights():
    """In Megatron's memory of ``GroupedMLP``, out and in again, to the bit."""
    fc1, fc2 = ([torch.randn(s) for _ in range(3)] for s in ((32, 8), (8, 16)))
    held = {
        "l.mlp.experts.weight1": grouped(fc1).view(8, 96),
        "l.mlp.experts.weight2": grouped(fc2).view(48, 8),
        "l.mlp.router.weight": torch.randn(3, 8),
    }

    class Source:
        shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
        tp = 1

        def read(self, name):
            return held[name]

        def divided(self, name):
            return self.tp > 1

    each = Ungrouped(Source(), 3, 8)
    for number, weights in ((1, fc1), (2, fc2)):
        for name, weight in zip(
            each_expert(f"l.mlp.experts.weight{number}", range(3)), weights, strict=True
        ):
            assert each.shapes[name] == tuple(weight.shape) and torch.equal(each.read(name), weight)
    # As Megatron multiplies: tokens times [experts, h, out].
    x = torch.randn(5, 8)
    w1 = held["l.mlp.experts.weight1"].view(3, 8, -1)
    torch.testing.assert_close(x @ w1[1], x @ fc1[1].t())
    Source.tp = 2
    with pytest.raises(
        ValueError, match="l.mlp.experts.weight1: divided over tensor-parallel ranks, accepted"
    ):
        Ungrouped(Source(), 3, 8)


def test_another_number_of_experts_replaces_both_spellings(tmp_path):
    """transformers 4 and 5 call it by different names, and a file that came may have either."""
    make("qwen3_moe", tmp_path)
    known = config(edit(tmp_path, router_aux_loss_coef=0.5))
    assert "num_local_experts" in known
    model = open_weights(tmp_path).model
    assert model.moe_aux_loss_coeff == 0.5
    assert config_for(model, torch.float32, known)[0] == {**known, "dtype": "float32"}
    written = config_for(model.model_copy(update={"num_moe_experts": 7}), torch.float32, known)[0]
    assert written["num_experts"] == 7 and "num_local_experts" not in written
    assert transformers.AutoConfig.for_model(**written).num_experts == 7
