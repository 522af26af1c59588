"""What the flow shares: tensor parallelism, scales that several ranks agree on, and the two kinds of FP8 product.

**Scales of forward** are per tensor or per row (``forward_scales``). Backward's are per tensor: wgrad sums over rows,
dgrad over rows of the weight, and a scale that changes along a sum cannot be applied to it. So every :class:`Operand`
carries one scale for backward. It is the same in both modes: a scale is a monotone function of an amax, and therefore
the largest scale of the rows is the scale of the tensor.

Per-tensor scales under tensor parallelism (``tp``):

* An FP8 tensor that is gathered has one scale on all ranks: its amax is MAX-reduced before it is quantized.
* Everything else may differ between ranks, since each rank's GEMM applies its own scales. ``tp_invariant`` reduces
  these too and adds partial products up exactly, which makes results the same, to the bit, for every tensor-parallel
  size.

Row scales are gathered with the codes and never reduced, except that ``tp_invariant`` reduces those of rows of which
each rank holds a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..config import ActivationConfig
from ..formats import FP8Format, QuantizedTensor, fp8_format
from ..ops.gemm import code_products, scale_and_round, scaled_mm
from ..ops.quantize import (
    SMALLEST_SCALE,
    amax,
    power_of_two,
    quantize_both,
    quantize_rows,
    quantize_tensor,
    requantize_rows,
    tensor_scale,
    transpose,
)

__all__ = [
    "Operand",
    "TensorParallel",
    "check_input",
    "gemm",
    "quantize_gradient",
    "quantize_input",
    "row_operand",
    "share_rows",
    "shared_scale",
    "summed_gemm",
]

# torch 2.13 renamed both collectives and deprecated the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share a layer, and whether they split the sequence too. ``TensorParallel()`` means one rank."""

    group: dist.ProcessGroup | None = None
    """None means one rank, never the default group."""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        # Looked up here, for torch.compile: before Python 3.12 a cached property takes a lock, which it cannot trace.
        _ = self.size, self.rank

    @cached_property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def sharded(self) -> bool:
        """Whether rows (dimension 0) really are split over ranks."""
        return self.sequence_parallel and self.size > 1

    def with_sequence_parallel(self, sequence_parallel: bool) -> TensorParallel:
        """The same ranks, splitting the sequence or not. Makes no new object from the second switch on."""
        return self if self.group is None or sequence_parallel == self.sequence_parallel else self._switched

    @cached_property
    def _switched(self) -> TensorParallel:
        return TensorParallel(self.group, not self.sequence_parallel)

    def max_(self, t: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks, in place. NaN may be lost on the way: an amax has none."""
        if self.size > 1:
            dist.all_reduce(t, dist.ReduceOp.MAX, group=self.group)
        return t

    def sum(self, t: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. Overwrites ``t``, which must be contiguous, and returns it."""
        if self.size > 1:
            dist.all_reduce(t, group=self.group)
        return t

    def gather_rows(self, t: torch.Tensor) -> torch.Tensor:
        """All ranks' ``t`` one after the other along dimension 0. FP8 travels as bytes: not every backend knows it."""
        if self.size == 1:
            return t
        payload = t.contiguous()
        if payload.dtype.itemsize == 1:
            payload = payload.view(torch.uint8)
        out = payload.new_empty(self.size * t.shape[0], *t.shape[1:])
        _all_gather(out, payload, group=self.group)
        return out.view(t.dtype)

    def gather_quantized(self, q: QuantizedTensor) -> QuantizedTensor:
        """All ranks' rows of a tensor quantized by rows, codes and scales."""
        return QuantizedTensor(self.gather_rows(q.codes), self.gather_rows(q.scales), q.layout)

    def own_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's share along dimension 0 where rows are split over ranks, all of them otherwise."""
        return t.chunk(self.size)[self.rank] if self.sharded else t

    def reduce_scatter_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's share along dimension 0 of the sum over ranks.

        Raises:
            ValueError: dimension 0 is no multiple of the number of ranks.
        """
        if self.size == 1:
            return t
        if t.shape[0] % self.size:
            raise ValueError(f"sequence parallelism: got {t.shape[0]} rows, accepted: a multiple of {self.size} ranks")
        out = t.new_empty(t.shape[0] // self.size, *t.shape[1:])
        _reduce_scatter(out, t.contiguous(), group=self.group)
        return out


class Operand(NamedTuple):
    """An operand of a forward product."""

    q8: QuantizedTensor
    """What is multiplied: layout "tensor" or "row"."""
    scale: torch.Tensor
    """fp32 scalar, to be saved: backward quantizes the same values with it, transposed."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.q8.nbytes + (0 if self.scale is self.q8.scales else self.scale.nbytes)


def row_operand(q8: QuantizedTensor, tp: TensorParallel, settings: ActivationConfig) -> Operand:
    """The operand with these row scales; its ``scale`` is that of all ranks' rows with ``tp_invariant``."""
    rows = q8.scales
    scale = rows.amax() if rows.numel() else rows.new_full((), SMALLEST_SCALE)
    return Operand(q8, _largest(scale, tp) if settings.tp_invariant else scale)


def share_rows(
    q8: QuantizedTensor, values: Callable[[], torch.Tensor], tp: TensorParallel, settings: ActivationConfig
) -> QuantizedTensor:
    """Row-wise FP8 ``[rows, k / tp]`` of which each rank holds a part of every row, its scales shared if they must be.

    Args:
        values: gives what ``q8`` was quantized from. With ``tp_invariant`` it is quantized again, with shared scales;
            on one rank too, for a kernel that makes values and codes in one pass may round a value's last bit
            otherwise. Without, ``q8`` stays as it is.
    """
    if not settings.tp_invariant:
        return q8
    return requantize_rows(values(), fp8_format(settings.format), _largest(q8.scales, tp))


def _largest(scales: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Elementwise maximum over ranks. NaN, which a MAX may lose, travels as infinity, which no scale is."""
    if tp.size == 1:
        return scales
    top = tp.max_(scales.nan_to_num(nan=torch.inf))
    return torch.where(top.isinf(), torch.nan, top)


def shared_scale(amax: torch.Tensor, fmt: FP8Format, tp: TensorParallel, shared: bool) -> torch.Tensor:
    """The per-tensor scale for ``amax`` (fp32 scalar, overwritten); one scale for all ranks if ``shared``."""
    return tensor_scale(tp.max_(amax) if shared else amax, fmt)


def quantize_input(
    x: torch.Tensor, tp: TensorParallel, settings: ActivationConfig, split: bool, aligned: bool = False
) -> Operand:
    """The input ``[rows, k / tp]`` of a row-parallel GEMM in FP8; also a weight shard.

    Args:
        split: each rank holds a part of every row (row-parallel GEMM), and not some whole rows (column-parallel).
        aligned: make scales powers of two.
    """
    fmt = fp8_format(settings.format)
    if settings.forward_scales == "row":
        q8 = quantize_rows(x, fmt, aligned)
        return row_operand(share_rows(q8, lambda: x, tp, settings) if split else q8, tp, settings)
    scale = shared_scale(amax(x), fmt, tp, settings.tp_invariant)
    scale = power_of_two(scale) if aligned else scale
    return Operand(quantize_tensor(x, fmt, scale), scale)


def quantize_gradient(
    dy: torch.Tensor, tp: TensorParallel, settings: ActivationConfig, gather: bool, top: torch.Tensor | None = None
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The gradient of a GEMM's output, quantized once: ``[rows, n]`` for dgrad and ``[n, rows]`` for wgrad.

    Args:
        dy: ``[rows, n]``; with sequence parallelism and ``gather``, this rank's rows only.
        gather: the output was scattered over ranks (row-parallel GEMM), so its gradient is gathered.
        top: dy's amax where the pass that made dy took it (overwritten).
    """
    fmt = fp8_format(settings.grad_format)
    gather = gather and tp.sharded
    scale = shared_scale(amax(dy) if top is None else top, fmt, tp, gather or settings.tp_invariant)
    if gather and settings.fp8_gather:
        d8 = QuantizedTensor(tp.gather_rows(quantize_tensor(dy, fmt, scale).codes), scale, "tensor")
        return d8, transpose(d8)
    return quantize_both(tp.gather_rows(dy) if gather else dy, fmt, scale)


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, settings: ActivationConfig, fast_accum: bool = False
) -> torch.Tensor:
    """``a @ b.T`` where every rank has all of the summed dimension; ``[m, n]`` of ``dtype``."""
    if settings.tp_invariant:  # fp32 sums of tensor cores depend on the shape, and so on the number of ranks
        return scale_and_round(code_products(a, b), a.scales, b.scales, dtype)
    return scaled_mm(a, b, dtype, fast_accum)


def summed_gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    dtype: torch.dtype,
    tp: TensorParallel,
    settings: ActivationConfig,
    fast_accum: bool = False,
) -> torch.Tensor:
    """``a @ b.T`` where the summed dimension is split over ranks.

    Returns:
        The sum, ``[m, n]``, or this rank's rows of it, ``[m / tp, n]``, with sequence parallelism.
    """
    reduce = tp.reduce_scatter_rows if tp.sharded else tp.sum
    if settings.tp_invariant and tp.size > 1:  # codes first, scales last: then the sum over ranks is exact
        a_scales = tp.own_rows(a.scales) if a.layout == "row" else a.scales
        return scale_and_round(reduce(code_products(a, b)), a_scales, b.scales, dtype)
    return reduce(gemm(a, b, dtype, settings, fast_accum))


def check_input(x: torch.Tensor, weight: torch.Tensor, name: str = "weight") -> None:
    """Refuse what the flow cannot multiply.

    Raises:
        ValueError: x is neither bfloat16 nor float32, or ``weight`` is not ``[out, x.shape[-1]]`` of such a type.
    """
    for what, t in (("x", x), (name, weight)):
        if t.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{what}: got {t.dtype}, accepted: torch.bfloat16, torch.float32")
    if x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{name}: got shape {list(weight.shape)} for x of shape {list(x.shape)}, accepted: [out, x.shape[-1]]"
        )
