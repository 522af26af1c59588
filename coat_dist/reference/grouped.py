"""Experts side by side: rows of all experts in one matrix, products of each expert's rows with its
own weight.

**Rows.** An expert's rows begin at a multiple of :data:`BLOCK`, and rows of zeros fill up to the
next expert. So a tile of a kernel belongs to one expert, and the rows of an expert can be the
summed dimension of a product, for which FP8 operands have to be aligned. :class:`ExpertRows` says
which rows are whose.

**Scales.** Layout "expert" has one fp32 scale an expert: of its rows ``[rows, n]`` or its matrix
``[experts, k, n]``. It is to an expert what "tensor" is to a tensor. Layout "row" is as everywhere.

Every definition here is the one for a single tensor, expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..formats import FP8Format, QuantizedTensor
from . import quantize

BLOCK = 32
"""Rows that belong to one expert together. FP8 products want 16; kernels read and write at least
this many.
"""


class ExpertRows(NamedTuple):
    """Where the rows of each expert are, ``total`` in all; every tensor on the device of the
    rows.
    """

    source: torch.Tensor
    """int32 ``[total]``: which of the given rows lies here; -1 for a row of zeros."""
    place: torch.Tensor
    """int32 ``[given rows]``: where each of them lies."""
    blocks: torch.Tensor
    """int32 ``[total / BLOCK]``: the expert that each block of rows belongs to."""
    ends: torch.Tensor
    """int32 ``[experts]``: the row behind the last one of each expert; the last of them is
    ``total``.
    """
    known: tuple[int, ...] | None
    """``ends`` where the host knows them: where it was given the numbers of tokens."""

    @property
    def experts(self) -> int:
        return self.ends.shape[0]

    def pieces(self) -> Iterator[tuple[int, slice]]:
        """Each expert that has rows, and these; waits for the device where ``known`` is None."""
        first = 0
        for expert, end in enumerate(self.ends.tolist() if self.known is None else self.known):
            if end > first:
                yield expert, slice(first, end)
            first = end


def most_rows(count: int, experts: int) -> int:
    """The most rows that ``count`` tokens fill, in whole blocks, however they fall on experts; a
    block at least, so that no tokens are no special case.
    """
    return max((count + (BLOCK - 1) * experts) // BLOCK * BLOCK, BLOCK)


def expert_rows(tokens_per_expert: torch.Tensor, rows: int, device: torch.device) -> ExpertRows:
    """Rows sorted by expert, laid out by blocks.

    Args:
        tokens_per_expert: int ``[experts]``, on the CPU or on ``device``; nothing waits for the
            device. There, as many blocks are made as any distribution could need.
        rows: their sum.

    Raises:
        ValueError: on the CPU, numbers that are negative or do not add up to ``rows``.
    """
    counts = tokens_per_expert.long()
    filled = (counts + BLOCK - 1) // BLOCK * BLOCK
    if counts.device.type == "cpu":
        if int(counts.sum()) != rows or bool((counts < 0).any()):
            raise ValueError(
                f"tokens_per_expert: got {counts.tolist()}, accepted: numbers that add up to "
                f"{rows} rows"
            )
        total = max(int(filled.sum()), BLOCK)
    else:
        total = most_rows(rows, counts.numel())
    ends = filled.cumsum(0)
    last = counts.cumsum(0)
    begin, first = ends - filled, last - counts
    ends = torch.cat((ends[:-1], ends.new_full((1,), total)))
    known = tuple(ends.tolist()) if ends.device.type == "cpu" else None
    table = torch.stack((counts, begin, first, ends, last)).to(device, non_blocking=True)
    counts, begin, first, ends, last = table.unbind()
    slot = torch.arange(total, device=device)
    expert = torch.searchsorted(ends, slot, right=True)
    within = slot - begin[expert]
    source = torch.where(within < counts[expert], first[expert] + within, -1)
    row = torch.arange(rows, device=device)
    owner = torch.searchsorted(last, row, right=True)
    place = row + (begin - first)[owner]
    return ExpertRows(source.int(), place.int(), expert[::BLOCK].int(), ends.int(), known)


def take_rows(
    x: torch.Tensor, index: torch.Tensor | None = None, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows ``index`` (int32 ``[m]``, None: all) of x ``[rows, n]``, zeros where it is -1, times
    ``factor``, ``[m]`` of any floating dtype; ``[m, n]``, fp32 products rounded to x's dtype.
    """
    if index is not None:
        if not x.shape[0]:
            return x.new_zeros(index.shape[0], x.shape[1])
        x = torch.where((index >= 0)[:, None], x[index.clamp(min=0).long()], x.new_zeros(()))
    return x if factor is None else (x.float() * factor.float()[:, None]).to(x.dtype)


def sum_rows(
    x: torch.Tensor, index: torch.Tensor, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums of the rows ``index`` (int32 ``[m, k]``, -1: none) of x ``[rows, n]``, each times its
    ``factor`` ``[m, k]``; ``[m, n]``: fp32, rounded once.
    """
    out = x.new_zeros(index.shape[0], x.shape[1], dtype=torch.float32)
    if not x.shape[0]:
        return out.to(x.dtype)
    for i in range(index.shape[1]):
        at = index[:, i].long()
        row = torch.where((at >= 0)[:, None], x[at.clamp(min=0)].float(), 0.0)
        out = out + (row if factor is None else row * factor[:, i, None].float())
    return out.to(x.dtype)


def scale_rows_backward(
    dout: torch.Tensor, factor: torch.Tensor, y8: QuantizedTensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of y ``[rows, n]`` and ``factor`` ``[rows]`` from that of their product.

    Args:
        y8: y by groups; None where nobody wants the gradient of ``factor``.
    """
    dfactor = None
    if y8 is not None:
        dfactor = (dout.float() * quantize.dequantize(y8)).sum(-1).to(factor.dtype)
    return take_rows(dout, None, factor), dfactor


def largest_rows(
    scales: torch.Tensor, rows: ExpertRows, least: float, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """``[experts]``: the largest of the row scales ``[total, 1]`` of each expert, times the size
    of the row's factor; ``least`` of one without rows.
    """
    if factor is not None:
        scales = (scales * factor_of_rows(factor, rows).abs()).clamp(min=least)
    of_blocks = scales.view(-1, BLOCK).amax(1)
    out = scales.new_full((rows.experts,), least)
    return out.scatter_reduce(0, rows.blocks.long(), of_blocks, "amax")


def quantize_experts(
    x: torch.Tensor | QuantizedTensor,
    fmt: FP8Format,
    scales: torch.Tensor,
    transpose: bool = False,
) -> QuantizedTensor:
    """Matrices x ``[experts, k, n]``, or quantized by rows, with a given scale an expert, fp32
    ``[experts]``; with ``transpose`` codes ``[experts, n, k]``.
    """
    if isinstance(x, QuantizedTensor):
        x = quantize.dequantize(x)
    codes = quantize.requantize_rows(x, fmt, scales[:, None, None]).codes
    if transpose:
        codes = codes.transpose(1, 2).contiguous()
    return QuantizedTensor(codes, scales, "expert")


def quantize_columns(x: torch.Tensor, fmt: FP8Format) -> QuantizedTensor:
    """Matrices x ``[experts, k, n]`` transposed and quantized by rows of the result, that is by
    columns of x.

    Returns:
        layout "row": codes ``[experts, n, k]``, scales ``[experts, n, 1]``, powers of two.
    """
    return quantize.quantize_rows(x.transpose(1, 2).contiguous(), fmt, aligned=True)


def factor_of_rows(factor: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """Each row's factor, fp32 ``[total, 1]``; zero for a row of zeros."""
    padded = torch.nn.functional.pad(factor.flatten().float(), (0, 1))  # -1 is the last
    return padded[rows.source.long()][:, None]


def scale_of_rows(scales: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """Each row's scale, fp32 ``[total, 1]``, from those of experts."""
    return scales[rows.blocks.long()].repeat_interleave(BLOCK)[:, None]
