"""Many tensors in one launch: which may share it, and the table of addresses by which the kernel finds them.

A launch costs some 45 us of host time (H200, Triton 3.6), which is what a matrix of 10**7 elements takes on the device.
A model of small matrices would wait for the host most of the time. The kernel takes one program a tile as ever; a tile
looks up its tensor, and the tensor its addresses::

    table           int64 [tensors, 14]: param, grad, m.q, m.a, m.k, v.q, v.a, v.k, n, groups, seed, first tile,
                    low, copy (0 where there is none)
    tensor_of_tile  int32 [tiles]

Tensors get the same bytes from it as from launches of their own (tested in the interpreter and on an H200).

A seed is the parameter's; the step, which changes, is an argument of the kernel. So tables stay on the device as long
as addresses repeat, as they do where gradients are kept or reallocated in the same order; otherwise some 100 bytes a
tensor and 4 a tile travel from pinned memory, without waiting for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..reference.adamw import AdamWTensors

__all__ = ["LIMIT", "build", "sort"]

LIMIT = 1 << 24
"""Elements up to which tensors share a launch; larger ones take longer on the device than their launch on the host."""
ALIGNMENT = 16
"""Bytes and elements: the kernel uses 16-byte accesses throughout, which other tensors cannot have."""
_KEPT = 8


class Kind(NamedTuple):
    """What tensors of one launch have in common, as it is compiled in."""

    param: torch.dtype
    grad: torch.dtype
    stochastic: bool
    low: bool
    copy: torch.dtype | None


Member = tuple[list[int], AdamWTensors]
_tables: OrderedDict[tuple, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()


def sort(tensors: Iterable[AdamWTensors]) -> tuple[dict[Kind, list[Member]], list[AdamWTensors]]:
    """Those that share a launch, with their addresses, by kind; and the others. No empty ones."""
    kinds: dict[Kind, list[Member]] = {}
    single = []
    for one in tensors:
        param, grad, m, v, seed, low, copy = one
        n = param.numel()
        if n == 0:
            continue
        if n <= LIMIT and n % ALIGNMENT == 0:
            addresses = [0 if t is None else t.data_ptr() for t in (param, grad, *m, *v, low, copy)]
            if not any(address % ALIGNMENT for address in addresses):
                copied = None if copy is None else copy.dtype
                kind = Kind(param.dtype, grad.dtype, seed is not None, low is not None, copied)
                kinds.setdefault(kind, []).append((addresses, one))
                continue
        single.append(one)
    for kind in [k for k, many in kinds.items() if len(many) == 1]:
        single.append(kinds.pop(kind)[0][1])
    return kinds, single


def build(many: list[Member], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``table`` and ``tensor_of_tile`` on the tensors' device; ``rows`` is the number of groups a tile has."""
    device = many[0][1].param.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, rows, *(x for addresses, one in many for x in (*addresses, one.param.numel(), one.seed)))
    if key in _tables:
        _tables.move_to_end(key)
        return _tables[key]
    table, tiles, first = [], [], 0
    for addresses, one in many:
        groups = len(one.first_moment.a)
        table.append([*addresses[:8], one.param.numel(), groups, one.seed or 0, first, *addresses[8:]])
        tiles.append(-(-groups // rows))
        first += tiles[-1]
    owner = torch.repeat_interleave(torch.arange(len(tiles), dtype=torch.int32), torch.tensor(tiles))
    built = [torch.tensor(table, dtype=torch.int64), owner]
    if device.type == "cuda":
        built = [t.pin_memory().to(device, non_blocking=True) for t in built]
    _tables[key] = built[0], built[1]
    if len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return _tables[key]
