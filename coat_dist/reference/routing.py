"""From tokens to experts: rows sorted by a router's choices, and codes of tokens taken to them.

A router chooses K experts for each of T tokens, so choice ``t * K + k`` sends token t to an
expert. A token is quantized once, whatever K is, and its codes travel: :func:`take_codes` for
products whose rows are tokens, :func:`take_codes_transposed` for products that sum over them.
"""

from __future__ import annotations

import torch

from ..formats import QuantizedTensor, format_of
from . import quantize
from .grouped import ExpertRows, expert_rows, scale_of_rows


def route(index: torch.Tensor, experts: int) -> ExpertRows:
    """Choices sorted by expert, in the order of tokens within one, laid out by blocks.

    Args:
        index: int ``[T, K]``: the experts that each token is sent to. Numbers that are no expert's
            drop a choice, as expert parallelism of transformers marks tokens of other ranks.

    Returns:
        ``source`` counts choices; ``place`` ``[T * K]`` is -1 for a dropped one.
    """
    flat = index.flatten().long()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = flat.sort(stable=True).indices
    counts = flat.new_zeros(experts + 1)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]
    sent = int(counts.sum())
    rows = expert_rows(counts, sent, flat.device)
    order = order[:sent]
    source = rows.source.clone()
    source[rows.place.long()] = order.int()
    place = torch.full_like(flat, -1, dtype=torch.int32)
    place[order] = rows.place
    return rows._replace(source=source, place=place)


def take_codes(q: QuantizedTensor, rows: ExpertRows, choices: int = 1) -> QuantizedTensor:
    """FP8 of the tokens ``[T, n]`` (layout "row" or "tensor") in the rows of experts.

    Args:
        choices: K; ``rows.source // K`` is a row's token.

    Returns:
        The same layout: codes ``[total, n]``, zeros where no token lies, whose row scale is the
        smallest.
    """
    token = rows.source.long().div(choices, rounding_mode="floor")  # -1 stays, and is the last row
    codes = _with_last(q.codes.view(torch.uint8), 0)[token].view(q.codes.dtype)
    if q.layout == "tensor":
        return QuantizedTensor(codes, q.scales, "tensor")
    return QuantizedTensor(codes, _with_last(q.scales, quantize.SMALLEST_SCALE)[token], "row")


def _with_last(rows: torch.Tensor, value: float) -> torch.Tensor:
    return torch.cat([rows, rows.new_full((1, rows.shape[1]), value)])


def take_codes_transposed(
    q: QuantizedTensor, rows: ExpertRows, choices: int, scales: torch.Tensor | None = None
) -> QuantizedTensor:
    """:func:`take_codes`, transposed: codes ``[n, total]``.

    Args:
        q: layout "tensor"; or "row", whose scales are replaced by those of experts.
        scales: fp32 ``[experts]``: then codes are rounded to the expert's scale. Where both are
            powers of two, only what becomes subnormal changes its value.
    """
    taken = take_codes(q, rows, choices)
    if scales is None:
        codes = taken.codes.view(torch.uint8).t().contiguous().view(q.codes.dtype)
        return QuantizedTensor(codes, q.scales, "tensor")
    fmt = format_of(q.codes.dtype)
    values = taken.codes.float() * (taken.scales * scale_of_rows(scales, rows).reciprocal())
    codes = values.clamp(-fmt.max, fmt.max).to(fmt.dtype)
    return QuantizedTensor(codes.t().contiguous(), scales, "expert")
