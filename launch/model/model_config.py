"""Model descriptions: the keys of ``configs/models/*.json``, and reading one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from coat_dist import CoatConfigError
from coat_dist.config import explain
from coat_dist.reference.activation import ACTIVATIONS
from launch.common.find_config import read_config
from launch.model.rope import checked_rope_scaling

_ACTIVATIONS = tuple(name for name, kind in ACTIVATIONS.items() if kind.limit == math.inf)
_NO_FUNCTION = {
    *(
        "seq_length",
        "sliding_window",
        "vocab_multiple",
        "init_std",
        "hidden_dropout",
        "attention_dropout",
    ),
    *(
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_token_dispatcher_type",
        "moe_grouped_gemm",
        "moe_router_dtype",
    ),
}
"""Keys that change a model's training, precision or storage, but not what it computes."""


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


class ModelConfig(BaseModel):
    """A decoder-only transformer with rotary positions. Sizes are the whole model's, not a shard's.

    Keys of experts are named as in Megatron's ``TransformerConfig``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

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
    """The embedding is padded to a multiple of this, whatever the tensor-parallel size, so that
    models of all sizes of the parallel group are the same model.
    """
    activation: Literal[_ACTIVATIONS] = "swiglu"  # type: ignore[valid-type]
    """Of the MLP. Those with "glu" in their name have a gate; "gelu" and "geglu" are the exact
    GELU, "_tanh" its approximation.
    """
    linear_bias: bool = False
    """Biases of all linears but the output layer (GPT-2)."""
    qkv_bias: bool = False
    """A bias of the projection to queries, keys and values (Qwen2); implied by linear_bias."""
    attention_output_bias: bool = False
    """A bias of attention's output projection; implied by linear_bias. Llama's ``attention_bias``
    is qkv_bias and this one.
    """
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_affine: bool = True
    """False = no learnt scale (OLMo's non-parametric LayerNorm)."""
    norm_eps: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    norm_placement: Literal["pre", "post"] = "pre"
    """Norms of a layer stand before attention and MLP, x + f(norm(x)), or after them, x +
    norm(f(x)) (OLMo-2). The norm before the output layer is there in both.
    """
    qk_norm: Literal[True, False, "full"] = False
    """Norms on queries and keys before they are rotated: true = over the channels of each head,
    with one scale for all heads (Qwen3); "full" = RMSNorm over all heads together, of all
    tensor-parallel ranks (OLMo-2).
    """
    rotary_base: Annotated[float, AfterValidator(_whole)] = Field(
        default=10000, gt=1, allow_inf_nan=False
    )
    """Of rotary embedding, called rope_theta elsewhere. 1000000.0 is 1000000."""
    rope_scaling: Annotated[dict[str, Any] | None, AfterValidator(checked_rope_scaling)] = None
    """Scaling of rotary frequencies in Hugging Face's layout, for example {"rope_type": "llama3",
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}; also "linear" (factor) and "yarn" (factor,
    original_max_position_embeddings; attention_factor, beta_fast, beta_slow, mscale,
    mscale_all_dim, truncate). null, or rope_type "default" = none.
    """
    sliding_window: int | None = Field(default=None, gt=0)
    """Tokens that a token sees, itself included (Mistral 7B v0.1). Attention here always sees the
    whole sequence, so a window shorter than seq_length is refused, and any other changes nothing.
    """
    tie_embeddings: bool = False
    """Share the input embedding with the output layer."""
    init_std: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Standard deviation of initial weights; divided by sqrt(2 layers) where a layer writes to
    the residual stream.
    """
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)

    num_moe_experts: int | None = Field(default=None, gt=0)
    """Experts of a layer; null = a dense model."""
    moe_router_topk: int = Field(default=2, gt=0)
    """Experts that a token goes to."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice; false = over the chosen ones."""
    moe_ffn_hidden_size: int | None = Field(default=None, gt=0)
    """Inner size of an expert; null = ffn_hidden_size."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits. Sigmoids of the chosen experts are divided by
    their sum.
    """
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Type of the router's logits and probabilities; null = bfloat16 logits, softmax in fp32."""
    moe_shared_expert_intermediate_size: int | None = Field(default=None, gt=0)
    """Inner size of an expert that every token goes to, beside the chosen ones; null = there is
    none.
    """
    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learnt projection of its input
    (Qwen2-MoE).
    """
    moe_layer_freq: Annotated[int, Field(gt=0)] | list[Literal[0, 1]] = 1
    """Layers 0, n, 2n, ... have experts, the others an MLP of ffn_hidden_size. A list says 1 or
    0 for each layer.
    """
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Factor of the load-balancing loss (Switch Transformer, arXiv 2101.03961, equation 4), per
    layer and rank.
    """
    moe_z_loss_coeff: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Factor of the z loss of the router's logits (ST-MoE, arXiv 2202.08906, equation 5); null =
    none.
    """
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """How Megatron sorts tokens by expert, on one rank. "alltoall" needs a GPU. With
    ``--expert-parallel`` it is taken whatever stands here.
    """
    moe_grouped_gemm: bool = False
    """All experts of a layer in one product each for fc1 and fc2; no package is needed. Parameters
    are stored as Megatron's ``GroupedMLP`` has them, so a checkpoint is for the one or the other.
    """

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.head_size is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: got {self.hidden_size}, accepted: a multiple of num_attention_heads "
                f"({self.num_attention_heads}), or head_size given"
            )
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_query_groups: got {self.num_query_groups}, accepted: a divisor of "
                "num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.qk_norm == "full" and self.normalization != "rmsnorm":
            raise ValueError(
                f'qk_norm: got "full" with normalization "{self.normalization}", accepted: true or '
                "false"
            )
        if self.sliding_window is not None and self.sliding_window < self.seq_length:
            raise ValueError(
                f"sliding_window: got {self.sliding_window} with seq_length {self.seq_length}, "
                "accepted: at least "
                "seq_length, or null (attention sees the whole sequence), or "
                f"seq_length={self.sliding_window}"
            )
        if self.num_moe_experts is None:
            if key := min(self.model_fields_set & EXPERT_KEYS, default=None):
                raise ValueError(
                    f"{key}: got {json.dumps(getattr(self, key))} without num_moe_experts, "
                    "accepted: absent"
                )
            return self
        if self.linear_bias:
            raise ValueError("linear_bias: got true with num_moe_experts, accepted: false")
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError(
                "moe_shared_expert_gate: got true, accepted: false without a shared expert"
            )
        softmax_of_one = self.moe_router_topk == 1 and self.moe_router_score_function == "softmax"
        if softmax_of_one and not self.moe_router_pre_softmax:
            accepted = "true (the softmax over one expert has no gradient)"
            raise ValueError(
                f"moe_router_pre_softmax: got false with moe_router_topk 1, accepted: {accepted}"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Plain values that say what this model is; of a dense one, no keys of experts."""
        return self.model_dump(exclude=EXPERT_KEYS if self.num_moe_experts is None else None)

    def function(self) -> dict[str, Any]:
        """Values that decide what the model computes, in one spelling each, by their keys."""
        values = self.model_dump(exclude=_NO_FUNCTION) | {
            "num_query_groups": self.kv_heads,
            "head_size": self.head_channels,
            "qkv_bias": self.qkv_bias or self.linear_bias,
            "attention_output_bias": self.attention_output_bias or self.linear_bias,
        }
        if self.num_moe_experts is None:
            return {key: value for key, value in values.items() if key not in EXPERT_KEYS}
        layers = [self.has_experts(layer) for layer in range(self.num_layers)]
        values |= {"moe_layer_freq": layers, "moe_ffn_hidden_size": self.expert_size}
        if all(layers):
            values["ffn_hidden_size"] = None
        if self.moe_router_score_function != "softmax":
            values["moe_router_pre_softmax"] = None
        return values

    def different(self, other: ModelConfig, where: str) -> list[str]:
        """A line for each key in which ``other``, the model of ``where``, computes something
        else.
        """
        ours, theirs = self.function(), other.function()
        return [
            f"model.{key}: got {ours.get(key)!r}, accepted: {theirs.get(key)!r}, which {where} has"
            for key in ours | theirs
            if ours.get(key) != theirs.get(key)
        ]

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_channels(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def expert_size(self) -> int:
        """Inner size of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if self.num_moe_experts is None:
            return False
        frequency = self.moe_layer_freq
        return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        assert self.vocab_size is not None, (
            "vocab_size is filled in from the data before it is used"
        )
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
                f"model.vocab_size: got {self.vocab_size}, accepted: at least the "
                f"{tokenizer_vocab} ids of "
                "the data's tokenizer (or null, which takes that number)"
            )
        return self

    def check_parallel(self, tp: int, sequence_parallel: bool) -> None:
        """Refuse a tensor-parallel size that does not divide the model.

        Raises:
            CoatConfigError: names each key that is not divisible.
        """
        sizes = {
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.kv_heads,
            "ffn_hidden_size": self.ffn_hidden_size,
            "padded vocab_size": self.padded_vocab,
            "moe_ffn_hidden_size": self.moe_ffn_hidden_size or 0,
            "moe_shared_expert_intermediate_size": self.moe_shared_expert_intermediate_size or 0,
            "seq_length": self.seq_length if sequence_parallel else 0,
        }
        wrong = [
            f"model.{k}: got {v}, accepted: a multiple of --tensor-parallel ({tp})"
            for k, v in sizes.items()
            if v % tp
        ]
        if self.moe_grouped_gemm and tp > 1:
            wrong.append(
                f"model.moe_grouped_gemm: got true with --tensor-parallel {tp}, accepted: false "
                "(universal checkpoints "
                "cannot join the parts of these weights)"
            )
        if self.num_moe_experts is not None and tp > 1 and not sequence_parallel:
            wrong.append(
                "--sequence-parallel: got False, accepted: given, with experts and "
                "--tensor-parallel"
            )
        if wrong:
            raise CoatConfigError("\n".join(wrong))

    def check_expert_parallel(self, ep: int, dp: int) -> None:
        """Refuse a number of ranks among which experts cannot be divided.

        Args:
            ep: ranks that divide the experts of a layer.
            dp: data-parallel ranks.

        Raises:
            CoatConfigError: says what is accepted.
        """
        experts = self.num_moe_experts or 1
        if ep < 1 or experts % ep or dp % ep:
            raise CoatConfigError(
                f"--expert-parallel: got {ep}, accepted: a divisor of model.num_moe_experts "
                f"({experts}) and of the "
                f"number of data-parallel ranks ({dp})"
            )


EXPERT_KEYS = {key for key in ModelConfig.model_fields if key.startswith("moe_")}
"""Keys that only a model with experts has."""


def load_model_config(given: str | Path, overrides: Sequence[str] = ()) -> ModelConfig:
    """Read a model description and apply overrides.

    Args:
        given: value of ``--model``: a path, or a name in ``configs/models``.
        overrides: ``key=value``; values are JSON, a bare word is a string.

    Raises:
        CoatConfigError: no such file, unknown key, wrong type or contradictory sizes; names the
            key.
    """
    values = read_config("--model", given, "models")
    if "num_layers" not in values:
        raise CoatConfigError(
            f"--model: {given} describes no model, accepted: an object with num_layers, or a folder"
        )
    return described_model(values, overrides)


def described_model(values: dict[str, Any], overrides: Sequence[str] = ()) -> ModelConfig:
    """See :func:`load_model_config`; ``values`` is the content of a description."""
    values = dict(values)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise CoatConfigError(
                f"--model-override: got {item!r}, accepted: key=value, for example num_layers=8"
            )
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        raise CoatConfigError(*(explain("model", ModelConfig, e) for e in error.errors())) from None
