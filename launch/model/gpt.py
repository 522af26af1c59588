"""Model descriptions (``configs/models/*.json``) and the Megatron-core GPT built from one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError, model_validator

from coat_dist import CoatConfigError
from coat_dist.config import explain
from coat_dist.reference.activation import ACTIVATIONS
from launch.find_config import read_config
from launch.model.experts import ExpertsConfig

__all__ = ["ModelConfig", "build_model", "flops_per_token", "load_model_config", "parameter_count"]


class ModelConfig(ExpertsConfig):
    """A decoder-only transformer with rotary positions. Sizes are the whole model's, not a shard's."""

    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    ffn_hidden_size: int = Field(gt=0)
    """Inner size of the MLP; a gated MLP has two projections of this size."""
    num_attention_heads: int = Field(gt=0)
    num_query_groups: int | None = Field(default=None, gt=0)
    """Key/value heads of grouped-query attention; null = as many as attention heads."""
    head_size: int | None = Field(default=None, gt=0)
    """Channels of one head; null = hidden_size / num_attention_heads."""
    seq_length: int = Field(gt=1)
    """Tokens of a training sample, and the longest context."""
    vocab_size: int | None = Field(default=None, gt=1)
    """null = the tokenizer's."""
    vocab_multiple: int = Field(default=128, gt=0)
    """The embedding is padded to a multiple of this, whatever the tensor-parallel size, so that models of all sizes
    of the parallel group are the same model."""
    activation: Literal[tuple(ACTIVATIONS)] = "swiglu"  # type: ignore[valid-type]
    """Of the MLP. Those with "glu" in their name have a gate; "gelu" and "geglu" are the exact GELU, "_tanh" its
    approximation."""
    linear_bias: bool = False
    """Biases of all linears but the output layer (GPT-2)."""
    qkv_bias: bool = False
    """A bias of the projection to queries, keys and values (Qwen2); implied by linear_bias."""
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_affine: bool = True
    """False = no learnt scale (OLMo's non-parametric LayerNorm)."""
    norm_eps: float = Field(default=1e-5, gt=0)
    qk_norm: bool = False
    rotary_base: int = Field(default=10000, gt=0)
    tie_embeddings: bool = False
    """Share the input embedding with the output layer."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; divided by sqrt(2 layers) where a layer writes to the residual stream."""
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.head_size is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: got {self.hidden_size}, accepted: a multiple of num_attention_heads "
                f"({self.num_attention_heads}), or head_size given"
            )
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_query_groups: got {self.num_query_groups}, accepted: a divisor of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.head_channels % 2:
            raise ValueError(
                f"head_size: got {self.head_channels}, accepted: an even number (rotary embedding turns pairs)"
            )
        if self.num_moe_experts is not None and self.linear_bias:
            raise ValueError("linear_bias: got true with num_moe_experts, accepted: false")
        return self

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_channels(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        assert self.vocab_size is not None, "vocab_size is filled in from the data before it is used"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def with_vocab(self, tokenizer_vocab: int) -> ModelConfig:
        """This model for a tokenizer of ``tokenizer_vocab`` ids.

        Raises:
            CoatConfigError: the model's vocabulary is smaller than the tokenizer's.
        """
        if self.vocab_size is None:
            return self.model_copy(update={"vocab_size": tokenizer_vocab})
        if self.vocab_size < tokenizer_vocab:
            raise CoatConfigError(
                f"model.vocab_size: got {self.vocab_size}, accepted: at least the {tokenizer_vocab} ids of "
                "the data's tokenizer (or null, which takes that number)"
            )
        return self

    def check_parallel(self, tp: int, sequence_parallel: bool) -> None:
        """Refuse a tensor-parallel size that does not divide what it must.

        Raises:
            CoatConfigError: names each key that is not divisible.
        """
        sizes = {
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.kv_heads,
            "ffn_hidden_size": self.ffn_hidden_size,
            "padded vocab_size": self.padded_vocab,
        }
        if sequence_parallel:
            sizes["seq_length"] = self.seq_length
        for key in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            sizes[key] = getattr(self, key) or 0
        wrong = [
            f"model.{k}: got {v}, accepted: a multiple of --tensor-parallel ({tp})" for k, v in sizes.items() if v % tp
        ]
        if self.num_moe_experts is not None and tp > 1 and not sequence_parallel:
            wrong.append("--sequence-parallel: got False, accepted: given, with experts and --tensor-parallel")
        if wrong:
            raise CoatConfigError("\n".join(wrong))


def load_model_config(given: str | Path, overrides: Sequence[str] = ()) -> ModelConfig:
    """Read a model description and apply overrides.

    Args:
        given: value of ``--model``: a path, or a name in ``configs/models``.
        overrides: ``key=value``; values are JSON, a bare word is a string.

    Raises:
        CoatConfigError: no such file, unknown key, wrong type or contradictory sizes; names the key.
    """
    values = read_config("--model", given, "models")
    needed = [key for key, field in ModelConfig.model_fields.items() if field.is_required()]
    if not any(key in values for key in needed):
        raise CoatConfigError(f"--model: {given} describes no model, accepted: an object with {', '.join(needed)}")
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise CoatConfigError(f"--model-override: got {item!r}, accepted: key=value, for example num_layers=8")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        raise CoatConfigError("\n".join(explain("model", ModelConfig, e) for e in error.errors())) from None


def transformer_config(
    model: ModelConfig,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **extra: Any,
):
    """Megatron's ``TransformerConfig`` for ``model``; ``extra`` goes to it as it is (recompute settings)."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.activations import megatron_activation

    function, gated = megatron_activation(model.activation)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_channels,
        normalization="RMSNorm" if model.normalization == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=gated,
        activation_func=function,
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_std,
        **model.expert_options(model.ffn_hidden_size),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        gradient_accumulation_fusion=False,
        # The CPU initializes the whole weight and keeps its shard, so that all tensor-parallel sizes start equal.
        use_cpu_initialization=not torch.cuda.is_available(),
        **extra,
    )


def build_model(model: ModelConfig, *, tp: int = 1, sequence_parallel: bool = False, **extra: Any) -> torch.nn.Module:
    """The GPT on this rank's device in bf16. Model-parallel groups and seeds must be set up before.

    ``model(tokens, position_ids, None)`` with int64 ``[b, s]`` gives logits ``[b, s, padded_vocab / tp]``.

    Raises:
        CoatConfigError: a token dispatcher that this machine cannot run.
    """
    if (problem := model.check_dispatcher()) is not None:
        raise CoatConfigError(problem)
    from megatron.core.models.gpt import GPTModel

    from megatron_patches.spec import gpt_layer_spec

    config = transformer_config(model, tp=tp, sequence_parallel=sequence_parallel, **extra)
    built = GPTModel(
        config,
        gpt_layer_spec(config, affine=model.norm_affine),
        vocab_size=model.padded_vocab,
        max_sequence_length=model.seq_length,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        share_embeddings_and_output_weights=model.tie_embeddings,
    )
    return built.bfloat16().to("cuda" if torch.cuda.is_available() else "cpu")


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
    biases += 2 * h + wide if model.linear_bias else 0
    norm = h * (2 if model.normalization == "layernorm" else 1) if model.norm_affine else 0
    qk = 2 * d * (2 if model.normalization == "layernorm" else 1) if model.qk_norm else 0  # these always have a scale
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
