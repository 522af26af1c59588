"""A norm and its parameters; and the norm on its own in BF16. In front of a linear it is a part of
the block's input (``inputs.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from ...ops import NormStats, norm_backward, norm_forward
from ..function import Function, shaped
from ..parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Norm:
    """One normalization and its parameters."""

    kind: Literal["rmsnorm", "layernorm"]
    eps: float
    weight: torch.Tensor | None = None
    """``[h]``; None = no affine part."""
    bias: torch.Tensor | None = None
    reduce_grad: bool = False
    """Sum the gradients of weight and bias over ``tp.group`` inside backward, before they are
    rounded: for parameters that every rank holds while each sees only some of the rows.
    """

    def __post_init__(self) -> None:
        if self.kind not in ("rmsnorm", "layernorm"):
            raise ValueError(f"norm.kind: got {self.kind!r}, accepted: 'rmsnorm', 'layernorm'")

    def check(self, hidden: int) -> None:
        """Raises ValueError where weight or bias do not fit x ``[..., hidden]``."""
        if self.bias is not None and self.weight is None:
            raise ValueError(
                "norm.bias: got a bias without a weight, accepted: both, or a weight alone, or "
                "neither"
            )
        for name, t in (("weight", self.weight), ("bias", self.bias)):
            if t is not None and t.shape != (hidden,):
                raise ValueError(f"norm.{name}: got shape {list(t.shape)}, accepted: [{hidden}]")


def parameters_of(norm: Norm | None) -> tuple[Any, Any]:
    """Weight and bias; None of no norm."""
    return (None, None) if norm is None else (norm.weight, norm.bias)


class ParameterGrads(NamedTuple):
    """Gradients of a norm's weight and bias, each None where not wanted."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


def norm(x: torch.Tensor, norm: Norm, tp: TensorParallel, exact: bool = False) -> torch.Tensor:
    """Normalize x ``[..., h]`` without FP8; returns the dtype of x.

    Saves an alias of x and the row statistics.

    Args:
        exact: sum the parameters' gradients in fp64, so that they do not depend on how rows are
            spread over ranks.

    Raises:
        ValueError: the norm's parameters do not fit x.
    """
    norm.check(x.shape[-1])
    return _NormFunction.apply(x, norm.weight, norm.bias, norm, tp, exact)


class _NormFunction(Function):
    saves = "x", "weight", "bias", "rstd", "mean"

    @staticmethod
    def forward(
        ctx: Any, x, weight, bias, norm: Norm, tp: TensorParallel, exact: bool
    ) -> torch.Tensor:
        y, stats = norm_forward(x, norm.kind, norm.eps, weight, bias)
        ctx.save_for_backward(*_NormFunction.Saved(x, weight, bias, *stats))
        ctx.kind, ctx.reduce_grad, ctx.tp = norm.kind, norm.reduce_grad, tp
        ctx.sum_dtype = torch.float64 if exact else torch.float32
        return shaped(y.contiguous(), *x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor):
        saved, _ = _NormFunction.saved(ctx)
        x, weight, bias = saved.x, saved.weight, saved.bias
        dx, dweight, dbias = norm_backward(
            dy,
            x,
            ctx.kind,
            NormStats(saved.rstd, saved.mean),
            weight,
            ctx.sum_dtype,
            x.dtype,
            bias is not None,
        )
        wanted = _NormFunction.needs(ctx, "weight"), _NormFunction.needs(ctx, "bias")
        grads = finish_grads(dweight, dbias, weight, bias, wanted, ctx.reduce_grad, ctx.tp)
        return dx if _NormFunction.needs(ctx, "x") else None, *grads, None, None, None


def finish_grads(
    dweight: Any,
    dbias: Any,
    weight: Any,
    bias: Any,
    wanted: Sequence[bool],
    reduce_grad: bool,
    tp: TensorParallel,
) -> ParameterGrads:
    """Sum gradients over ranks where the norm asks for it, in one collective; round them to the
    parameters' dtypes.
    """
    if reduce_grad and any(wanted):
        if dbias is None:
            dweight = tp.sum(dweight)
        else:
            dweight, dbias = tp.sum(torch.stack([dweight, dbias])).unbind()
    return ParameterGrads(
        dweight.to(weight.dtype) if wanted[0] else None,
        dbias.to(bias.dtype) if wanted[1] else None,
    )
