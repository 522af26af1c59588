"""Self-attention: of models built here, which saves no more than it needs, and of patched
layers.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from coat_dist import flow
from coat_dist.config import ActivationConfig
from coat_dist.flow.function import once_per_tensor

from ..compat import rope_mscale
from ..parallel.groups import tensor_parallel
from ..patch.hooks import CALL, INPUT, INPUT_OR_ITS_GRADIENT, OUTPUT, why_bf16_hooks
from .attached import Patch
from .core_attention import SDPA
from .linear import why_bf16_linear, why_not_invariant_bias
from .norm import EXACT, AllHeadsNorm, why_bf16_norm
from .packed import Packed, packed
from .residual import Residual

__all__ = [
    "PATCHED",
    "CompactSelfAttention",
    "PatchedSelfAttention",
    "why_bf16_attention",
    "why_megatron_splits_qkv",
    "why_no_fp8_attention",
    "why_rope_unfused",
]

_HOOKS = {
    "input_layernorm": OUTPUT,
    "self_attention": INPUT_OR_ITS_GRADIENT,  # its input is what was the norm's
    "self_attention.linear_qkv": CALL,
}
"""What a patch changes for hooks: the norm hands its input on, linear_qkv applies the norm and
returns heads.
"""
_FP8_HOOKS = {"self_attention.core_attention": CALL, "self_attention.linear_proj": INPUT}
"""The same with ``attention: "fp8"``: core_attention is not called, linear_proj takes its input
in FP8 as well.
"""
_OWN_FORWARD = "test_mode", "flash_decode", "attention_output_gate"


class CompactSelfAttention(SelfAttention):
    """Self-attention that copies the values, so that linear_qkv's output is freed after forward.

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
        return super().forward(*leading, *args, **kwargs)

    def _packed(
        self, hidden_states: torch.Tensor, rotary_pos_emb: Any, kwargs: dict[str, Any]
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

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        tensors = super().get_query_key_value_tensors(*args, **kwargs)
        keys_own_copy = isinstance(self.k_layernorm, AllHeadsNorm) or not _normed(self)
        # Fewer: not split, Transformer Engine's fused rotary embedding will.
        if not keys_own_copy or len(tensors) < 3:
            return tensors
        query, key, value, *rest = tensors
        return query, key, value.contiguous(), *rest


class PatchedSelfAttention(CompactSelfAttention):
    """Self-attention of a patched layer, with one pass from linear_qkv's output to rotated heads,
    or FP8 attention.

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
        """As Megatron's: ``[s, b, h]`` → output ``[s, b, h]`` and bias (s/TP under sequence
        parallelism).

        Raises:
            ValueError: ``attention: "fp8"`` with an argument that Megatron's own forward alone can
                take.
        """
        documents, rotary_pos_emb = self._packed(hidden_states, rotary_pos_emb, kwargs)
        freqs, k_freqs = (
            rotary_pos_emb
            if isinstance(rotary_pos_emb, tuple)
            else (rotary_pos_emb, rotary_pos_emb)
        )
        foreign = {
            "key_value_states": key_value_states,
            "inference_context": inference_context,
            **kwargs,
        }
        foreign |= {f"argument {i}": given for i, given in enumerate(args, 6)}
        foreign |= {"rotary_pos_emb": None if freqs is k_freqs else rotary_pos_emb}
        bias = foreign.pop("attention_bias", None)
        if documents is not None:
            del foreign["packed_seq_params"]
        fp8 = self.coat.settings.attention == "fp8"
        for name, given in foreign.items():
            if given is not None and fp8:
                raise ValueError(
                    f"{name}: got {type(given).__name__}, accepted: None (rotary_pos_emb: one for "
                    "queries and keys) "
                    'with activation.attention "fp8"'
                )
        if any(given is not None for given in foreign.values()) or (
            why_megatron_splits_qkv(self) and not fp8
        ):
            leading = (
                hidden_states,
                attention_mask,
                key_value_states,
                inference_context,
                rotary_pos_emb,
            )
            return super().forward(*leading, *args, **kwargs)

        residual = Residual(hidden_states) if self.coat.residual else None
        query, key, value = self._query_key_value(hidden_states, freqs, residual)
        if fp8:
            settings = self.coat.settings
            kind = self.attn_mask_type
            given = query, key, value, attention_mask, bias, settings, kind, documents
            out, out8 = self.core_attention.compressed(*given)
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
        config, normed = self.config, _normed(self)
        if config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]:
            freqs = None
        if why_megatron_splits_qkv(self) is not None:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
        else:
            groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
            heads = flow.Heads(groups, self.num_attention_heads_per_partition // groups, size)
            table = None
            if freqs is not None and not normed:
                kind = {"interleaved": config.rotary_interleaved, "mscale": rope_mscale(config)}
                table = _table(freqs, **kind)
            query, key, value = self.linear_qkv(
                hidden_states, heads=heads, table=table, residual=residual
            )[0]
            if not normed:
                return query, key, value
            query = query if self.q_layernorm is None else self.q_layernorm(query)
            key = key if self.k_layernorm is None else self.k_layernorm(key)
        if freqs is not None:
            mscale = rope_mscale(config)
            query, key = (
                apply_rotary_pos_emb(t, freqs, config=config, mscale=mscale) for t in (query, key)
            )
        return query, key, value


class PatchedCompactSelfAttention(PatchedSelfAttention):
    """:class:`PatchedSelfAttention` in the place of :class:`CompactSelfAttention`."""


PATCHED: dict[type, type] = {
    SelfAttention: PatchedSelfAttention,
    CompactSelfAttention: PatchedCompactSelfAttention,
}


def why_bf16_attention(layer: Any, settings: ActivationConfig) -> str | None:
    """Why the attention of a ``TransformerLayer``, its norm and its linears cannot be replaced."""
    attention = layer.self_attention
    if isinstance(attention, MultiLatentAttention):
        return "multi-latent attention"
    if type(attention) not in PATCHED:
        return f"self-attention class {type(attention).__name__}"
    reason = (
        why_bf16_norm(layer.input_layernorm)
        or why_bf16_linear("linear_qkv", attention.linear_qkv, ColumnParallelLinear)
        or why_bf16_linear("linear_proj", attention.linear_proj, RowParallelLinear)
    )
    if (
        reason is None
        and attention.linear_qkv.skip_bias_add
        and attention.linear_qkv.bias is not None
    ):
        reason = "linear_qkv hands its bias on"
    if reason is None and settings.tp_invariant:
        reason = why_not_invariant_bias(
            "linear_proj", attention.linear_proj
        ) or _why_not_invariant_norms(attention)
    return reason or why_bf16_hooks(
        layer, _HOOKS | (_FP8_HOOKS if settings.attention == "fp8" else {})
    )


def _why_not_invariant_norms(attention: Any) -> str | None:
    for name in ("q_layernorm", "k_layernorm"):
        norm = getattr(attention, name)
        if norm is not None and any(True for _ in norm.parameters()) and type(norm) not in EXACT:
            return f"tp_invariant with {name} of class {type(norm).__name__}"
    return None


def why_no_fp8_attention(attention: Any) -> str | None:
    """Why a self-attention that can be patched cannot keep its tensors in FP8."""
    core = attention.core_attention
    if type(core) is not SDPA:
        return f"core attention class {type(core).__name__}"
    if core.dropout:
        return f"attention_dropout {core.dropout}"
    if attention.checkpoint_core_attention:
        return "recompute_modules 'core_attn', which keeps q, k and v in BF16"
    return _own_forward(attention.config)


def why_rope_unfused(attention: Any) -> str | None:
    """Why the rotary embedding of a patched self-attention stays Megatron's, or None where it is
    part of the split.
    """
    return why_megatron_splits_qkv(attention) or (
        "norms on queries and keys" if _normed(attention) else None
    )


def why_megatron_splits_qkv(attention: Any) -> str | None:
    """Why Megatron splits linear_qkv's output, or None where a kernel of ours does."""
    if (reason := _own_forward(attention.config)) is not None:
        return reason
    if attention.config.num_query_groups < attention.coat.tp.size:
        return "fewer query groups than tensor-parallel ranks"
    return None


def _own_forward(config: TransformerConfig) -> str | None:
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
