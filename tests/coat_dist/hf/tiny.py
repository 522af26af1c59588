"""Tiny transformers models with random weights, and what a step of training gives."""

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from coat_dist.hf import blocks
from tests.support import equal

same = equal  # tests/gpu takes it from here
blocks.SMALLEST = 16  # the linears of tiny models are as small as a router

FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma")
GENERIC = (
    "olmo",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "glm",
    "glm4",
    "granite",
    "smollm3",
    "cohere",
)
FOUR_NORMS = () if transformers.__version__ < "5" else ("gemma3_text", "glm4")
"""Families of GENERIC that run in one piece: their layers are known since transformers 5."""
VOCABULARY = 128
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(name="llama", dtype=torch.float32, seed=0, **changes):
    """A causal language model of a family, in training; skips the test where transformers does
    not have it.
    """
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    config = AutoConfig.for_model(name, **{**SIZES, **changes})
    torch.manual_seed(seed)
    kind = AutoModelForImageTextToText if "vision_config" in changes else AutoModelForCausalLM
    model = kind.from_config(config, dtype=dtype).train()
    # Transformers 4.56 starts its norms at 1, and not at 0, to which they add 1.
    if name == "gemma3_text":
        for module in model.modules():
            if type(module).__name__ == "Gemma3RMSNorm":
                module.weight.data.zero_()
    return model


def tokens(rows=2, length=24, seed=0):
    return torch.randint(
        3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def step(model, ids=None, **given):
    """Loss and gradients by name."""
    ids = tokens() if ids is None else ids
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, **{"labels": ids, **given})
    loss = out[0]
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def relative(got, wanted):
    return (
        (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    ).item()


def check_near(found, wanted):
    """FP8 is near: losses within 0.2 %, and gradients as a whole."""
    (loss, grads), (plain, expected) = found, wanted
    assert abs(loss / plain - 1) < 2e-3 and grads.keys() == expected.keys()
    whole = [torch.cat([g[key].flatten().float() for key in expected]) for g in (grads, expected)]
    assert relative(*whole) < 0.16
