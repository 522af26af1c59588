"""Every kind of layer that can be patched, as a small GPT: what is patched, how close it is, and undoing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu

from coat_dist.config import ActivationConfig
from megatron_patches import patched, rng_state, set_rng_state

from .tiny import OLMO2, tiny_batch, tiny_gpt, tiny_loss

pytestmark = pytest.mark.long  # test_patch.py has the common kinds of layers

BLOCKS = [f"decoder.layers.{i}.{b}" for i in range(2) for b in ("self_attention", "mlp")]
UNGATED = {"gated_linear_unit": False}
TIED = {"share_embeddings_and_output_weights": True}
MODELS: dict[str, dict[str, Any]] = {
    # norms
    "rmsnorm": {},
    "layernorm": {"normalization": "LayerNorm"},
    "layernorm_without_parameters": {"normalization": "LayerNorm", "affine": False},
    "megatron_spec": {"megatron_spec": True},
    "megatron_spec_layernorm": {"megatron_spec": True, "normalization": "LayerNorm"},
    # attention
    "grouped_queries": {"num_query_groups": 2},
    "one_key_and_value": {"num_query_groups": 1},
    "qk_norm": {"qk_layernorm": True},
    "qk_layernorm_grouped_bias": {
        "qk_layernorm": True, "normalization": "LayerNorm", "num_query_groups": 2, "add_qkv_bias": True
    },
    "wide_heads": {"kv_channels": 96},
    "learned_positions": {"gpt": {"position_embedding_type": "learned_absolute"}},
    # MLPs
    "geglu": {"activation_func": F.gelu},
    "quick_geglu": {"activation_func": quick_gelu},
    "gelu": {"activation_func": F.gelu} | UNGATED,
    "quick_gelu": {"activation_func": quick_gelu} | UNGATED,
    "squared_relu": {"activation_func": squared_relu} | UNGATED,
    "biases": {"add_bias_linear": True},
    "gelu_biases": {"activation_func": F.gelu, "add_bias_linear": True} | UNGATED,
    # dropout
    "hidden_dropout": {"hidden_dropout": 0.2},
    "attention_dropout": {"attention_dropout": 0.2},
    "dropout_after_biases": {"hidden_dropout": 0.2, "attention_dropout": 0.1, "add_bias_linear": True},
    # embeddings
    "tied": {"gpt": TIED},
    # families
    "gpt2": {"normalization": "LayerNorm", "activation_func": F.gelu, "add_bias_linear": True, "hidden_dropout": 0.1,
             "attention_dropout": 0.1, "gpt": TIED | {"position_embedding_type": "learned_absolute"}} | UNGATED,
    "olmo": {"normalization": "LayerNorm", "affine": False, "gpt": TIED},
    "olmo2": OLMO2 | {"num_query_groups": 2},
    "layernorm_after": {"normalization": "LayerNorm", "add_bias_linear": True, "spec": {"norm_placement": "post"}},
    "attention_biases": {"add_qkv_bias": True, "spec": {"attention_output_bias": True}},
    "qwen2": {"num_query_groups": 2, "add_qkv_bias": True},
    "qwen3": {"num_query_groups": 2, "qk_layernorm": True, "kv_channels": 96},
    "nemotron": {"normalization": "LayerNorm", "activation_func": squared_relu, "num_query_groups": 2} | UNGATED,
}  # fmt: skip


def build(options):
    """The model, with biases that are not zero."""
    model = tiny_gpt(**options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def gradients(model, batch, state, megatron_spec=False):
    """Loss, and the gradient of every parameter; dropout draws from the given state."""
    set_rng_state(state)
    model.zero_grad(set_to_none=True)
    loss = tiny_loss(model, batch, megatron_spec)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "forward", "scales"),
    [(n, "exact", "tensor") for n in MODELS]
    + [(n, "quantized", "tensor") for n in ("rmsnorm", "gpt2", "olmo", "olmo2", "qwen2")]
    + [(n, "exact", "row") for n in ("rmsnorm", "gpt2", "olmo2", "qwen3")],
)
def test_patched_close_and_unpatched_identical(name, forward, scales, device):
    """Loss within 0.5 % of BF16's; gradients within 14 degrees (cosine 0.97) and a quarter of the length."""
    options = MODELS[name]
    mask = options.get("megatron_spec", False)
    model, batch, state = build(options), tiny_batch(1, device), rng_state()
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    attributes = [set(m.__dict__) for m in model.modules()]
    loss, grads = gradients(model, batch, state, mask)

    with patched(model, ActivationConfig(forward=forward, forward_scales=scales)) as report:
        assert report.patched == BLOCKS and not report.left and not report.notes
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] != classes
        fp8_loss, fp8_grads = gradients(model, batch, state, mask)
        assert fp8_loss == gradients(model, batch, state, mask)[0], "not deterministic"

    assert fp8_loss != loss
    assert fp8_loss == pytest.approx(loss, rel=5e-3)
    for n, g in grads.items():
        cosine = F.cosine_similarity(g.flatten().double(), fp8_grads[n].flatten().double(), dim=0)
        assert cosine > 0.97, (n, cosine)
        assert fp8_grads[n].dtype == g.dtype
        assert 0.8 < fp8_grads[n].double().norm() / g.double().norm() < 1.25, n

    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert list(model.state_dict()) == keys
    again, grads_again = gradients(model, batch, state, mask)
    if device == "cpu":  # a GPU's attention backward is not deterministic
        assert again == loss
        assert all(torch.equal(grads_again[n], g) for n, g in grads.items())


def test_dropout_really_drops(device):
    """Cases above start from one random state. Two passes in a row drop different elements."""
    model, batch = build(MODELS["dropout_after_biases"]), tiny_batch(1, device)
    with patched(model, ActivationConfig()):
        assert tiny_loss(model, batch).item() != tiny_loss(model, batch).item()
        model.eval()
        assert tiny_loss(model, batch).item() == tiny_loss(model, batch).item()


def test_bias_of_fc2_is_handed_on(device):
    """Megatron adds it with dropout and residual; a patched MLP must not add it as well."""
    model = build(MODELS["gelu_biases"])
    mlp = model.decoder.layers[0].mlp
    x = torch.randn(5, 2, 256, dtype=torch.bfloat16, device=device)
    with patched(model, ActivationConfig()):
        y, bias = mlp(x)
        assert bias.data_ptr() == mlp.linear_fc2.bias.data_ptr() and bias.shape == mlp.linear_fc2.bias.shape
        with torch.no_grad():
            bias.zero_()
        assert torch.equal(y, mlp(x)[0])
