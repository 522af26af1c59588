"""RoPE scaling of a model description: transformers' frequencies in every layer, and errors that
name the key.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coat_dist import CoatConfigError
from coat_dist.config import ActivationConfig
from launch.model.gpt import build_model, load_model_config
from launch.model.rope import checked_rope_scaling, rope_frequencies
from megatron_patches import compat, patch_model
from megatron_patches.compat import rope_mscale
from megatron_patches.layers import attention

TINY = Path(__file__).parents[3] / "configs" / "models" / "tiny.json"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "llama3.1": LLAMA3,
    "llama3.2": LLAMA3 | {"factor": 32.0},
    "llama3_short": LLAMA3 | {"factor": 3, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn_short": YARN | {"original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
    "yarn_factor": YARN | {"attention_factor": 1.25},
    "yarn_mscale": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707, "truncate": False},
    "yarn_one_mscale": YARN | {"mscale": 0.5},
    "default": {"rope_type": "default"},
}


def described(scaling, *more):
    return load_model_config(TINY, [f"rope_scaling={json.dumps(scaling)}", *more])


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(
    ("base", "dim"), [(10000, 64), (500000, 128), (1000000, 128), (2000.5, 16)]
)
def test_frequencies_are_those_of_transformers(name, base, dim):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**SCALINGS[name], "rope_theta": base}
    config = transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    ours, factor = rope_frequencies(checked_rope_scaling(SCALINGS[name]), base, dim)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=3e-7, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-15)


@pytest.mark.parametrize("name", ["llama3_short", "yarn_short", "yarn_mscale", "linear"])
def test_every_layer_turns_by_the_scaled_frequencies(one_rank, monkeypatch, name):
    """Megatron's own rotation and the flow's table, from one set of angles and one factor."""
    model = described(SCALINGS[name], "rotary_base=1000000.0").with_vocab(500)
    assert model.rotary_base == 1000000 and isinstance(model.rotary_base, int)
    built = build_model(model, dtype=torch.float32)
    frequencies, factor = rope_frequencies(model.rope_scaling, 1000000, model.head_channels)
    device = next(built.parameters()).device
    angles = built.rotary_pos_emb(32).cpu()
    assert torch.equal(angles[:, 0, 0], torch.outer(torch.arange(32.0), frequencies).repeat(1, 2))
    assert rope_mscale(built.config) == pytest.approx(factor, rel=1e-12)

    tokens, positions = (
        torch.randint(0, 500, (2, 32), device=device),
        torch.arange(32, device=device).expand(2, -1),
    )
    plain = build_model(model.model_copy(update={"rope_scaling": None}), dtype=torch.float32)
    plain.load_state_dict(built.state_dict())
    assert (built(tokens, positions, None) - plain(tokens, positions, None)).abs().max() > 1e-4

    tables = []
    table = attention.flow.rope_table
    monkeypatch.setattr(
        attention.flow, "rope_table", lambda *a: tables.append(table(*a)) or tables[-1]
    )
    patch_model(built, ActivationConfig())
    built(tokens, positions, None)
    assert len(tables) == 1
    torch.testing.assert_close(
        tables[0].cos[:, 0].cpu(), angles[:, 0, 0].cos() * factor, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        tables[0].sin[:, 0].cpu(), angles[:, 0, 0].sin() * factor, rtol=1e-6, atol=1e-6
    )


def test_one_way_to_say_it():
    """The older ``type``, nulls and "default" make no difference to what is kept, so neither to
    a restart.
    """
    assert described({"type": "linear", "factor": 2}).rope_scaling == {
        "rope_type": "linear",
        "factor": 2,
    }
    assert described(YARN | {"attention_factor": None}) == described(YARN)
    assert described({"rope_type": "default"}) == described(None) == load_model_config(TINY)


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 'rope_type: got "dynamic"'),
        ({"factor": 2.0}, "rope_type: got null"),
        ({"rope_type": "linear"}, "factor: missing"),
        (LLAMA3 | {"beta_fast": 32}, "beta_fast: unknown key"),
        (YARN | {"factor": "4"}, 'factor: got "4"'),
        (YARN | {"truncate": 1}, "truncate: got 1"),
        (YARN | {"attention_factor": -1}, "attention_factor: got -1"),
    ],
)
def test_errors_name_the_key(scaling, key):
    with pytest.raises(CoatConfigError, match=rf"^model\.rope_scaling\.{key}.*, accepted: "):
        described(scaling)


def test_a_megatron_without_an_attention_factor(one_rank, monkeypatch):
    """Before 0.15 it has none, and YaRN would be another model without a word."""
    monkeypatch.setattr(compat, "rope_mscale", lambda config: 1.0)
    build_model(described(LLAMA3).with_vocab(500))
    with pytest.raises(
        CoatConfigError,
        match=r"^model\.rope_scaling: attention factor .*: got 1\.1386.*, accepted: 1 ",
    ):
        build_model(described(YARN).with_vocab(500))
