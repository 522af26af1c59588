"""Many tensors in one launch: the table of addresses by which the kernel finds them, and what is
kept of it.

A launch costs up to 45 us of host time (H200, Triton 3.6), which is what a matrix of 10**7 elements
takes on the device. A model of small matrices would wait for the host most of the time. The kernel
takes one program a tile as ever; a tile looks up its tensor, and the tensor its addresses::

    table           int64 [tensors, columns]: the tensor's first tile, then what its kernel needs
    grads           int64 [tensors]: addresses of the gradients
    tensor_of_tile  int32 [tiles], one for each kind of tensors: a kind is a launch

Tensors get the same bytes from it as from launches of their own (tested in the interpreter and on
an H200).

Seeds are parameters' own; the step, which changes, is an argument of the kernel. So a table stays
on the device as long as parameters and states stay where they are. Addresses of gradients, which
may change in each step, are apart: where they do change, 8 bytes a tensor travel from pinned
memory, without waiting for the device.

**CUDA graphs.** A graph keeps addresses, those of these tensors among them: what a capture uses is
never freed. Pinned memory cannot be had during a capture of every torch, so tensors that count
their steps on the device, which are those that are captured, have a spare buffer from the start.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from ..reference.adamw import AdamWTensors
from ..reference.adamw_batch import Batch
from .launch import cdiv

ALIGNMENT = 16
"""Bytes (of an address) and elements that 16-byte accesses take at a time."""
LIMIT = 1 << 24
"""Elements up to which tensors share a launch; larger ones take longer on the device than their
launch on the host.
"""
_KEPT = 8

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class Member(NamedTuple):
    """A tensor of a shared launch."""

    position: int
    """In the sequence that is stepped."""
    tiles: int
    row: list[int]
    """Of the table, without its first column."""


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Kind(NamedTuple):
    """What tensors of one launch have in common, as compile-time constants."""

    param: tl.dtype
    grad: tl.dtype
    seeded: bool
    low: bool
    copied: bool
    copy: tl.dtype
    """Of the copy; ``param`` where there is none."""
    aligned: bool

    @classmethod
    def of(cls, one: Any, seeded: bool, aligned: bool) -> Kind:
        """That of a parameter's tensors."""
        copy = one.param if one.copy is None else one.copy
        return cls(
            TYPES[one.param.dtype],
            TYPES[one.grad.dtype],
            seeded,
            one.low is not None,
            one.copy is not None,
            TYPES[copy.dtype],
            aligned,
        )


_ADDRESS = torch.Tensor.data_ptr


def sort(
    tensors: Sequence[AdamWTensors], rows: int = 8
) -> tuple[dict[Kind, list[Member]], list[int]]:
    """Those that share a launch, by kind; and the positions of the others. No empty ones.

    ``rows`` is the number of groups a tile has. A row of the table, after its first tile: param,
    m.q, m.a, m.k, v.q, v.a, v.k, n, groups, seed, low, copy; 0 for what there is not.
    """
    kinds: dict[Kind, list[Member]] = {}
    single = []
    for i, one in enumerate(tensors):
        param, grad, m, v, seed, low, copy, _, base_row = one
        n, groups = param.numel(), len(m.a)
        if n == 0:
            continue
        if n <= LIMIT and n % ALIGNMENT == 0 and not base_row:
            ends = [0 if t is None else t.data_ptr() for t in (low, copy)]
            addresses = [*map(_ADDRESS, (param, *m, *v))]
            if not any(address % ALIGNMENT for address in (*addresses, *ends, grad.data_ptr())):
                kind = Kind.of(one, seed is not None, True)
                kinds.setdefault(kind, []).append(
                    Member(i, cdiv(groups, rows), [*addresses, n, groups, seed or 0, *ends])
                )
                continue
        single.append(i)
    for kind in [k for k, many in kinds.items() if len(many) == 1]:
        single.append(kinds.pop(kind)[0].position)
    return kinds, single


class Table:
    """The table of some kinds of tensors, on their device."""

    def __init__(
        self, kinds: Mapping[Any, list[Member]], device: torch.device, stream: int, counted: bool
    ) -> None:
        self.device, self.stream = device, stream
        rows, owners = [], []
        for many in kinds.values():
            tiles = [member.tiles for member in many]
            firsts = itertools.accumulate(tiles[:-1], initial=0)
            rows += [[first, *member.row] for first, member in zip(firsts, many, strict=True)]
            numbers = torch.arange(len(rows) - len(many), len(rows), dtype=torch.int32)
            owners.append(torch.repeat_interleave(numbers, torch.tensor(tiles)))
        self.table = self._to_device(torch.tensor(rows, dtype=torch.int64))
        self.tensor_of_tile = [self._to_device(owner) for owner in owners]
        self._counted = counted and device.type == "cuda"
        self._grads: torch.Tensor | None = None
        self._addresses: tuple[int, ...] = ()
        self._spare: tuple[torch.Tensor, torch.Tensor] | None = None
        self._provide()

    def point(self, addresses: tuple[int, ...], capturing: bool) -> torch.Tensor:
        """Addresses of gradients, in the order of rows, on the device."""
        known = self._grads if addresses == self._addresses else None
        if capturing:
            grads = self._captured(addresses) if known is None else known
            _captured.append((self.table, grads, *self.tensor_of_tile))
            return grads
        self._provide()
        if known is None:
            known = self._grads = self._to_device(torch.tensor(addresses, dtype=torch.int64))
            self._addresses = addresses
        return known

    def _captured(self, addresses: tuple[int, ...]) -> torch.Tensor:
        """Addresses as every replay copies them: the tensor has them in replays only, and for
        them only.
        """
        if self._spare is None:  # a second capture, without a step between
            self._provide()
        assert self._spare is not None
        host, grads = self._spare
        self._spare = None
        host.copy_(torch.tensor(addresses, dtype=torch.int64))
        grads.copy_(host, non_blocking=True)
        _captured.append((host,))
        return grads

    def _provide(self) -> None:
        if self._counted and self._spare is None:
            n = len(self.table)
            self._spare = (
                torch.empty(n, dtype=torch.int64, pin_memory=True),
                self.table.new_empty(n),
            )

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return (
            values.pin_memory().to(self.device, non_blocking=True)
            if self.device.type == "cuda"
            else values
        )


_tables: OrderedDict[Hashable, Table] = OrderedDict()
_captured: list[tuple[torch.Tensor, ...]] = []


class Launches(NamedTuple):
    """How tensors are stepped: some share launches, the others have their own."""

    kinds: list[Any]
    table: Table | None
    order: list[int]
    """Positions of the tensors that share launches, by row of the table."""
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    """Of a sequence for all tensors, what belongs to ``order``."""
    single: list[int]
    """Positions of the others, without empty tensors."""
    offsets: list[int]
    """By how many bytes gradients that share launches miss a multiple of 16."""

    def grads(self, tensors: Sequence[Any]) -> torch.Tensor:
        """Addresses of the gradients of those that share launches, on the device."""
        assert self.table is not None
        addresses = (
            tensors.addresses
            if isinstance(tensors, Batch)
            else [one.grad.data_ptr() for one in tensors]
        )
        return self.table.point(self.pick(addresses), _capturing(self.table.device))


def launches(
    tensors: Sequence[Any],
    sort: Callable[[Sequence[Any]], tuple[Mapping[Any, list[Member]], list[int]]],
) -> Launches:
    """The launches of a step, as kept from the last one where tensors are where they were.

    Args:
        tensors: all on one device, not empty.
        sort: gives the tensors that share launches, and positions of the others.
    """
    kept = tensors.kept if isinstance(tensors, Batch) else {}
    found: Launches | None = kept.get("launches")
    if found is not None and found.table is None:
        return found
    device = (tensors.params[0] if isinstance(tensors, Batch) else tensors[0].param).device
    stream = _current_stream(device.index) if device.type == "cuda" else 0  # type: ignore[misc]
    if found is not None and _usable(found.table, stream, device):
        addresses = found.pick(tensors.addresses)  # type: ignore[attr-defined]
        aligned = functools.reduce(operator.or_, addresses) % ALIGNMENT == 0
        if aligned or found.offsets == [address % ALIGNMENT for address in addresses]:
            return found
    kinds, single = sort(tensors)
    found = kept["launches"] = _build(kinds, single, device, stream, tensors)
    return found


def _build(
    kinds: Mapping[Any, list[Member]],
    single: list[int],
    device: torch.device,
    stream: int,
    tensors: Sequence[Any],
) -> Launches:
    order = [member.position for many in kinds.values() for member in many]
    if not order:
        return Launches([], None, order, tuple, single, [])
    pick: Callable[[Sequence[int]], tuple[int, ...]] = tuple
    if order != list(range(len(tensors))):
        first, *more = order
        pick = operator.itemgetter(*order) if more else lambda column: (column[first],)
    rows = (x for many in kinds.values() for member in many for x in (member.tiles, *member.row))
    counted = tensors[0].step_count is not None
    key = (device, counted, *((kind, len(many)) for kind, many in kinds.items()), *rows)
    table = _tables.get(key)
    if table is None or not _usable(table, stream, device):
        table = _tables[key] = Table(kinds, device, stream, counted)
        if len(_tables) > _KEPT:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    offsets = [tensors[i].grad.data_ptr() % ALIGNMENT for i in order]
    return Launches(list(kinds), table, order, pick, single, offsets)


def _usable(table: Table | None, stream: int, device: torch.device) -> bool:
    """Whether work of this stream comes after the table's way to the device; that of a graph's
    replay always does.
    """
    return table is not None and (table.stream == stream or _capturing(device))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and _is_capturing is not None and _is_capturing()
