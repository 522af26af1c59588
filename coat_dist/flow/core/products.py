"""FP8 products: how their operands are quantized, on which scales several ranks agree, and the
products themselves, with and without a sum over ranks.

**Scales of forward** are per tensor or per row (``forward_scales``). Backward's are per tensor:
wgrad sums over rows, dgrad over rows of the weight, and a scale that changes along a sum cannot be
applied to it. So every :class:`Operand` carries one scale for backward. It is the same in both
modes: a scale is a monotone function of an amax, and therefore the largest scale of the rows is the
scale of the tensor.

**Scales of forward's operands are powers of two.** Codes with such scales stand for the same
values, whichever power it is, unless they are subnormal. So dgrad, with one scale, multiplies the
values of a weight that forward multiplied with scales of rows; with others it would round them at
other places, the same for every batch, and an error that does not change from batch to batch is
what averages over steps keep. Gradients, which nothing rounds twice, have any scale.

Per-tensor scales under tensor parallelism (``tp``):

* An FP8 tensor that is gathered has one scale on all ranks: its amax is MAX-reduced before it is
  quantized.
* Everything else may differ between ranks, since each rank's GEMM applies its own scales.
  ``tp_invariant`` reduces these too and adds partial products up exactly, which makes results the
  same, to the bit, for every tensor-parallel size.

Row scales are gathered with the codes and never reduced, except that ``tp_invariant`` reduces those
of rows of which each rank holds a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...config import ActivationConfig
from ...formats import FORMATS, FP8Format, QuantizedTensor
from ...ops import (
    SMALLEST_SCALE,
    amax,
    code_products,
    quantize_both,
    quantize_rows,
    quantize_tensor,
    requantize_rows,
    scale_and_round,
    scaled_mm,
    tensor_scale,
    transpose,
)
from ..parallel.overlap import Rows, scattered_product
from ..parallel.tensor_parallel import Pending, TensorParallel


class Operand(NamedTuple):
    """An operand of a forward product."""

    q8: QuantizedTensor
    """What is multiplied: layout "tensor" or "row"."""
    scale: torch.Tensor
    """fp32 scalar, to be saved: backward quantizes the same values with it, transposed."""


def row_operand(q8: QuantizedTensor, tp: TensorParallel, settings: ActivationConfig) -> Operand:
    """The operand with these row scales; its ``scale`` is that of all ranks' rows with
    ``tp_invariant``.
    """
    rows, scale = q8.scales, q8.top
    if scale is None:
        scale = rows.amax() if rows.numel() else rows.new_full((), SMALLEST_SCALE)
    return Operand(q8, _largest(scale, tp) if settings.tp_invariant else scale)


def share_rows(
    q8: QuantizedTensor,
    values: Callable[[], torch.Tensor],
    tp: TensorParallel,
    settings: ActivationConfig,
) -> QuantizedTensor:
    """Row-wise FP8 ``[rows, k / tp]`` of which each rank holds a part of every row, its scales
    shared if they must be.

    Args:
        values: gives what ``q8`` was quantized from. With ``tp_invariant`` it is quantized again,
            with shared scales; on one rank too, for a kernel that makes values and codes in one
            pass may round a value's last bit otherwise. Without, ``q8`` stays as it is.
    """
    if not settings.tp_invariant:
        return q8
    return requantize_rows(values(), FORMATS[settings.format], _largest(q8.scales, tp))


def _largest(scales: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Elementwise maximum over ranks. NaN, which a MAX may lose, travels as infinity, which no
    scale is.
    """
    if tp.size == 1:
        return scales
    top = tp.max_(scales.nan_to_num(nan=torch.inf))
    return torch.where(top.isinf(), torch.nan, top)


def saved_format(settings: ActivationConfig, pre_activation: bool = False) -> FP8Format:
    """The format in which a tensor is saved by groups.

    Inputs of norms have a few channels that are large in all tokens. They take their neighbours'
    bits in INT8, whose steps have one size. What enters an activation function is not known to have
    such channels.
    """
    name = settings.saved_format
    if name == "mixed":
        name = "int8" if pre_activation else "e3m4"
    return FORMATS[name]


def shared_scale(
    amax: torch.Tensor, fmt: FP8Format, tp: TensorParallel, shared: bool, aligned: bool = True
) -> torch.Tensor:
    """The per-tensor scale for ``amax`` (fp32 scalar, overwritten); one scale for all ranks if
    ``shared``; a power of two if ``aligned``.
    """
    return tensor_scale(tp.max_(amax) if shared else amax, fmt, aligned)


def quantize_input(
    x: torch.Tensor, tp: TensorParallel, settings: ActivationConfig, split: bool
) -> Operand:
    """The input ``[rows, k / tp]`` of a row-parallel GEMM in FP8; also a weight shard.

    Args:
        split: each rank holds a part of every row (row-parallel GEMM), and not some whole rows
            (column-parallel).
    """
    fmt = FORMATS[settings.format]
    if settings.forward_scales == "row":
        q8 = quantize_rows(x, fmt, aligned=True)
        return row_operand(share_rows(q8, lambda: x, tp, settings) if split else q8, tp, settings)
    scale = shared_scale(amax(x), fmt, tp, settings.tp_invariant)
    return Operand(quantize_tensor(x, fmt, scale), scale)


def gather_operand(
    q8: QuantizedTensor, tp: TensorParallel, settings: ActivationConfig
) -> QuantizedTensor | Rows:
    """All ranks' rows of an operand, or what will be them: rows that come while products run,
    where they can.
    """
    if (
        not settings.tp_invariant
        and (peers := tp.peers(q8.codes.numel(), 1, q8.codes.device)) is not None
    ):
        return Rows(peers, q8)
    if q8.layout == "row":
        return tp.start_gather_quantized(q8).wait()
    return QuantizedTensor(tp.gather_rows(q8.codes), q8.scales, q8.layout)


def reserve_rows(
    x: torch.Tensor,
    fmt: FP8Format,
    tp: TensorParallel,
    settings: ActivationConfig,
    scales: bool = True,
) -> QuantizedTensor | None:
    """Where codes of the shape of x, and their scales of rows, are to be written that ranks gather
    next; None where they do not read them there.
    """
    if not (tp.sharded and settings.fp8_gather) or settings.tp_invariant:
        return None
    peers = tp.peers(x.numel(), 1, x.device)
    if peers is None:
        return None
    kinds: list[tuple[Sequence[int], torch.dtype]] = [(x.shape, fmt.dtype)]
    if scales:
        kinds.append(((*x.shape[:-1], 1), torch.float32))
    room = peers.reserve(*kinds)
    return QuantizedTensor(room[0], room[-1], "row")


def whole(q8: QuantizedTensor | Rows) -> QuantizedTensor:
    """All rows, waited for."""
    return q8.whole() if isinstance(q8, Rows) else q8


def gradient_amax(
    dy: torch.Tensor,
    tp: TensorParallel,
    settings: ActivationConfig,
    gather: bool,
    top: torch.Tensor | None = None,
) -> Pending[torch.Tensor]:
    """The amax for :func:`quantize_gradient`, on which ranks are agreeing where they have to.

    Args:
        top: dy's own amax where the pass that made dy took it (overwritten).
    """
    if top is None:
        top = amax(dy)
    if gather and tp.sharded or settings.tp_invariant:
        return tp.start_max(top)
    return Pending(lambda: top)


def quantize_gradient(
    dy: torch.Tensor,
    tp: TensorParallel,
    settings: ActivationConfig,
    gather: bool,
    top: Pending[torch.Tensor],
    wgrad: bool,
) -> list[Any]:
    """The gradient of a product's output, quantized once: ``[rows, n]`` for dgrad and ``[n, rows]``
    for ``wgrad``, else None.

    Args:
        dy: ``[rows, n]``; with sequence parallelism and ``gather``, this rank's rows only.
        gather: the output was scattered over ranks (row-parallel GEMM), so its gradient is
            gathered.
        top: of :func:`gradient_amax` for the same arguments.
    """
    fmt = FORMATS[settings.grad_format]
    gather = gather and tp.sharded
    scale = tensor_scale(top.wait(), fmt)
    if gather and settings.fp8_gather:
        rows = QuantizedTensor(
            tp.gather_rows(quantize_tensor(dy, fmt, scale).codes), scale, "tensor"
        )
        return [rows, transpose(rows) if wgrad else None]
    if gather:
        dy = tp.gather_rows(dy)
    if wgrad:
        return list(quantize_both(dy, fmt, scale))
    return [quantize_tensor(dy, fmt, scale), None]


def gemm(
    a: QuantizedTensor | Rows | Iterator[QuantizedTensor],
    b: QuantizedTensor,
    dtype: torch.dtype,
    settings: ActivationConfig,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a @ b.T`` where every rank has all of the summed dimension; ``[m, n]`` of ``dtype``, in
    ``out`` if given. Rows that are still coming are multiplied as they come, and so are pieces of
    rows that an iterator makes, each of which is dropped before the next one is made.
    """
    if isinstance(a, Iterator):
        return torch.cat([*map(lambda piece: gemm(piece, b, dtype, settings, fast_accum), a)])
    if isinstance(a, Rows):
        return a.multiply(
            lambda part, out: scaled_mm(part, b, dtype, fast_accum, out), b.codes.shape[0], dtype
        )
    # fp32 sums of tensor cores depend on the shape, and so on the number of ranks.
    if settings.tp_invariant:
        found = scale_and_round(code_products(a, b), a.scales, b.scales, dtype)
        return found if out is None else out.copy_(found)
    return scaled_mm(a, b, dtype, fast_accum, out)


def summed_gemm(
    a: Any,
    b: QuantizedTensor,
    dtype: torch.dtype,
    tp: TensorParallel,
    settings: ActivationConfig,
    fast_accum: bool = False,
) -> Pending[torch.Tensor]:
    """``a @ b.T`` where the summed dimension is split over ranks; the sum over ranks is under way.

    Args:
        a: on one rank also an iterator, as in :func:`gemm`.

    Returns:
        The sum, ``[m, n]``, or this rank's rows of it, ``[m / tp, n]``, with sequence parallelism.
    """
    reduce = tp.start_reduce_scatter if tp.sharded else tp.start_sum
    # Codes first, scales last: then the sum over ranks is exact.
    if settings.tp_invariant and tp.size > 1:
        a_scales = tp.own_rows(a.scales) if a.layout == "row" else a.scales
        b_scales = b.scales
        return reduce(code_products(a, b)).then(
            lambda sums: scale_and_round(sums, a_scales, b_scales, dtype)
        )
    n = b.codes.shape[0]
    if (
        tp.sharded
        and (m := a.codes.shape[0]) % tp.size == 0
        and (peers := tp.peers(m // tp.size * n, dtype.itemsize, a.codes.device))
    ):
        return scattered_product(
            peers, a, lambda part, out: scaled_mm(part, b, dtype, fast_accum, out), n, dtype
        )
    return reduce(gemm(a, b, dtype, settings, fast_accum))


def check_input(x: torch.Tensor, weight: torch.Tensor, name: str = "weight") -> None:
    """Refuse what the flow cannot multiply.

    Raises:
        ValueError: x is neither bfloat16 nor float32, or ``weight`` is not ``[out, x.shape[-1]]``
            of such a type.
    """
    for what, t in (("x", x), (name, weight)):
        if t.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{what}: got {t.dtype}, accepted: torch.bfloat16, torch.float32")
    if x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{name}: got shape {list(weight.shape)} for x of shape {list(x.shape)}, accepted: "
            "[out, x.shape[-1]]"
        )
