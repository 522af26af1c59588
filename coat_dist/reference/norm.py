"""RMSNorm and LayerNorm around quantized tensors.

``y = (x - mean) * rstd * weight + bias`` row by row, in fp32; RMSNorm has no mean, and both may
lack the affine part. The row statistics are summed in fp64 and rounded once, so that they do not
depend on how a device orders its sums.

Forward needs two passes, because the scale of the normalized tensor is known only when all of it
has been seen: :func:`norm_compress` reads x once, writes what backward keeps and finds the amax;
:func:`norm_quantize` writes the codes. Backward calls :func:`norm_quantize` again on what was kept
(COAT section 5, with the scale of the first time). With a scale per row one pass does both:
:func:`norm_compress_rows`.

What is kept, x8, is ``x - mean`` in FP8 (RMSNorm: x). A LayerNorm's result does not depend on the
mean, but FP8 has a relative error: of an x whose mean is ten times its deviation, ten times the
error would be left for the deviations. So wherever x8 stands in for x, it is normalized by rstd
alone. It is not centered a second time: the mean of the rounding errors of a row is small beside
the errors themselves, and backward then needs no mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats import FP8Format, QuantizedTensor
from .quantize import amax, dequantize, quantize_groups, quantize_rows, quantize_tensor


class NormStats(NamedTuple):
    """Row statistics, fp32 ``[..., 1]``: ``rstd = 1 / sqrt(variance + eps)``, and the mean of x.

    The mean is None for RMSNorm, and may be None where x8 is normalized, which has none.
    """

    rstd: torch.Tensor
    mean: torch.Tensor | None


class NormForward(NamedTuple):
    """What the first pass finds: x - mean in per-group FP8, the row statistics, and the amax of
    y (fp32 scalar).
    """

    x8: QuantizedTensor
    stats: NormStats
    amax: torch.Tensor


class NormRows(NamedTuple):
    """What the one pass with row scales finds: x - mean in per-group FP8, the row statistics,
    and y in row-wise FP8.
    """

    x8: QuantizedTensor
    stats: NormStats
    y8: QuantizedTensor


def norm_stats(x: torch.Tensor, kind: str, eps: float) -> NormStats:
    """Statistics of the rows of x ``[..., h]``; ``kind`` is "rmsnorm" or "layernorm"."""
    centered, mean = _centered(x, kind)
    return NormStats(_rstd(centered, eps), mean)


def norm_apply(
    x: torch.Tensor | QuantizedTensor,
    stats: NormStats,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """y, fp32, in the shape of x, from x or from x8."""
    y = _normalized(x, stats)
    if weight is not None:
        y = y * weight.float()
    return y if bias is None else y + bias.float()


def norm_forward(
    x: torch.Tensor, kind: str, eps: float, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, NormStats]:
    """y in the dtype of x, and the statistics, of x ``[..., h]``; nothing is quantized."""
    stats = norm_stats(x, kind, eps)
    return norm_apply(x, stats, weight, bias).to(x.dtype), stats


def norm_compress(
    x: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    saved: FP8Format | None = None,
) -> NormForward:
    """First pass over x ``[..., h]``.

    Args:
        weight, bias: ``[h]`` or None.
        fmt: of y, and of x8 unless ``saved`` names another.
        group_size, scale: of x8, see :func:`~coat_dist.reference.quantize.quantize_groups`.
        exact: rstd and amax are those of x; otherwise those of the values of x8.
        saved: format of x8.
    """
    x8, stats, y = _compressed(x, kind, eps, weight, bias, saved or fmt, group_size, scale, exact)
    return NormForward(x8, stats, amax(y))


def norm_compress_rows(
    x: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    saved: FP8Format | None = None,
    out: QuantizedTensor | None = None,
) -> NormRows:
    """:func:`norm_compress`, and y in FP8 as :func:`~coat_dist.reference.quantize.quantize_rows`
    makes it, with scales that are powers of two; in ``out`` where that is given.
    """
    x8, stats, y = _compressed(x, kind, eps, weight, bias, saved or fmt, group_size, scale, exact)
    return NormRows(x8, stats, quantize_rows(y, fmt, True, out))


def norm_quantize(
    x: torch.Tensor | QuantizedTensor,
    stats: NormStats,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
    out: torch.Tensor | None = None,
) -> QuantizedTensor:
    """y of x or x8 in per-tensor FP8 with the given scale; codes ``[..., h]``, or ``[h, rows]`` if
    ``transpose``; in ``out`` where that is given.
    """
    return quantize_tensor(norm_apply(x, stats, weight, bias), fmt, scale, transpose, out)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor | QuantizedTensor,
    kind: str,
    stats: NormStats,
    weight: torch.Tensor | None,
    sum_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of x, weight and bias.

    Args:
        dy: gradient of y, the shape of x.
        x: x or x8.
        sum_dtype: type in which the gradients of weight and bias are summed over rows and returned.
        dtype: of dx.
        bias: whether the bias's gradient is wanted.
        residual: gradient that x receives from elsewhere, in its shape; added to dx in fp32, before
            it is rounded.

    Returns:
        dx (shape of x), dweight and dbias (``[h]``, ``sum_dtype``; dbias None where it is not
        wanted).
    """
    dy = dy.float()
    normalized = _normalized(x, stats)
    weighted = dy if weight is None else dy * weight.float()
    dx = weighted - normalized * _row_mean(weighted * normalized)
    if kind == "layernorm":
        dx = dx - _row_mean(weighted)
    dx = dx * stats.rstd
    if residual is not None:
        dx = dx + residual.float()
    rows = tuple(range(dy.dim() - 1))
    dbias = dy.sum(rows, dtype=sum_dtype) if bias else None
    return dx.to(dtype), (dy * normalized).sum(rows, dtype=sum_dtype), dbias


def _compressed(
    x, kind, eps, weight, bias, fmt, group_size, scale, exact: bool
) -> tuple[QuantizedTensor, NormStats, torch.Tensor]:
    """x8, the statistics, and y (fp32) of the side that ``exact`` names."""
    centered, mean = _centered(x, kind)
    x8 = quantize_groups(centered, fmt, group_size, scale)
    stats = NormStats(_rstd(centered if exact else dequantize(x8), eps), mean)
    return x8, stats, norm_apply(x if exact else x8, stats, weight, bias)


def _centered(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x - mean`` in fp32, which is what rstd is the deviation of, and the mean; for RMSNorm x
    itself, and None.
    """
    x = x.float()
    if kind == "rmsnorm":
        return x, None
    mean = _row_mean(x)
    return x - mean, mean


def _normalized(x: torch.Tensor | QuantizedTensor, stats: NormStats) -> torch.Tensor:
    if isinstance(x, QuantizedTensor):
        return dequantize(x) * stats.rstd
    return (x.float() if stats.mean is None else x.float() - stats.mean) * stats.rstd


def _rstd(centered: torch.Tensor, eps: float) -> torch.Tensor:
    return (centered.double().square().mean(-1, keepdim=True) + eps).rsqrt().float()


def _row_mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(-1, keepdim=True, dtype=torch.float64).float()
