"""Losses at other tensor-parallel sizes, on two ranks (gloo): the same bits, or the same but for
rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coat_dist.config import ActivationConfig
from tests.support import run_ranks

from .tiny import OLMO2
from .training import INVARIANT, train


def _invariance(rank, world, changes):
    settings = INVARIANT.model_copy(update=changes.pop("coat", {}))
    runs = [train(tp, sp, 6, settings, **changes) for tp, sp in ((1, False), (2, False), (2, True))]
    (losses, first, last, _, _), *others = runs
    assert losses[-1] < losses[0] - 0.2, losses
    for other_losses, other_first, other_last, replicas, _ in others:
        for name in first:
            assert torch.equal(first[name], other_first[name]), f"initial {name}"
        assert other_losses == losses, [a - b for a, b in zip(losses, other_losses, strict=True)]
        for name in last:
            assert torch.equal(last[name], other_last[name]), f"trained {name}"
        assert not any(replicas.values()), replicas
    return losses


TENSOR_SCALES = {"forward_scales": "tensor"}
OFTEN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qk_norm_gqa_bias": {"qk_layernorm": True, "num_query_groups": 2, "add_qkv_bias": True},
    "olmo2": {**OLMO2, "num_query_groups": 2},
    "tensor_scales_fp8_attention": {
        "coat": {**TENSOR_SCALES, "attention": "fp8"},
        "num_query_groups": 2,
    },
}
SELDOM: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": False, "params_dtype": torch.float32, "qk_layernorm": True},
    "olmo_tied": {
        "normalization": "LayerNorm",
        "affine": False,
        "gpt": {"share_embeddings_and_output_weights": True},
    },
    "olmo2_tensor_scales": {**OLMO2, "coat": {**TENSOR_SCALES, "forward": "quantized"}},
}


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)]
)
def test_losses_do_not_depend_on_tensor_parallelism(name):
    """Six optimizer steps at TP 1, TP 2 and TP 2 with SP: losses and all weights are the same to
    the last bit.
    """
    for losses in run_ranks(2, _invariance, (OFTEN | SELDOM)[name]):
        assert len(losses) == 6


def _experts(rank, world):
    """Experts split over two ranks: every token to every expert, so that routing cannot differ."""
    experts = {
        "num_moe_experts": 2,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 64,
    }
    return [
        train(tp, tp > 1, 6, settings, **experts)[0::3]
        for tp, settings in ((1, ActivationConfig()), (2, ActivationConfig()), (2, None))
    ]


def test_experts_split_over_ranks():
    """Losses at TP 2 with SP are those of one rank but for rounding, in FP8 as in BF16, and
    replicas do not drift.
    """
    for (alone, _), (split, replicas), (plain, _) in run_ranks(2, _experts):
        assert split == pytest.approx(alone, rel=1e-2) and split == pytest.approx(plain, rel=1e-2)
        assert split[-1] < split[0] - 0.2, split
        assert set(replicas.values()) == {0.0}, replicas
