"""How large a model is, and how much it computes."""

from __future__ import annotations

from coat_dist.reference.activation import ACTIVATIONS
from launch.model.config import ModelConfig

__all__ = ["flops_per_token", "parameter_count"]


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, the vocabulary's padding included."""
    h, d = model.hidden_size, model.head_channels
    attention = h * d * (2 * model.num_attention_heads + 2 * model.kv_heads)
    wide = model.ffn_hidden_size * ACTIVATIONS[model.activation].parts  # what fc1 writes
    moe = model.expert_layers(model.num_layers)
    mlps = (model.num_layers - moe) * h * (wide + model.ffn_hidden_size)
    if moe:
        mlps += moe * model.expert_weights(h, model.ffn_hidden_size, ACTIVATIONS[model.activation].gated, active=False)
    biases = d * (model.num_attention_heads + 2 * model.kv_heads) if model.qkv_bias or model.linear_bias else 0
    biases += h if model.attention_output_bias or model.linear_bias else 0
    biases += h + wide if model.linear_bias else 0
    norm = h * (2 if model.normalization == "layernorm" else 1) if model.norm_affine else 0
    heads = model.num_attention_heads + model.kv_heads if model.qk_norm == "full" else 2 if model.qk_norm else 0
    qk = heads * d * (2 if model.normalization == "layernorm" else 1)  # these always have a scale
    embeddings = model.padded_vocab * h * (1 if model.tie_embeddings else 2)
    return model.num_layers * (attention + biases + 2 * norm + qk) + mlps + norm + embeddings


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Floating-point operations of forward and backward for one token.

    Two a weight and pass, three passes (forward, dgrad, wgrad), and attention's two products over the causal half of
    the sequence. Recomputation is not counted. Of experts, those that a token goes to.
    """
    h, d = model.hidden_size, model.head_channels
    gated, moe = ACTIVATIONS[model.activation].gated, model.expert_layers(model.num_layers)
    weights = model.num_layers * h * d * (2 * model.num_attention_heads + 2 * model.kv_heads)
    weights += (model.num_layers - moe) * h * model.ffn_hidden_size * (3 if gated else 2)
    if moe:
        weights += moe * model.expert_weights(h, model.ffn_hidden_size, gated, active=True)
    attention = 2 * seq_length * model.num_attention_heads * d  # two products, two operations each, half of the keys
    return 3.0 * (2 * weights + model.num_layers * attention + 2 * h * model.padded_vocab)
