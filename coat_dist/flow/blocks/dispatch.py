"""Tokens on the way to experts of other ranks: codes and row scales over the wire instead of BF16.

The scales are powers of two, as those with which an expert's block quantizes what it gets by rows
(:func:`coat_dist.flow.mlp` with ``forward_scales`` "row"). Quantized once more by rows, the values
that codes stand for stay what they are: so forward multiplies the same values as when BF16 had
travelled, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...config import ActivationConfig
from ...formats import FORMATS, FP8Format, QuantizedTensor
from ...ops import dequantize, quantize_rows
from ..function import Function, check_settings


def dispatch_rows(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    received: Sequence[int],
    sent: Sequence[int],
    settings: ActivationConfig,
) -> torch.Tensor:
    """Send rows to other ranks in FP8; collective over ``group``.

    Args:
        x: ``[rows, h]``, those for each rank one behind the other.
        group: the ranks.
        received: rows that come from each rank.
        sent: rows that go to each rank.
        settings: ``format`` is what forward sends. Gradients travel back in x's dtype, or with
            ``expert_dispatch_grad`` "fp8" in ``grad_format``.

    Returns:
        ``[sum(received), h]`` of x's dtype: what quantizing each row gives, read back.
    """
    check_settings(settings)
    return _Dispatch.apply(x, group, [int(n) for n in received], [int(n) for n in sent], settings)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x, group, received, sent, settings: ActivationConfig) -> torch.Tensor:
        ctx.args = group, received, sent, settings
        return _exchange_quantized(x, FORMATS[settings.format], group, received, sent)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor):
        group, received, sent, settings = ctx.args
        if settings.expert_dispatch_grad == "fp8":
            dx = _exchange_quantized(dy, FORMATS[settings.grad_format], group, sent, received)
        else:
            dx = _exchange(dy, group, sent, received)
        return dx, None, None, None, None


def _exchange_quantized(
    x: torch.Tensor, fmt: FP8Format, group: dist.ProcessGroup, received: list[int], sent: list[int]
) -> torch.Tensor:
    q = quantize_rows(x, fmt, aligned=True)
    codes = _exchange(q.codes.view(torch.uint8), group, received, sent).view(q.codes.dtype)
    scales = _exchange(q.scales, group, received, sent)
    return dequantize(QuantizedTensor(codes, scales, "row"), x.dtype)


def _exchange(
    rows: torch.Tensor, group: dist.ProcessGroup, received: list[int], sent: list[int]
) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
