"""config.json: what is honoured in both spellings, what has no meaning here, and what is refused
by its key.
"""

from __future__ import annotations

import json

import pytest
import torch

from coat_dist import CoatConfigError
from launch.convert.config_json import model_from_config
from launch.convert.config_json_out import config_for
from launch.convert.families import FAMILIES
from launch.model.model_config import ModelConfig, load_model_config
from launch.model.rope import rope_frequencies
from tests.launch.convert.hf_folders import LLAMA3, SMALL

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def of(kind, **more):
    return {**LLAMA, "model_type": kind, "architectures": [FAMILIES[kind].architecture], **more}


def read(values):
    return model_from_config(values, "config.json")[0]


def test_published_shapes():
    """The configurations of published models as they are downloaded, transformers 4's spelling."""
    assert read(LLAMA).function() == load_model_config("llama3-8b").function()
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    newer = {
        **LLAMA,
        "max_position_embeddings": 131072,
        "rope_scaling": scaling,
        "pretraining_tp": 1,
    }
    assert read(newer).function() == load_model_config("llama3.1-8b").function()
    five = {k: v for k, v in newer.items() if k not in ("rope_theta", "rope_scaling")}
    assert read({**five, "rope_parameters": {**scaling, "rope_theta": 500000.0}}) == read(newer)


@pytest.mark.parametrize("kind", FAMILIES)
def test_either_spelling_of_rope(kind):
    older = of(kind, rope_theta=10000.0, rope_scaling=None, num_key_value_heads=None)
    assert read(older).rotary_base == 10000 and read(older).kv_heads == 32
    five = {k: v for k, v in older.items() if not k.startswith("rope")}
    assert (
        read(
            {**five, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
        ).rotary_base
        == 20000
    )
    # The oldest spelling.
    scaled = read({**older, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert scaled.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "key", "value", "accepted"),
    [
        ("llama", "model_type", "gemma", "llama, mistral, .*olmo2"),
        ("llama", "architectures", ["LlamaForSequenceClassification"], r'.*\["LlamaForCausalLM"\]'),
        ("llama", "hidden_act", "relu", '"silu"'),
        ("llama", "mlp_bias", True, ".*false"),
        ("qwen3", "attention_bias", True, "false"),
        ("olmo", "clip_qkv", 8.0, "null"),
        ("llama", "quantization_config", {"quant_method": "fp8"}, "null"),
        ("llama", "partial_rotary_factor", 0.5, ".*1"),
        ("qwen3", "num_experts", 8, ".*0"),
        ("llama", "num_local_experts", 8, ".*0"),
        ("llama", "logits_scaling", 8.0, ".*1"),
        ("llama", "final_logit_softcapping", 30.0, "null"),
        ("llama", "vocab_size", None, "an integer"),
        ("mixtral", "router_jitter_noise", 0.1, ".*0"),
    ],
)
def test_refused_keys(kind, key, value, accepted):
    with pytest.raises(CoatConfigError, match=f"^config.json: {key}: .*, accepted: {accepted}"):
        read(of(kind, **{key: value}))


@pytest.mark.parametrize(
    ("kind", "values", "key"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "model.rope_scaling.rope_type",
        ),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"num_key_value_heads": 5}, "model.num_query_groups"),
        ("llama", {"hidden_size": "4096"}, "model.hidden_size"),
        ("llama", {"rms_norm_eps": 0}, "model.norm_eps"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 0},
            "model.moe_shared_expert_intermediate_size",
        ),
        ("mixtral", {"num_experts_per_tok": 1}, "model.moe_router_pre_softmax"),
    ],
)
def test_refused_values(kind, values, key):
    with pytest.raises(CoatConfigError, match=f"^config.json: {key}: got .*, accepted: "):
        read(of(kind, **values))


def test_of_two_spellings_of_rope_that_of_transformers_wins():
    transformers = pytest.importorskip("transformers")
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    sizes = dict(num_hidden_layers=1, max_position_embeddings=128, hidden_size=64, **heads)
    linear, usual = {"type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 5e5}
    llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for more in (
        {"rope_scaling": linear, "rope_parameters": usual},
        {"rope_scaling": linear, "rope_parameters": usual, "rope_theta": 7e4},
        {"rope_parameters": usual, "rope_theta": 7e4},
        {"rope_scaling": llama3, "original_max_position_embeddings": 32},
        {
            "rope_scaling": {**llama3, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 32,
        },
        {"rope_scaling": llama3},
    ):
        config = transformers.LlamaConfig(**sizes, **json.loads(json.dumps(more)))
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
        model = read({**{k: v for k, v in LLAMA.items() if k != "rope_theta"}, **sizes, **more})
        ours, _ = rope_frequencies(model.rope_scaling, model.rotary_base, 16)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("values", "window", "length"),
    [
        (of("mistral", sliding_window=None), None, 8192),
        (of("mistral"), 4096, 4096),  # its default
        (of("mistral", sliding_window=1024), 1024, 1024),
        (of("qwen2", use_sliding_window=False, sliding_window=1024), None, 8192),
        (
            of("qwen2", use_sliding_window=True, sliding_window=1024, max_window_layers=32),
            None,
            8192,
        ),
        (
            of("qwen2", use_sliding_window=True, sliding_window=1024, max_window_layers=20),
            1024,
            1024,
        ),
        (
            of(
                "qwen2",
                use_sliding_window=True,
                sliding_window=64,
                layer_types=["sliding_attention"] * 32,
            ),
            64,
            64,
        ),
        (
            of(
                "qwen2",
                use_sliding_window=True,
                sliding_window=64,
                layer_types=["full_attention"] * 32,
            ),
            None,
            8192,
        ),
    ],
)
def test_windows_bound_the_sequence(values, window, length):
    """Within a window's length attention is the whole one; longer sequences are refused by the
    model.
    """
    model = read(values)
    assert (model.sliding_window, model.seq_length) == (window, length)


def test_defaults_are_those_of_transformers():
    """Of keys that a config.json leaves out."""
    transformers = pytest.importorskip("transformers")
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    for kind, family in FAMILIES.items():
        known = transformers.CONFIG_MAPPING[kind]()
        for key, value in family.absent.items():
            theirs = getattr(known, key, value)
            if key == "num_key_value_heads" and value is None:
                value = known.num_attention_heads
            assert theirs == value or (key == "head_dim" and value is None), (kind, key)
        bare = {"model_type": kind, **{key: getattr(known, key) for key in sizes}}
        model = read(bare)
        assert model.rotary_base == known.rope_parameters["rope_theta"]
        assert model.tie_embeddings == known.tie_word_embeddings


@pytest.mark.parametrize(
    "name",
    ["llama2-7b", "llama3-8b", "llama3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"]
    + ["olmo-1b", "olmo-7b", "olmo2-7b", "llama3.2-1b", "mixtral-8x7b"]
    + ["qwen1.5-moe-a2.7b", "qwen3-30b-a3b"],
)
def test_what_is_written_reads_back(name):
    """A description without any config.json; also by transformers."""
    model = load_model_config(name)
    model = model.model_copy(update={"vocab_size": model.vocab_size or 50304})
    config, family = config_for(model, torch.bfloat16)
    assert read(config).function() == model.function()
    assert config["torch_dtype"] == "bfloat16" and config["architectures"] == [family.architecture]
    transformers = pytest.importorskip("transformers")
    known = transformers.CONFIG_MAPPING[family.model_type](**config)
    assert read(json.loads(known.to_json_string())).function() == model.function()


def test_heads_that_do_not_divide_the_hidden_size():
    """With a size of their own; transformers takes that of every family but Llama."""
    transformers = pytest.importorskip("transformers")
    model = ModelConfig(**{**SMALL, "num_attention_heads": 3, "head_size": 16, "vocab_size": 50})
    config, family = config_for(model, torch.bfloat16)
    assert transformers.CONFIG_MAPPING[family.model_type](**config).head_dim == 16
    with pytest.raises(CoatConfigError, match="model.head_size: got 16, accepted"):
        config_for(model, torch.bfloat16, family="llama")
    # Of older versions.
    known = {**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert config_for(model, torch.bfloat16, known)[0] == known


def test_a_known_config_is_kept():
    known = {
        **LLAMA,
        "eos_token_id": [128001, 128009],
        "transformers_version": "4.40.0",
        "torch_dtype": "float32",
    }
    model = read(known)
    assert config_for(model, torch.bfloat16, known)[0] == {**known, "torch_dtype": "bfloat16"}
    grown = model.model_copy(
        update={"vocab_size": 128300, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    )
    config = config_for(grown, torch.bfloat16, known)[0]
    assert config["eos_token_id"] == [128001, 128009] and config["vocab_size"] == 128300
    assert read(config).function() == grown.function()
    shorter = model.model_copy(update={"seq_length": 2048})  # what it was trained at bounds nothing
    assert config_for(shorter, torch.bfloat16, known)[0]["max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        (
            None,
            {"activation": "squared_relu"},
            "activation: got 'squared_relu', accepted: 'swiglu', which llama has",
        ),
        ("mistral", {"qk_norm": True}, "qk_norm: got True, accepted: False, which mistral has"),
        (
            "mixtral",
            {"num_moe_experts": 4, "moe_router_score_function": "sigmoid"},
            "moe_router_score_function: got",
        ),
        (
            "mixtral",
            {"num_moe_experts": 4, "moe_router_pre_softmax": True},
            "moe_router_pre_softmax: got True",
        ),
        (
            "mixtral",
            {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 32},
            "moe_shared_expert_",
        ),
        (
            "mixtral",
            {"num_moe_experts": 4, "num_layers": 2, "moe_layer_freq": 2},
            "moe_layer_freq: got",
        ),
    ],
)
def test_a_model_that_no_family_has(family, keys, named):
    model = ModelConfig(**{**SMALL, "vocab_size": 100, **keys})
    with pytest.raises(CoatConfigError, match=f"model.{named}"):
        config_for(model, torch.float32, family=family)
