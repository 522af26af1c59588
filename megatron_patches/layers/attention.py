"""Self-attention: of models built here, which saves no more than it needs, and of patched
layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from coat_dist import flow
from coat_dist.flow.function import once_per_tensor
from coat_dist.patching.classes import Patched

from ..compat import rope_mscale
from ..groups import tensor_parallel
from .attached import Patch
from .core_attention import SDPA
from .norm import AllHeadsNorm
from .packed import Packed, packed
from .residual import Residual


class Compact:
    """What :class:`CompactSelfAttention` and patched self-attentions add to Megatron's: a copy of
    the values, so that linear_qkv's output is freed after forward.

    Megatron's values are a view of that output. Saved for backward, the view keeps queries and keys
    a second time: 4 bytes a token and hidden element. Norms on queries and keys save their inputs,
    so the output stays in any case and values are not copied. Norms over all heads save copies
    instead, and values are copied.

    Several documents in a sequence (``packed_seq_params``) are those of ``packed.py`` where core
    attention is ours.
    """

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
        """As Megatron's: ``[s, b, h]`` → output ``[s, b, h]`` and bias (s/TP under sequence
        parallelism).
        """
        _, rotary_pos_emb = self._packed(hidden_states, rotary_pos_emb, kwargs)
        leading = hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb
        return super().forward(*leading, *args, **kwargs)  # type: ignore[misc]

    def _packed(
        self: Any, hidden_states: torch.Tensor, rotary_pos_emb: Any, kwargs: dict[str, Any]
    ) -> tuple[Packed | None, Any]:
        """The documents of ``packed_seq_params``, which they replace in ``kwargs``, and the angles
        of all tokens.

        None and ``rotary_pos_emb`` itself where core attention is not ours, or all this is done
        already.
        """
        given = kwargs.get("packed_seq_params")
        if given is None or isinstance(given, Packed) or not isinstance(self.core_attention, SDPA):
            return None, rotary_pos_emb
        tp = tensor_parallel(self.linear_qkv)
        documents = packed(
            given, hidden_states.shape[0] * (tp.size if tp.sharded else 1), hidden_states.shape[1]
        )
        kwargs["packed_seq_params"] = documents
        if getattr(self.config, "mrope_section", None):  # made from position ids, for each token
            return documents, rotary_pos_emb
        return documents, documents.angles(rotary_pos_emb)

    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = super().get_query_key_value_tensors(*args, **kwargs)  # type: ignore[misc]
        keys_own_copy = isinstance(self.k_layernorm, AllHeadsNorm) or not _normed(self)
        # Fewer: not split, Transformer Engine's fused rotary embedding will.
        if not keys_own_copy or len(tensors) < 3:
            return tensors
        query, key, value, *rest = tensors
        return query, key, value.contiguous(), *rest


class CompactSelfAttention(Compact, SelfAttention):
    """Self-attention of models built here, which saves no more than it needs."""


class AttentionKind(NamedTuple):
    """How a patched self-attention makes queries, keys and values; found when it is patched."""

    why_split: str | None
    """Why Megatron splits linear_qkv's output; None where a kernel of the flow does."""
    heads: flow.Heads
    normed: bool
    """Whether queries and keys pass norms."""
    rotated: bool
    """Whether the layer rotates queries and keys, where the model has angles."""
    interleaved: bool
    mscale: float

    @classmethod
    def of(cls, attention: Any, tp: flow.TensorParallel) -> AttentionKind:
        config, groups = attention.config, attention.num_query_groups_per_partition
        why_split = needs_own_forward(config)
        if why_split is None and config.num_query_groups < tp.size:
            why_split = "fewer query groups than tensor-parallel ranks"
        heads = flow.Heads(
            groups,
            attention.num_attention_heads_per_partition // groups,
            attention.hidden_size_per_attention_head,
        )
        plain = config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1]
        return cls(
            why_split,
            heads,
            _normed(attention),
            not plain,
            config.rotary_interleaved,
            rope_mscale(config),
        )

    @property
    def why_unfused(self) -> str | None:
        """Why the rotary embedding stays Megatron's; None where it is part of the split."""
        return self.why_split or ("norms on queries and keys" if self.normed else None)


class PatchedSelfAttention(Patched, Compact):
    """Self-attention of a patched layer, with one pass from linear_qkv's output to rotated heads,
    or FP8 attention.

    Megatron's own forward runs wherever a call is not training or evaluation on whole sequences.
    """

    coat: Patch

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        key_value_states: torch.Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron's: ``[s, b, h]`` → output ``[s, b, h]`` and bias (s/TP under sequence
        parallelism).

        Raises:
            ValueError: ``attention: "fp8"`` with an argument that Megatron's own forward alone can
                take.
        """
        documents, rotary_pos_emb = self._packed(hidden_states, rotary_pos_emb, kwargs)
        freqs = k_freqs = rotary_pos_emb
        if isinstance(rotary_pos_emb, tuple):
            freqs, k_freqs = rotary_pos_emb
        foreign = {"key_value_states": key_value_states, "inference_context": inference_context}
        foreign |= kwargs | {f"argument {i}": given for i, given in enumerate(args, 6)}
        if freqs is not k_freqs:
            foreign["rotary_pos_emb"] = rotary_pos_emb
        bias = foreign.pop("attention_bias", None)
        if documents is not None:
            del foreign["packed_seq_params"]
        foreign = {name: given for name, given in foreign.items() if given is not None}
        settings, kind = self.coat.settings, self.coat.kind
        fp8 = settings.attention == "fp8"
        for name, given in foreign.items() if fp8 else ():
            raise ValueError(
                f"{name}: got {type(given).__name__}, accepted: None (rotary_pos_emb: one for "
                'queries and keys) with activation.attention "fp8"'
            )
        if foreign or (kind.why_split is not None and not fp8):
            leading = hidden_states, attention_mask, key_value_states, inference_context
            return super().forward(*leading, rotary_pos_emb, *args, **kwargs)

        residual = Residual(hidden_states) if self.coat.residual else None
        query, key, value = self._query_key_value(hidden_states, freqs, residual)
        if fp8:
            given = query, key, value, attention_mask, bias, settings
            out, out8 = self.core_attention.compressed(*given, self.attn_mask_type, documents)
            y, y_bias = self.linear_proj(out, compressed=out8)
        else:
            recompute = self.checkpoint_core_attention and self.training
            core = self._checkpointed_attention_forward if recompute else self.core_attention
            options = {
                "attn_mask_type": self.attn_mask_type,
                "attention_bias": bias,
                "packed_seq_params": documents,
            }
            out = core(query, key, value, attention_mask, **options)
            y, y_bias = self.linear_proj(out)
        if residual is not None:
            residual.send_with(y)
        return y, y_bias

    def _query_key_value(
        self, hidden_states: torch.Tensor, freqs: torch.Tensor | None, residual: Residual | None
    ) -> tuple[torch.Tensor, ...]:
        kind = self.coat.kind
        if not kind.rotated:
            freqs = None
        if kind.why_split is not None:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
        else:
            table = None
            if freqs is not None and not kind.normed:
                table = _table(freqs, interleaved=kind.interleaved, mscale=kind.mscale)
            query, key, value = self.linear_qkv(
                hidden_states, heads=kind.heads, table=table, residual=residual
            )[0]
            if not kind.normed:
                return query, key, value
            query = query if self.q_layernorm is None else self.q_layernorm(query)
            key = key if self.k_layernorm is None else self.k_layernorm(key)
        if freqs is not None:
            query, key = (
                apply_rotary_pos_emb(t, freqs, config=self.config, mscale=kind.mscale)
                for t in (query, key)
            )
        return query, key, value


_OWN_FORWARD = "test_mode", "flash_decode", "attention_output_gate"


def needs_own_forward(config: TransformerConfig) -> str | None:
    """The field of ``config`` that only Megatron's own forward honours, or None. Older versions
    lack the gate.
    """
    return next((f"config.{key}=True" for key in _OWN_FORWARD if getattr(config, key, False)), None)


def _normed(attention: Any) -> bool:
    norms = attention.q_layernorm, attention.k_layernorm
    return any(n is not None and not isinstance(n, IdentityOp) for n in norms)


@once_per_tensor
def _table(freqs: torch.Tensor, interleaved: bool, mscale: float) -> flow.RopeTable:
    """Cosines and sines of ``freqs``, which Megatron hands to every layer."""
    with torch.inference_mode(False), torch.no_grad():  # training may come after evaluation
        return flow.rope_table(freqs, interleaved, mscale)
