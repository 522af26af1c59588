"""Core attention of models built here, by PyTorch's SDPA, or by the flow, which saves FP8 for
backward.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from coat_dist import flow
from coat_dist.config import ActivationConfig
from coat_dist.formats import QuantizedTensor

from ..config.config_check import check_field
from .packed import Packed, packed


class SDPA(MegatronModule):
    """Core attention by ``torch.nn.functional.scaled_dot_product_attention``: causal, with grouped
    queries.

    Raises:
        ValueError: a configuration that SDPA cannot honour, by its key.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        for key in (
            "context_parallel_size",
            "window_size",
            "softmax_type",
            "qk_clip",
            "log_max_attention_logit",
        ):
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
            packed_seq_params: a :class:`Packed`, or Megatron's, with which query, key and value may
                also come as ``[s, heads, d]``.

        Returns:
            ``[s, b, heads * d]``, an alias of what SDPA keeps for backward.

        Raises:
            ValueError: a mask, bias, other packed sequences than ``packed.py`` takes, or causal
                attention between different lengths.
        """
        if query.dim() == 3 and packed_seq_params is not None:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        causal = self._check(query, key, attention_mask, attn_mask_type, attention_bias)
        documents, scale = _documents(packed_seq_params, query), self.softmax_scale
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks drop other heads; under sequence parallelism the whole layer runs in
        # that state.
        apart = dropout and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if apart else nullcontext():
            return flow.sdpa(
                query, key, value, causal=causal, scale=scale, dropout=dropout, documents=documents
            )

    def compressed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        settings: ActivationConfig,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, QuantizedTensor]:
        """:meth:`forward` by :func:`~coat_dist.flow.attention`, which keeps FP8; the output also
        as FP8.
        """
        causal = self._check(query, key, attention_mask, attn_mask_type, attention_bias)
        documents = _documents(packed_seq_params, query)
        return flow.attention(
            query,
            key,
            value,
            settings,
            causal=causal,
            scale=self.softmax_scale,
            documents=documents,
        )

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None,
        attention_bias: torch.Tensor | None,
    ) -> bool:
        """Whether attention is causal; raises ValueError as :meth:`forward` says."""
        for name, given in (("attention_mask", attention_mask), ("attention_bias", attention_bias)):
            if given is not None:
                raise ValueError(
                    f"{name}: got a tensor {list(given.shape)}, accepted: None with SDPA core "
                    "attention"
                )
        causal = _is_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        if causal and query.shape[0] != key.shape[0]:
            lengths = f"{query.shape[0]} queries for {key.shape[0]} keys"
            raise ValueError(f"causal attention: got {lengths}, accepted: equal lengths")
        return causal


def _documents(given: Any, query: torch.Tensor) -> flow.Documents | None:
    if given is None:
        return None
    return (given if isinstance(given, Packed) else packed(given, *query.shape[:2])).documents


def _is_causal(kind: AttnMaskType) -> bool:
    accepted = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}
    if kind not in accepted:
        raise ValueError(
            f"attn_mask_type: got {kind.name}, accepted: {', '.join(k.name for k in accepted)}"
        )
    return accepted[kind]
