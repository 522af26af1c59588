"""Tokens to the experts that a router chose for them, and back, on one rank: rows sorted by expert,
sums of rows.

Every token goes to the same number of experts. So sizes are known without asking the GPU, and each
direction is one kernel that reads and writes every row once: no atomic additions, the same bits
every time, sums rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...ops import sum_rows, take_rows
from ..function import Function


class TokenOrder(NamedTuple):
    """Where tokens go; int32 but for ``chosen``."""

    token: torch.Tensor
    """``[tokens * topk]``: the token of each row, sorted by expert, then by token."""
    rows: torch.Tensor
    """``[tokens, topk]``: the rows of each token."""
    chosen: torch.Tensor
    """int64 ``[tokens * topk]``: of each row, the place in the transposed routing map,
    ``[experts * tokens]``.
    """


def token_order(routing_map: torch.Tensor, topk: int) -> TokenOrder:
    """The order for bool ``[tokens, experts]`` with ``topk`` true in each row; nothing waits for
    the GPU.
    """
    tokens, experts = routing_map.shape
    by_expert, by_token = routing_map.t().reshape(-1), routing_map.reshape(-1)
    count = tokens * topk
    row = by_expert.cumsum(0) - 1
    every = torch.arange(by_expert.shape[0], device=routing_map.device)
    chosen = _compact(by_expert, row, every, count)
    rows = _compact(
        by_token, by_token.cumsum(0) - 1, row.view(experts, tokens).t().reshape(-1), count
    )
    return TokenOrder((chosen % max(tokens, 1)).int(), rows.view(tokens, topk).int(), chosen)


def _compact(
    mask: torch.Tensor, place: torch.Tensor, values: torch.Tensor, count: int
) -> torch.Tensor:
    """``values[mask]``, whose number is known: what is not wanted goes to a place behind the
    last one.
    """
    return values.new_zeros(count + 1).scatter_(0, place.where(mask, count), values)[:count]


def permute(x: torch.Tensor, order: TokenOrder) -> torch.Tensor:
    """Rows of x ``[tokens, n]`` sorted by expert, ``[tokens * topk, n]``."""
    return _Permute.apply(x, order, True)


def unpermute(y: torch.Tensor, order: TokenOrder) -> torch.Tensor:
    """The sum of each token's rows of y ``[tokens * topk, n]``, ``[tokens, n]``, in fp32,
    rounded once.
    """
    return _Permute.apply(y, order, False)


class _Permute(Function):
    """Each of the two is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: TokenOrder, there: bool) -> torch.Tensor:
        ctx.order, ctx.there = order, there
        if there:
            return take_rows(x, order.token)
        return sum_rows(x, order.rows)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor):
        if ctx.there:
            return sum_rows(dout, ctx.order.rows), None, None
        return take_rows(dout, ctx.order.token), None, None
