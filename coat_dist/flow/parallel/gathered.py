"""Weights in shards: each rank quantizes its part, and codes travel, one byte an element where BF16
takes two.

A shard is a stretch of a weight's elements, as ZeRO-3 divides it: it may begin and end inside a
row. The gathered codes are those of the whole weight quantized at once, to the bit. Codes are made
element by element once a scale is known, and a scale is a monotone function of an amax: the largest
that ranks have found for their parts of a row is the row's.

Two layouts of codes are gathered. Forward multiplies one (``forward_scales``), and dgrad multiplies
codes with one scale for the whole weight: rounding the codes by rows again would give others. A
weight that is gathered once for both is gathered in both layouts then, which are as many bytes as
BF16's; one that is let go in between, as ZeRO-3 does where memory matters, takes half of BF16's
bytes each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...formats import FP8Format, QuantizedTensor
from ...ops import amax, quantize_rows, quantize_tensor, tensor_scale
from .tensor_parallel import Pending, all_gather


class Shard(NamedTuple):
    """One rank's stretch of a weight, and the layout in which the weight is to be gathered."""

    values: torch.Tensor
    """``[n]``, this rank's elements without padding; n may be 0."""
    first: int
    """Where in the flattened weight they begin."""
    room: int
    """Elements that each rank has of the weight, padding at its end included; the same on all
    ranks.
    """
    shape: torch.Size
    """Of the weight, ``[out, in]``."""
    layout: str
    """"row" or "tensor"."""
    beside: tuple[torch.Tensor, ...] = ()
    """This rank's elements of other weights of the same product, which share the scale of a
    "tensor".
    """


@torch.no_grad()
def gather(
    shards: Sequence[Shard], fmt: FP8Format, group: dist.ProcessGroup
) -> Pending[list[QuantizedTensor]]:
    """Quantize this rank's shards and begin to gather the codes: two collectives, however many
    shards there are.

    Scales are powers of two, as forward's are. Their largest over ranks are found first, 4 bytes a
    row, or a weight.

    Args:
        shards: of the same weights and layouts, in the same order, on all ranks of ``group``.
    """
    device = shards[0].values.device
    counts = [shard.shape[0] if shard.layout == "row" else 1 for shard in shards]
    # cuBLASLt takes scales at multiples of 16 bytes only.
    rooms = [-(-count // 4) * 4 for count in counts]
    largest = torch.zeros(sum(rooms), dtype=torch.float32, device=device)
    scales = [part[:count] for part, count in zip(largest.split(rooms), counts, strict=True)]
    payload = torch.empty(sum(shard.room for shard in shards), dtype=torch.uint8, device=device)
    codes = payload.split([shard.room for shard in shards])
    for shard, scale, out in zip(shards, scales, codes, strict=True):
        _scale_and_quantize_whole_rows(shard, scale, out, fmt)
    # NaN, which a MAX may lose, travels as infinity, which no scale is.
    largest.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    largest.masked_fill_(largest.isinf(), torch.nan)
    scales = [s if shard.layout == "row" else s[0] for s, shard in zip(scales, shards, strict=True)]
    for shard, scale, out in zip(shards, scales, codes, strict=True):
        _quantize_the_rest(shard, scale, out, fmt)
    buffer = payload.new_empty(dist.get_world_size(group), payload.numel())
    work = all_gather(buffer.view(-1), payload, group=group, async_op=True)
    return Pending(lambda: _whole(shards, scales, buffer, fmt), (work,), payload)


def _whole(
    shards: Sequence[Shard], scales: Sequence[torch.Tensor], buffer: torch.Tensor, fmt: FP8Format
) -> list[QuantizedTensor]:
    """The quantized weights, in the order of the shards, from all ranks' codes ``[ranks, ...]``."""
    found, begin = [], 0
    for shard, scale in zip(shards, scales, strict=True):
        numel, room = shard.shape.numel(), shard.room
        if len(shards) == 1:
            codes = buffer.view(-1)[:numel]
        else:
            parts = [part[begin : begin + room] for part in buffer[: -(-numel // room)]]
            codes = torch.cat(parts)[:numel]
        begin += room
        by_row = scale[:, None] if shard.layout == "row" else scale
        found.append(QuantizedTensor(codes.view(fmt.dtype).view(shard.shape), by_row, shard.layout))
    return found


def _pieces(shard: Shard) -> tuple[slice, list[slice]]:
    """The stretch of whole rows in a shard's elements, and what there is of rows that other
    ranks have parts of.
    """
    columns, n = shard.shape[1], shard.values.numel()
    begin = min(-shard.first % columns, n)
    end = begin + (n - begin) // columns * columns
    return slice(begin, end), [
        piece for piece in (slice(0, begin), slice(end, n)) if piece.stop > piece.start
    ]


def _scale_and_quantize_whole_rows(
    shard: Shard, scale: torch.Tensor, out: torch.Tensor, fmt: FP8Format
) -> None:
    """Fill ``scale`` as far as this rank sees it, and ``out`` where nothing is left to be learnt
    from other ranks.
    """
    if shard.layout == "tensor":
        top = torch.stack([amax(values) for values in (shard.values, *shard.beside)]).amax()
        scale.copy_(tensor_scale(top, fmt, aligned=True))
        return
    columns = shard.shape[1]
    whole, split = _pieces(shard)
    if whole.stop > whole.start:
        q = quantize_rows(shard.values[whole].view(-1, columns), fmt, aligned=True)
        out[whole].copy_(q.codes.view(torch.uint8).view(-1))
        row = (shard.first + whole.start) // columns
        scale[row : row + q.scales.shape[0]].copy_(q.scales.view(-1))
    for piece in split:
        row = (shard.first + piece.start) // columns
        scale[row].copy_(tensor_scale(amax(shard.values[piece]), fmt, aligned=True))


def _quantize_the_rest(
    shard: Shard, scale: torch.Tensor, out: torch.Tensor, fmt: FP8Format
) -> None:
    columns = shard.shape[1]
    if shard.layout == "tensor":
        n = shard.values.numel()
        # As rows: a kernel takes many of these, and no single one of any length.
        whole = n // columns * columns
        if whole:
            codes = quantize_tensor(shard.values[:whole].view(-1, columns), fmt, scale).codes
            out[:whole].copy_(codes.view(torch.uint8).view(-1))
        if whole < n:
            out[whole:n].copy_(
                quantize_tensor(shard.values[whole:], fmt, scale).codes.view(torch.uint8)
            )
        return
    for piece in _pieces(shard)[1]:
        row = (shard.first + piece.start) // columns
        out[piece].copy_(
            quantize_tensor(shard.values[piece], fmt, scale[row]).codes.view(torch.uint8)
        )


class GatheredWeight:
    """A whole weight of which this rank has codes and no values, for as long as it is in use.

    It is the attribute ``coat_gathered`` of the parameter, whose data are NaN meanwhile: whatever
    reads them by mistake is not wrong unnoticed.
    """

    def __init__(
        self, codes: dict[str, QuantizedTensor], fetch: Callable[[str], QuantizedTensor]
    ) -> None:
        """``codes``: by layout. ``fetch``: gathers those of a layout that is not among them;
        collective.
        """
        self.codes = codes
        self.used: set[str] = set()
        self._fetch = fetch

    def in_layout(self, layout: str) -> QuantizedTensor:
        """Codes ``[out, in]`` with scales by "row" or of the whole "tensor"."""
        self.used.add(layout)
        if layout not in self.codes:
            self.codes[layout] = self._fetch(layout)
        return self.codes[layout]
