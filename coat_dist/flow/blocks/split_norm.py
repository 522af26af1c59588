"""RMSNorm over a dimension whose elements are divided over ranks: of queries and keys, over all
heads together.

Each rank has some channels of every token. What the ranks share is one number a token and pass: the
sum of squares in forward, and in backward the sum of products with the gradient. Everything else
stays on its rank, the weight's part and its gradient too.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.norm import Norm, norm
from ..function import Function, shaped
from ..parallel.tensor_parallel import TensorParallel


def split_norm(
    x: torch.Tensor, norm_: Norm, tp: TensorParallel, exact: bool = False
) -> torch.Tensor:
    """RMSNorm of x ``[..., n / tp]`` over all n channels, in BF16; returns the dtype of x.

    Saves an alias of x and one fp32 number a token. Sequence parallelism makes no difference:
    tokens are whole.

    Args:
        norm_: with this rank's ``[n / tp]`` of the weight, or none; ``reduce_grad`` is not looked
            at.
        exact: sum in fp64, so that nothing depends on the number of ranks.

    Raises:
        ValueError: another kind than "rmsnorm", or a weight that does not fit.
    """
    norm_.check(x.shape[-1])
    if norm_.kind != "rmsnorm":
        raise ValueError(
            f"norm.kind: got {norm_.kind!r}, accepted: 'rmsnorm' over channels of several ranks"
        )
    if tp.size == 1 and not exact:
        return norm(x, norm_, tp)
    return _SplitNorm.apply(
        x, norm_.weight, norm_.eps, tp, torch.float64 if exact else torch.float32
    )


class _SplitNorm(Function):
    saves = "x", "weight", "rstd"

    @staticmethod
    def forward(
        ctx: Any, x, weight, eps: float, tp: TensorParallel, dtype: torch.dtype
    ) -> torch.Tensor:
        squares = tp.sum(x.to(dtype).square().sum(-1, keepdim=True))
        rstd = torch.rsqrt(squares / (x.shape[-1] * tp.size) + eps).float()
        ctx.save_for_backward(*_SplitNorm.Saved(x, weight, rstd))
        ctx.tp, ctx.dtype = tp, dtype
        y = x.float() * rstd
        if weight is not None:
            y = y * weight.float()
        return shaped(y.to(x.dtype).contiguous(), *x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor):
        (x, weight, rstd), _ = _SplitNorm.saved(ctx)
        dx = dweight = None
        normalized, dy = x.float() * rstd, dy.float()
        if _SplitNorm.needs(ctx, "weight"):
            dweight = (dy * normalized).flatten(0, -2).sum(0, dtype=ctx.dtype).to(weight.dtype)
        if _SplitNorm.needs(ctx, "x"):
            dnormalized = dy if weight is None else dy * weight.float()
            along = (dnormalized * normalized).sum(-1, keepdim=True, dtype=ctx.dtype)
            mean = (ctx.tp.sum(along) / (x.shape[-1] * ctx.tp.size)).float()
            dx = (rstd * (dnormalized - normalized * mean)).to(x.dtype)
        return dx, dweight, None, None, None
