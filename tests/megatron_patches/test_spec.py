"""The layer specification: norms and core attention against plain definitions, and what is
refused.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_patches import gpt_layer_spec, rng_state, universal_checkpoint_info
from megatron_patches.layers.core_attention import SDPA
from tests.support import equal

from .tiny import OLMO2, SEQ, assert_close, gradients, tiny_batch, tiny_config, tiny_gpt


def attention(kind=AttnMaskType.causal, **options) -> SDPA:
    return SDPA(
        tiny_config(), layer_number=1, attn_mask_type=kind, attention_type="self", **options
    )


def qkv(heads, groups, device, keys=SEQ):
    return [
        torch.randn(s, 2, n, 32, device=device)
        for s, n in ((SEQ, heads), (keys, groups), (keys, groups))
    ]


def test_sdpa_dropout_follows_the_configuration(device):
    q, k, v = qkv(4, 4, device)
    module = attention(attention_dropout=0.5)
    before, own = rng_state(), "cuda" if device == "cuda" else "cpu"
    first, second = module(q, k, v), module(q, k, v)
    assert not torch.equal(first, second)
    after = rng_state()
    assert torch.equal(before[own], after[own]), (
        "drawn from the state that all tensor-parallel ranks share"
    )
    assert not torch.equal(
        before["tracker"]["model-parallel-rng"], after["tracker"]["model-parallel-rng"]
    )
    module.eval()
    assert torch.equal(module(q, k, v), attention()(q, k, v))


def test_sdpa_refuses_what_it_would_ignore():
    """And so does the specification, by the fields of the configuration: test_fields.py."""
    for arguments, message in (
        (
            {"attention_mask": torch.ones(1, 1, SEQ, SEQ)},
            "attention_mask: got a tensor .*, accepted: None",
        ),
        ({"attention_bias": torch.ones(1)}, r"attention_bias: got a tensor \[1\], accepted: None"),
        (
            {"attn_mask_type": AttnMaskType.arbitrary},
            "attn_mask_type: got arbitrary, accepted: causal, no_mask",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            attention()(*qkv(4, 4, "cpu"), **arguments)
    with pytest.raises(ValueError, match="got 32 queries for 37 keys"):
        attention()(*qkv(4, 4, "cpu", keys=SEQ + 5))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_gpt_layer_spec_is_megatrons_local_spec(normalization, device):
    """Same keys, same weights for a seed, and a loss that differs by attention's rounding only."""
    batch, options = tiny_batch(0, device), {"normalization": normalization}
    ours, theirs = tiny_gpt(**options), tiny_gpt(**options, megatron_spec=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert equal(ours.parameters(), theirs.parameters())
    assert_close(gradients(ours, batch), gradients(theirs, batch, megatron_spec=True), cosine=0.995)


AFTER = {
    f"decoder.layers.{i}.post_{n}_layernorm.weight" for i in range(2) for n in ("self_attn", "mlp")
}
HEADS = {f"decoder.layers.{i}.self_attention.{n}_layernorm.weight" for i in range(2) for n in "qk"}


def test_universal_checkpoint_info_of_norms_after_blocks():
    model = tiny_gpt(**OLMO2)
    names = {n for n, _ in model.named_parameters() if "layernorm" in n}
    assert names == AFTER | HEADS | {"decoder.final_layernorm.weight"}
    replicated = universal_checkpoint_info(model)["tp_replicated_parameter_patterns"]
    plain = {pattern.strip("^$").replace("\\", "") for pattern in replicated}
    assert plain == AFTER | {"decoder.final_layernorm.weight"}


def test_gpt_layer_spec_refuses_norms():
    with pytest.raises(
        ValueError, match="qk_layernorm, qk_l2_norm: got True, accepted: False with norm_all_heads"
    ):
        gpt_layer_spec(tiny_config(qk_layernorm=True), norm_all_heads=True)
    with pytest.raises(ValueError, match="norm_placement: got 'after', accepted: 'pre', 'post'"):
        gpt_layer_spec(tiny_config(), norm_placement="after")
