"""Core attention: PyTorch's SDPA, and one that keeps queries, keys, values and output in FP8 for
backward.

The FP8 one computes from what it keeps. q, k and v are quantized by groups and read back; SDPA sees
these values in forward and again in backward. Its output is quantized and read back too, and that
is what is returned: the projection that follows multiplies the values that backward will see.
Gradients pass through the roundings unchanged.

Both take a sequence of several documents, each of which sees itself alone: by definition one SDPA a
document.

SDPA's backward kernels take the output only for ``delta = rowsum(dO * O)``. They get the rounded
one, while softmax is that of the unrounded: a row of dS then sums to ``dO · (O - Ô)`` instead of
zero. docs/flow.md has the size of that.
"""

from __future__ import annotations

from typing import Any

import torch

from ...config import ActivationConfig
from ...formats import QuantizedTensor
from ...ops import dequantize, quantize_groups
from ..core.products import saved_format
from ..function import Function, check_settings, once_differentiable
from .documents import Documents, why_no_flash
from .sdpa_node import DocumentNodes, attend, node_of


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
    documents: Documents | None = None,
) -> torch.Tensor:
    """``softmax(q kᵀ · scale) v`` by ``torch.nn.functional.scaled_dot_product_attention``, on
    Hopper by cuDNN first.

    Args:
        q: ``[s, b, heads, d]``.
        k, v: ``[t, b, groups, d]``, groups a divisor of heads.
        scale: None for ``d ** -0.5``.
        documents: attention within each of these alone; then b is 1 and t is s. On a GPU by flash
            attention.

    Returns:
        ``[s, b, heads * d]``, an alias of what SDPA keeps for backward.

    Raises:
        ValueError: ``documents`` that do not fit the sequence.
    """
    values = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    options = {"causal": causal, "scale": scale, "dropout": dropout}
    documents = _checked_documents(documents, q, k)
    if documents is None or why_no_flash(q, k, v) is None:
        out = attend(values, documents, options)  # one call, which autograd knows
    else:
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        out = _EachDocument.apply(*values, documents, options, keep)
    # Kernels lay their output out like the queries, or as [b, s, heads, d]: merging heads copies
    # neither.
    return out.permute(2, 0, 1, 3).flatten(2)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: ActivationConfig,
    *,
    causal: bool = True,
    scale: float | None = None,
    documents: Documents | None = None,
) -> tuple[torch.Tensor, QuantizedTensor]:
    """:func:`sdpa` on values rounded to per-group FP8, its output rounded too; only codes are kept
    for backward.

    Groups lie within a head, so nothing depends on how heads are spread over ranks. There is no
    dropout.

    Args:
        q: ``[s, b, heads, d]``, bfloat16 or float32.
        k, v: ``[t, b, groups, d]``, groups a divisor of heads.
        settings: ``saved_format``, ``group_size`` and ``scale`` say how to round.
        documents: as in :func:`sdpa`.

    Returns:
        The output ``[s, b, heads * d]`` of q's dtype, and the same as a per-group quantized tensor:
        hand it to :func:`~coat_dist.flow.linear` as ``compressed``, so that nobody keeps the first.

    Raises:
        ValueError: a shape or dtype that does not fit; names the argument.
    """
    check_settings(settings)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4 or t.dtype != q.dtype or t.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{name}: got {t.dtype} {list(t.shape)}, accepted: [s, b, heads, d] of one dtype, "
                "torch.bfloat16 or torch.float32"
            )
    if k.shape != v.shape or k.shape[1::2] != q.shape[1::2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k, v: got shapes {list(k.shape)}, {list(v.shape)} for q of shape {list(q.shape)}, "
            "accepted: equal ones, with q's b and d and a divisor of q's heads"
        )
    if causal and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"k: got {k.shape[0]} keys for {q.shape[0]} queries, accepted: equal lengths where "
            "causal"
        )
    documents = _checked_documents(documents, q, k)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    options = {"causal": causal, "scale": scale}
    out, codes, scales = _Attention.apply(q, k, v, settings, documents, options, keep)
    return out, QuantizedTensor(codes, scales, "group", settings.group_size)


class _Attention(Function):
    saves = "q", "q_scales", "k", "k_scales", "v", "v_scales", "out", "out_scales"

    @staticmethod
    def forward(
        ctx: Any,
        q,
        k,
        v,
        settings: ActivationConfig,
        documents: Documents | None,
        options: dict[str, Any],
        keep: bool,
    ):
        ctx.set_materialize_grads(False)
        kept = [_compress(t, settings) for t in (q, k, v)]
        values = [_values(c, t.shape, t.dtype) for c, t in zip(kept, (q, k, v), strict=True)]
        if keep:
            ctx.node = node_of(values, documents, options)
            out, extras = ctx.node.forward(values)
        else:
            out, extras = attend(values, documents, options), []
        kept.append(_compress(out.permute(2, 0, 1, 3), settings))
        saved = _Attention.Saved(*(t for c in kept for t in (c.codes, c.scales)))
        ctx.save_for_backward(*saved, *extras)
        ctx.dtype, ctx.group_size = q.dtype, settings.group_size
        ctx.shapes = q.shape, k.shape, k.shape, q.shape
        ctx.mark_non_differentiable(kept[3].codes, kept[3].scales)
        # A view, on purpose: autograd then refuses to change it in place. Its codes, which the
        # projection that follows keeps for backward, would not follow.
        out = dequantize(kept[3], q.dtype).view(*q.shape[:2], q.shape[2] * q.shape[3])
        return out, kept[3].codes, kept[3].scales

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, *_: None):
        if dout is None:
            return (None,) * 7
        saved, extras = _Attention.saved(ctx)
        values = []
        for codes, scales, shape in zip(saved[::2], saved[1::2], ctx.shapes, strict=True):
            kept = QuantizedTensor(codes, scales, "group", ctx.group_size)
            values.append(_values(kept, shape, ctx.dtype))
        dout = dout.reshape(ctx.shapes[0]).permute(1, 2, 0, 3)
        grads = ctx.node.backward(dout, values, extras)
        return *(g.permute(2, 0, 1, 3) for g in grads), *[None] * 4


class _EachDocument(torch.autograd.Function):
    """One SDPA a document, where no kernel takes them together: q, k, v and the output are saved
    whole, as by one.
    """

    @staticmethod
    def forward(
        ctx: Any, q, k, v, documents: Documents, options: dict[str, Any], keep: bool
    ) -> torch.Tensor:
        if not keep:
            return attend((q, k, v), documents, options)
        ctx.node = DocumentNodes(documents, options)
        out, extras = ctx.node.forward((q, k, v))
        ctx.save_for_backward(q, k, v, out, *extras)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor):
        tensors = ctx.saved_tensors
        return *ctx.node.backward(dout, tensors[:4], tensors[4:]), None, None, None


def _checked_documents(
    documents: Documents | None, q: torch.Tensor, k: torch.Tensor
) -> Documents | None:
    """``documents``, or None where one SDPA does the same; raises what :func:`sdpa` says."""
    if documents is None:
        return None
    if q.shape[1] != 1 or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q: got {list(q.shape)} with {k.shape[0]} keys, accepted: [s, 1, heads, d] and s keys "
            "with documents"
        )
    documents.check(q.shape[0])
    return documents if documents.count > 1 and q.numel() else None


def _compress(x: torch.Tensor, settings: ActivationConfig) -> QuantizedTensor:
    """``[s, b, heads, d]`` by groups within heads; as long rows where that is the same."""
    x = x.flatten(2) if x.shape[-1] % settings.group_size == 0 else x
    return quantize_groups(x, saved_format(settings), settings.group_size, settings.scale)


def _values(q: QuantizedTensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """What was compressed, as SDPA takes it: ``[b, heads, s, d]``."""
    return dequantize(q, dtype).view(shape).permute(1, 2, 0, 3)
