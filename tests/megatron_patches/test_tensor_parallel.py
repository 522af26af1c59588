"""Training at other tensor-parallel sizes, on two ranks (gloo): the same bits, or the same but for
rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from coat_dist.config import ActivationConfig
from tests.support import equal, run_ranks, slow

from .tiny import FP32, FULL, OLMO2
from .training import INVARIANT, train

TENSOR_SCALES = {"forward_scales": "tensor"}
GROUPED = {"num_query_groups": 2}
EXPERTS = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 64}
"""Every token goes to every expert, so that routing cannot differ."""


class Case(NamedTuple):
    model: dict[str, Any]
    settings: ActivationConfig | None = INVARIANT
    apart: float = 0.0
    """How far losses may be apart, relative to them; 0 for equal bits of losses and weights."""


OFTEN = {
    "llama": Case({}),
    "qk_norm_gqa_bias": Case({"qk_layernorm": True, "add_qkv_bias": True, **GROUPED}),
    "olmo2": Case(OLMO2 | GROUPED),
    "tensor_scales_fp8_attention": Case(
        GROUPED, INVARIANT.model_copy(update={**TENSOR_SCALES, "attention": "fp8"})
    ),
    "recomputed from codes": Case(FULL, INVARIANT.model_copy(update={"boundaries": "fp8"})),
    "experts": Case(EXPERTS, ActivationConfig(), 1e-2),
    "olmo2 without tp_invariant": Case(OLMO2 | GROUPED, ActivationConfig(), 1e-2),
    "olmo2 in fp32": Case(OLMO2 | GROUPED | FP32, None, 1e-5),
}
SELDOM = {
    "fp32": Case({"bf16": False, "params_dtype": torch.float32, "qk_layernorm": True}),
    "olmo_tied": Case(
        {
            "normalization": "LayerNorm",
            "affine": False,
            "gpt": {"share_embeddings_and_output_weights": True},
        }
    ),
    "olmo2_tensor_scales": Case(
        OLMO2, INVARIANT.model_copy(update={**TENSOR_SCALES, "forward": "quantized"})
    ),
}


def _sizes(rank, world, case):
    """Six optimizer steps at TP 1, TP 2 and TP 2 with SP."""
    sizes = [(1, False), (2, False), (2, True)]
    if "num_moe_experts" in case.model:  # Megatron does not train them without SP
        del sizes[1]
    runs = [train(tp, sp, 6, case.settings, **case.model) for tp, sp in sizes]
    (losses, first, last, _, _), *others = runs
    assert losses[-1] < losses[0] - 0.2, losses
    for other_losses, other_first, other_last, replicas, _ in others:
        assert equal(first, other_first)
        assert other_losses == pytest.approx(losses, rel=case.apart, abs=0)
        for name in last if case.apart == 0 else ():
            assert torch.equal(last[name], other_last[name]), f"trained {name}"
        assert not any(replicas.values()), replicas
    return len(losses)


@pytest.mark.parametrize("name", [*OFTEN, *map(slow, SELDOM)])
def test_training_does_not_depend_on_the_tensor_parallel_size(name):
    assert run_ranks(2, _sizes, (OFTEN | SELDOM)[name]) == [6, 6]
