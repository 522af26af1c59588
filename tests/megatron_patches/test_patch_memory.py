"""What patched layers keep for backward."""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model
from tests.coat_dist.flow.saved_bytes import saved

from .tiny import BATCH, FFN, HEADS, HIDDEN, SEQ, tiny_batch, tiny_gpt, tiny_loss

SETTINGS, FP8 = ActivationConfig(), ActivationConfig(attention="fp8")


def saved_bytes(model, device="cpu"):
    return sum(saved(lambda: tiny_loss(model, tiny_batch(0, device)), *model.parameters()).values())


def layer_bytes(settings, **options):
    """Saved bytes of one more layer."""
    models = [tiny_gpt(num_layers=layers, **options) for layers in (1, 2)]
    for model in models if settings is not None else ():
        patch_model(model, settings)
    one, two = map(saved_bytes, models)
    return two - one


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="attention kernels of the GPU keep their own statistics"
)
@pytest.mark.parametrize(
    ("settings", "groups", "qk_layernorm"),
    [(SETTINGS, 4, False), (SETTINGS, 2, False), (FP8, 4, False), (FP8, 2, False), (FP8, 2, True)],
)
def test_saved_bytes_of_a_layer(settings, groups, qk_layernorm):
    tokens, h, head = BATCH * SEQ, HIDDEN, HIDDEN // HEADS
    kv = groups * head
    inputs = 2 * (h + h // 32 + 4)  # x8, its scales and rstd, for both norms
    kept = 2 * h + 2 * kv  # q and the output; k and v
    attention = kept + kept // 32 if settings is FP8 else 2 * kept  # codes and scales, or BF16
    mlp = 2 * FFN + 2 * FFN // 32  # gate and up
    # Scales of y8 and weight; of proj's input and weight; of y8, a and two weights.
    scalars = 4 * (2 + 2 + 4)
    # And the log-sum-exp in fp32; cosines and sines are kept once for all layers.
    expected = tokens * (inputs + attention + 4 * HEADS + mlp) + scalars
    # The inputs of both norms and their statistics; Megatron's cosines and sines, for q and for k.
    if qk_layernorm:
        expected += tokens * (2 * (h + kv) + 4 * (HEADS + groups)) + 2 * 2 * 2 * SEQ * head
    found = layer_bytes(settings, num_query_groups=groups, qk_layernorm=qk_layernorm)
    assert found == expected
    assert found < 0.6 * layer_bytes(None, num_query_groups=groups, qk_layernorm=qk_layernorm)


def test_compact_self_attention_frees_queries_and_keys(device):
    """The BF16 model built here saves q, k, v once; Megatron's own self-attention would hold q
    and k through v.
    """
    from megatron.core.transformer.attention import SelfAttention

    model = tiny_gpt()
    ours = saved_bytes(model, device)
    for layer in model.decoder.layers:
        layer.self_attention.__class__ = SelfAttention
    layers, tokens = 2, BATCH * SEQ
    assert saved_bytes(model, device) - ours == layers * tokens * 2 * (HIDDEN + HIDDEN)
