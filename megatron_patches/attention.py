"""Attention of models built here: PyTorch's SDPA, and a self-attention that saves no more than it needs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["SDPA", "CompactSelfAttention", "PatchedSelfAttention"]

# Causal, 4096 tokens, H200: cuDNN 535 TFLOP/s forward and 466 backward, PyTorch's flash backend 299 and 257.
_HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


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
        for key, accepted in (
            ("context_parallel_size", 1),
            ("window_size", None),
            ("softmax_type", "vanilla"),
            ("qk_clip", False),
            ("log_max_attention_logit", False),
        ):
            given = getattr(config, key, accepted)
            if given != accepted:
                raise ValueError(f"{key}: got {given!r}, accepted: {accepted!r} with SDPA core attention")
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
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        with self._random(), _preferred_backend(query.device):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        # Kernels lay their output out like the queries, or as [b, s, heads, d]: merging heads copies neither.
        return out.permute(2, 0, 1, 3).flatten(2)

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


@contextmanager
def _preferred_backend(device: torch.device) -> Iterator[None]:
    if device.type == "cuda" and _is_hopper(device):
        with sdpa_kernel(_HOPPER_ORDER, set_priority=True):
            yield
    else:
        yield


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


class CompactSelfAttention(SelfAttention):
    """Self-attention that does not keep the whole of linear_qkv's output alive through the values.

    Rotary embedding writes new queries and keys, but values stay a view: saved for backward, that view holds queries
    and keys a second time, 4 bytes a token and hidden element. With norms on queries and keys, which save their
    inputs, the whole output is kept in any case and a copy would only add to it.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        tensors = super().get_query_key_value_tensors(*args, **kwargs)
        normed = any(n is not None and not isinstance(n, IdentityOp) for n in (self.q_layernorm, self.k_layernorm))
        if normed or len(tensors) < 3:  # fewer: not split, Transformer Engine's fused rotary embedding will
            return tensors
        query, key, value, *rest = tensors
        return query, key, value.contiguous(), *rest


class PatchedSelfAttention(CompactSelfAttention):
    """:class:`CompactSelfAttention` in the place of Megatron's own."""

    coat_patched = True
