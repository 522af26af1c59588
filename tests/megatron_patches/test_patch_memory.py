"""What patched layers keep for backward, and recomputation instead of keeping."""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig

from .saved_bytes import Saved, layer_bytes
from .tiny import BATCH, FFN, HEADS, HIDDEN, SEQ, tiny_batch, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention kernels of the GPU keep their own statistics")
@pytest.mark.parametrize("groups", [4, 2])
def test_saved_bytes_are_those_of_the_plan(groups):
    tokens, h, head = BATCH * SEQ, HIDDEN, HIDDEN // HEADS
    kv = groups * head
    inputs = 2 * (h + h // 32 + 4)  # x8, its scales and rstd, for both norms
    attention = 2 * (h + 2 * kv) + 2 * h + 4 * HEADS  # q, k, v and the output in BF16, log-sum-exp in fp32
    mlp = 2 * FFN + 2 * FFN // 32  # gate and up
    scalars = 4 * (2 + 2 + 4)  # scales of y8 and weight; of proj's input and weight; of y8, a and two weights
    expected = tokens * (inputs + attention + mlp) + scalars  # cosines and sines are kept once for all layers
    found = layer_bytes(SETTINGS, num_query_groups=groups)
    assert found == expected
    assert found < 0.6 * layer_bytes(None, num_query_groups=groups)


def test_values_do_not_keep_queries_and_keys_alive(device):
    """The BF16 model built here saves q, k, v once; Megatron's own self-attention would hold q and k through v."""
    from megatron.core.transformer.attention import SelfAttention

    model, batch = tiny_gpt(), tiny_batch(0, device)
    with Saved(model) as ours:
        tiny_loss(model, batch)
    for layer in model.decoder.layers:
        layer.self_attention.__class__ = SelfAttention
    with Saved(model) as plain:
        tiny_loss(model, batch)
    layers, tokens = 2, BATCH * SEQ
    assert plain.bytes - ours.bytes == layers * tokens * 2 * (HIDDEN + HIDDEN)
