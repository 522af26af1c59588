"""Codes of recomputed layers in host memory: the bits of codes on the GPU, and the memory that the
codes took there; nothing grows from step to step.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")

from coat_dist.config import ActivationConfig
from coat_dist.hf import patch_model
from tests.coat_dist.hf.tiny import same, tiny, tokens

LAYERS = 6
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
IDS = tokens(4, 512)
CODES = IDS.numel() * SIZES["hidden_size"] * 33 // 32
"""Bytes of one layer's codes and scales."""


@sdpa_kernel(SDPBackend.MATH)
def trained(reentrant, place):
    """Gradients of three steps of two micro-batches that are alive at the same time, with bytes on
    the GPU after forward and in pinned memory after each step. Attention is torch's plain one: in
    the backward pass of the fused ones, sums have no order.
    """
    model = tiny("llama", torch.bfloat16, num_hidden_layers=LAYERS, **SIZES).cuda()
    patch_model(model, ActivationConfig(boundaries="fp8", boundaries_device=place))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids, found, used, pinned = IDS.cuda(), [], [], []
    for step in range(3):
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        losses = [model(ids.roll(i + step), labels=ids, use_cache=False).loss for i in range(2)]
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        for loss in losses:
            loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
        pinned.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
        del losses, loss
    return found, used, pinned


@pytest.mark.parametrize("reentrant", [True, False])
def test_codes_in_host_memory_give_equal_bits(reentrant):
    (right, used, _), (found, away, pinned) = (
        trained(reentrant, place) for place in ("layer", "cpu")
    )
    assert all(map(same, found, right))
    # The last layer's codes stay. Libraries take memory in the first step.
    assert used[-1] - away[-1] == pytest.approx((2 * LAYERS - 1) * CODES, rel=0.01)
    assert len(set(pinned)) == 1 and away[-1] == away[-2]
