"""Model descriptions: published shapes, overrides, errors."""

from pathlib import Path

import pytest

from coat_dist import CoatConfigError
from coat_dist.config import ActivationConfig
from launch.model.gpt import build_model, flops_per_token, load_model_config, parameter_count
from megatron_patches import patch_model
from megatron_patches.layers.activations import activation_name

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
# Parameter counts, to four digits: in the papers' tables (Llama 2 and 3, LLaMA 33B called 30B,
# OLMo), for the others those of the published weights.
PUBLISHED = {
    "llama2-7b": 6.738e9,
    "llama2-13b": 13.02e9,
    "llama3-8b": 8.030e9,
    "llama-30b": 32.53e9,
    "llama3-70b": 70.55e9,
    "llama3.1-405b": 405.9e9,
    "olmo-1b": 1.177e9,
    "olmo-7b": 6.888e9,
    "llama3.1-8b": 8.030e9,
    "llama3.2-1b": 1.236e9,
    "mistral-7b": 7.242e9,
    "qwen2.5-7b": 7.616e9,
    "qwen3-8b": 8.191e9,
    "olmo2-7b": 7.299e9,
    "mixtral-8x7b": 46.70e9,
    "qwen1.5-moe-a2.7b": 14.32e9,
    "qwen3-30b-a3b": 30.53e9,
}


def test_every_description_loads():
    assert {p.stem for p in CONFIGS.glob("*.json")} == {*PUBLISHED, "tiny", "tiny-moe"}
    for path in CONFIGS.glob("*.json"):
        load_model_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    model = load_model_config(CONFIGS / f"{name}.json")
    assert parameter_count(model) == pytest.approx(PUBLISHED[name], rel=5e-4)
    model.check_parallel(4, True)


def test_flops_are_six_a_weight_and_attention():
    model = load_model_config(CONFIGS / "llama2-7b.json")
    weights = (
        parameter_count(model) - model.padded_vocab * 4096 - (2 * 32 + 1) * 4096
    )  # embedding and norms multiply nothing
    attention = 3 * 2 * 32 * 4096 * 4096
    assert flops_per_token(model, 4096) == pytest.approx(6 * weights + attention, rel=1e-12)


def test_overrides():
    model = load_model_config(
        CONFIGS / "llama3-8b.json",
        ["num_layers=8", "rotary_base=1000", "activation=geglu", "tie_embeddings=true"],
    )
    assert (model.num_layers, model.rotary_base, model.activation, model.tie_embeddings) == (
        8,
        1000,
        "geglu",
        True,
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "activation=gelu_tanh",
            "linear_bias=true",
            "normalization=layernorm",
            "tie_embeddings=true",
        ],
        ["qkv_bias=true", "num_query_groups=2", "qk_norm=true"],
        ["activation=squared_relu", "normalization=layernorm", "norm_affine=false"],
        [
            "activation=quick_geglu",
            "linear_bias=true",
            "hidden_dropout=0.1",
            "attention_dropout=0.1",
        ],
        ["norm_placement=post", "qk_norm=full", "num_query_groups=2"],
        ["attention_output_bias=true", "normalization=layernorm", "norm_placement=post"],
    ],
)
def test_every_kind_of_layer_is_built_counted_and_patched(one_rank, overrides):
    """What a description can ask for is what Megatron builds and the flow runs."""
    model = load_model_config(CONFIGS / "tiny.json", overrides).with_vocab(500)
    built = build_model(model)
    assert sum(p.numel() for p in built.parameters()) == parameter_count(model)
    report = patch_model(built, ActivationConfig())
    assert len(report.patched) == 2 * model.num_layers and not report.left
    assert built.config.hidden_dropout == model.hidden_dropout
    mlp = built.decoder.layers[0].mlp
    rows = model.ffn_hidden_size * (2 if "glu" in model.activation else 1)
    assert (
        mlp.linear_fc1.weight.shape[0] == rows
        and (mlp.linear_fc2.bias is not None) == model.linear_bias
    )
    assert activation_name(built.config) == model.activation


def test_padding_does_not_depend_on_the_parallel_size():
    model = load_model_config(CONFIGS / "tiny.json").with_vocab(1001)
    assert model.padded_vocab == 1024
    assert model.with_vocab(500).vocab_size == 1001
    for override, rows in (
        (["vocab_size=257"], 384),
        (["vocab_size=257", "vocab_multiple=256"], 512),
        (["vocab_size=2", "vocab_multiple=1"], 2),
    ):
        assert load_model_config(CONFIGS / "tiny.json", override).padded_vocab == rows


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "num_layer=8",
            r"model.num_layer: unknown key \(did you mean 'num_layers'\?\), accepted: "
            r".*num_layers, ",
        ),
        (
            "num_moe_experts=8 moe_router_topk=1",
            "model.moe_router_pre_softmax: got false with moe_router_topk 1, accepted: true",
        ),
        (
            "moe_aux_loss_coeff=0.01",
            "model.moe_aux_loss_coeff: got 0.01 without num_moe_experts, accepted: absent",
        ),
        (
            "num_moe_experts=8 linear_bias=true",
            "model.linear_bias: got true with num_moe_experts, accepted: false",
        ),
        ("num_layers=0", r"model.num_layers: got 0, accepted: greater than 0"),
        (
            "activation=relu",
            r'model.activation: got "relu", accepted: \'swiglu\', \'geglu\', .* or '
            r"\'squared_relu\'",
        ),
        (
            "num_query_groups=3",
            r"model.num_query_groups: got 3, accepted: a divisor of num_attention_heads \(32\)",
        ),
        (
            "num_attention_heads=33",
            r"model.hidden_size: got 4096, accepted: a multiple of num_attention_heads \(33\)",
        ),
        ("num_layers", r"--model-override: got 'num_layers', accepted: key=value"),
        (
            "sliding_window=2048",
            r"model.sliding_window: got 2048 with seq_length 4096, accepted: at least seq_length",
        ),
        (
            "qk_norm=full normalization=layernorm",
            r'model.qk_norm: got "full" with normalization "layernorm", accepted: ',
        ),
    ],
)
def test_errors_name_the_key(override, message):
    with pytest.raises(CoatConfigError, match=f"^{message}"):
        load_model_config(CONFIGS / "llama2-7b.json", override.split())


def test_sizes_that_ranks_cannot_share():
    model = load_model_config(CONFIGS / "llama3-8b.json")
    with pytest.raises(
        CoatConfigError,
        match=r"^model.num_query_groups: got 8, accepted: a multiple of --tensor-parallel \(16\)$",
    ):
        model.check_parallel(16, False)
    with pytest.raises(
        CoatConfigError, match=r"model.vocab_size: got 128256, accepted: at least the 200000 ids"
    ):
        model.with_vocab(200_000)


def test_identity_of_a_dense_model_has_no_keys_of_experts():
    assert not any(
        key.startswith("moe_") for key in load_model_config(CONFIGS / "tiny.json").identity()
    )
    assert load_model_config(CONFIGS / "tiny-moe.json").identity()["num_moe_experts"] == 8
