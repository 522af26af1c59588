"""Attention with sinks: each head has one more logit, whose probability reads no value.

PyTorch's kernels know no sinks. Their softmax of the keys alone comes with the logarithms of its
sums; with a sink these are larger, and the output is smaller by the same factor. In backward the
kernels need nothing but output and logarithms to make the probabilities again: given those with the
sink, theirs is the gradient of the whole softmax.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..function import Function

aten = torch.ops.aten


def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """``softmax([q @ k.T * scale + mask, sinks])[..., :-1] @ v`` without tensors of ``s * s``.

    Args:
        q: ``[b, heads, s, d]``, of any floating dtype.
        k, v: ``[b, groups, t, d]``; each group is read by ``heads / groups`` consecutive heads.
            Under autocast q and k may be wider than v: rotation in fp32 widens them.
        sinks: ``[heads]``.
        mask: added to the logits, ``[b or 1, heads or 1, s, t]``; without gradients.
        scale: of the logits.

    Returns:
        ``[b, heads, s, d]`` of v's dtype.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    if mask is not None:
        # Kernels read the rows of a mask in 16 bytes.
        mask = F.pad(mask.to(q.dtype), (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
        mask = mask.expand(*q.shape[:3], mask.shape[-1])
    return _SinkAttention.apply(q, k, v, sinks, mask, scale)


class _SinkAttention(Function):
    saves = "q", "k", "v", "sinks", "mask", "out", "logs", "seed", "offset"

    @staticmethod
    def forward(ctx: Any, q, k, v, sinks, mask, scale: float) -> torch.Tensor:
        given = q, *_for_each_head(q, k, v)
        if q.is_cuda:
            out, logs, *random = aten._scaled_dot_product_efficient_attention(
                *given, mask, True, scale=scale
            )
        else:
            out, logs = aten._scaled_dot_product_flash_attention_for_cpu(
                *given, attn_mask=mask, scale=scale
            )
            random = [None, None]
        with_sinks = torch.logaddexp(logs, sinks.float()[:, None])
        # Behind the rows of q, kernels have logarithms that nothing reads.
        part = (logs - with_sinks)[..., : q.shape[2], None].exp()
        out = (out * part).to(q.dtype)
        ctx.scale = scale
        saved = _SinkAttention.Saved(q, k, v, sinks, mask, out, with_sinks, *random)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor):
        saved, _ = _SinkAttention.saved(ctx)
        q, k, v, out, logs = saved.q, saved.k, saved.v, saved.out, saved.logs
        given = dout, q, *_for_each_head(q, k, v)
        if q.is_cuda:
            random = saved.seed, saved.offset, 0.0, (True, True, True, False)
            dq, *dkv, _ = aten._scaled_dot_product_efficient_attention_backward(
                *given, saved.mask, out, logs, *random, scale=ctx.scale
            )
        else:
            dq, *dkv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, out, logs, 0.0, False, attn_mask=saved.mask, scale=ctx.scale
            )
        dk, dv = (
            d.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32).to(k.dtype) for d in dkv
        )
        along = (dout.float() * out.float()).sum(-1)
        probability = (saved.sinks.float()[:, None] - logs[..., : q.shape[2]]).exp()
        dsinks = -(along * probability).sum((0, 2)).to(saved.sinks.dtype)
        return dq, dk, dv, dsinks, None, None


def _for_each_head(q: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Keys or values ``[b, groups, t, d]`` as ``[b, heads, t, d]``."""
    return [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in tensors]
