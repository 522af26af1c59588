"""Attention of models built here: PyTorch's SDPA, and a self-attention that saves no more than it needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from torch.utils.weak import WeakTensorKeyDictionary

from coat_dist import flow
from coat_dist.config import ActivationConfig
from coat_dist.formats import QuantizedTensor

from .compat import field_or, rope_mscale
from .fields import check_field
from .linear import Patch
from .residual import Residual

__all__ = ["PATCHED", "SDPA", "CompactSelfAttention", "PatchedSelfAttention", "unfused_reason", "unsplit_reason"]


class SDPA(MegatronModule):
    """Core attention by ``torch.nn.functional.scaled_dot_product_attention``: causal, with grouped queries.

    Softmax is fp32 inside the kernels. ``apply_query_key_layer_scaling`` changes nothing here: Megatron divides by the
    layer number before fp16 products and multiplies in the softmax.

    Raises:
        ValueError: a configuration that SDPA cannot honour, by its key.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        for key in ("context_parallel_size", "window_size", "softmax_type", "qk_clip", "log_max_attention_logit"):
            check_field(config, key, "with SDPA core attention")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attention of one rank's heads.

        Args:
            query: ``[s, b, heads, d]``.
            key, value: ``[s, b, groups, d]``, groups a divisor of heads.
            attention_mask: must be None; the causal mask is built in.

        Returns:
            ``[s, b, heads * d]``, an alias of what SDPA keeps for backward.

        Raises:
            ValueError: a mask, bias, packed sequences, or causal attention between different lengths.
        """
        causal = self._check(query, key, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        with self._random():
            dropout = self.dropout if self.training else 0.0
            return flow.sdpa(query, key, value, causal=causal, scale=self.softmax_scale, dropout=dropout)

    def compressed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        settings: ActivationConfig,
        attn_mask_type: AttnMaskType | None = None,
    ) -> tuple[torch.Tensor, QuantizedTensor]:
        """:meth:`forward` by :func:`~coat_dist.flow.attention`, which keeps FP8; the output also as FP8.

        Raises:
            ValueError: as :meth:`forward`, and dropout that was switched on after patching.
        """
        if self.dropout and self.training:
            raise ValueError(f'attention dropout: got {self.dropout}, accepted: 0 with activation.attention "fp8"')
        causal = self._check(query, key, attention_mask, attn_mask_type, attention_bias, None)
        return flow.attention(query, key, value, settings, causal=causal, scale=self.softmax_scale)

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None,
        attention_bias: torch.Tensor | None,
        packed_seq_params: Any,
    ) -> bool:
        """Whether attention is causal; raises ValueError as :meth:`forward` says."""
        if attention_mask is not None:
            raise ValueError(
                f"attention_mask: got a tensor of shape {list(attention_mask.shape)}, accepted: None "
                "(SDPA core attention is causal by itself)"
            )
        for name, given in (("attention_bias", attention_bias), ("packed_seq_params", packed_seq_params)):
            if given is not None:
                raise ValueError(f"{name}: got {type(given).__name__}, accepted: None with SDPA core attention")
        causal = _is_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        if causal and query.shape[0] != key.shape[0]:
            raise ValueError(
                f"causal attention: got {query.shape[0]} queries for {key.shape[0]} keys, accepted: equal lengths"
            )
        return causal

    @contextmanager
    def _random(self) -> Iterator[None]:
        """Tensor-parallel ranks drop other heads; under sequence parallelism the whole layer runs in that state."""
        if self.dropout and self.training and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                yield
        else:
            yield


def _is_causal(kind: AttnMaskType) -> bool:
    accepted = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}
    if kind not in accepted:
        raise ValueError(f"attn_mask_type: got {kind.name}, accepted: {', '.join(k.name for k in accepted)}")
    return accepted[kind]


class CompactSelfAttention(SelfAttention):
    """Self-attention that does not keep the whole of linear_qkv's output alive through the values.

    Rotary embedding writes new queries and keys, but values stay a view: saved for backward, that view holds queries
    and keys a second time, 4 bytes a token and hidden element. With norms on queries and keys, which save their
    inputs, the whole output is kept in any case and a copy would only add to it.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        tensors = super().get_query_key_value_tensors(*args, **kwargs)
        if _normed(self) or len(tensors) < 3:  # fewer: not split, Transformer Engine's fused rotary embedding will
            return tensors
        query, key, value, *rest = tensors
        return query, key, value.contiguous(), *rest


class PatchedSelfAttention(CompactSelfAttention):
    """Self-attention of a patched layer, with one pass from linear_qkv's output to rotated heads, or FP8 attention.

    Megatron's own forward runs wherever a call is not training or evaluation on whole sequences.
    """

    coat_patched = True
    coat: Patch

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        key_value_states: torch.Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron's: ``[s, b, h]`` → output ``[s, b, h]`` and bias (s/TP under sequence parallelism).

        Raises:
            ValueError: ``attention: "fp8"`` with an argument that Megatron's own forward alone can take.
        """
        freqs, k_freqs = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        foreign = {"key_value_states": key_value_states, "inference_context": inference_context, **kwargs}
        foreign |= {f"argument {i}": given for i, given in enumerate(args, 6)}
        foreign |= {"rotary_pos_emb": None if freqs is k_freqs else rotary_pos_emb}
        bias = foreign.pop("attention_bias", None)
        fp8 = self.coat.settings.attention == "fp8"
        for name, given in foreign.items():
            if given is not None and fp8:
                raise ValueError(
                    f"{name}: got {type(given).__name__}, accepted: None (rotary_pos_emb: one for queries and keys) "
                    'with activation.attention "fp8"'
                )
        if any(given is not None for given in foreign.values()) or (unsplit_reason(self) and not fp8):
            leading = hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb
            return super().forward(*leading, *args, **kwargs)

        residual = Residual(hidden_states) if self.coat.residual else None
        query, key, value = self._query_key_value(hidden_states, freqs, residual)
        if fp8:
            settings = self.coat.settings
            kind = self.attn_mask_type
            out, out8 = self.core_attention.compressed(query, key, value, attention_mask, bias, settings, kind)
            y, y_bias = self.linear_proj(out, compressed=out8)
        else:
            recompute = self.checkpoint_core_attention and self.training
            core = self._checkpointed_attention_forward if recompute else self.core_attention
            out = core(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type, attention_bias=bias)
            y, y_bias = self.linear_proj(out)
        if residual is not None:
            residual.send_with(y)
        return y, y_bias

    def _query_key_value(
        self, hidden_states: torch.Tensor, freqs: torch.Tensor | None, residual: Residual | None
    ) -> tuple[torch.Tensor, ...]:
        config, normed = self.config, _normed(self)
        if config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]:
            freqs = None
        if unsplit_reason(self) is not None:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
        else:
            groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
            heads = flow.Heads(groups, self.num_attention_heads_per_partition // groups, size)
            table = None if freqs is None or normed else _table(freqs, config)
            query, key, value = self.linear_qkv(hidden_states, heads=heads, table=table, residual=residual)[0]
            if not normed:
                return query, key, value
            query = query if self.q_layernorm is None else self.q_layernorm(query)
            key = key if self.k_layernorm is None else self.k_layernorm(key)
        if freqs is not None:
            mscale = rope_mscale(config)
            query, key = (apply_rotary_pos_emb(t, freqs, config=config, mscale=mscale) for t in (query, key))
        return query, key, value


class PatchedCompactSelfAttention(PatchedSelfAttention):
    """:class:`PatchedSelfAttention` in the place of :class:`CompactSelfAttention`."""


PATCHED: dict[type, type] = {SelfAttention: PatchedSelfAttention, CompactSelfAttention: PatchedCompactSelfAttention}


def unfused_reason(attention: Any) -> str | None:
    """Why the rotary embedding of a patched self-attention stays Megatron's, or None where it is part of the split."""
    return unsplit_reason(attention) or ("norms on queries and keys" if _normed(attention) else None)


def unsplit_reason(attention: Any) -> str | None:
    """Why Megatron splits linear_qkv's output, or None where a kernel of ours does."""
    for key in ("test_mode", "flash_decode", "attention_output_gate"):
        if field_or(attention.config, key, False):
            return f"config.{key}=True"
    if attention.config.num_query_groups < attention.coat.tp.size:
        return "fewer query groups than tensor-parallel ranks"
    return None


def _normed(attention: Any) -> bool:
    norms = attention.q_layernorm, attention.k_layernorm
    return any(n is not None and not isinstance(n, IdentityOp) for n in norms)


_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _table(freqs: torch.Tensor, config: TransformerConfig) -> flow.RopeTable:
    """Cosines and sines of ``freqs``, which Megatron hands to every layer: computed and kept once for all."""
    kind = config.rotary_interleaved, rope_mscale(config)
    tables = _TABLES.setdefault(freqs, {})
    if kind not in tables:
        with torch.inference_mode(False), torch.no_grad():  # training may come after evaluation
            tables[kind] = flow.rope_table(freqs, *kind)
    return tables[kind]
