"""Inline PTX of a device function, run on the CPU: the few instructions that ``coat_dist/kernels/groups.py`` uses.

A device function is called as plain Python with tensors, and ``tl.inline_asm_elementwise`` in it takes the lines here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton.language as tl

WORD = 0xFFFFFFFF


def call(function: Any, x: torch.Tensor) -> torch.Tensor:
    """``function(x, FAST=True)`` of a device function with inline PTX, elements four at a time."""
    with mock.patch.object(tl, "inline_asm_elementwise", _run):
        return function.fn(x, FAST=True)


_TYPES = {tl.uint8: torch.uint8, tl.int8: torch.int8, tl.float32: torch.float32}


def _run(asm: str, constraints: str, args: list[torch.Tensor], dtype: Any, is_pure: bool, pack: int) -> torch.Tensor:
    (given,) = args
    made = constraints.count("=r")
    words = _words(given.reshape(-1, pack), pack)
    assert is_pure and len(constraints.split(",")) == made + len(words), constraints
    registers = {f"${made + i}": word for i, word in enumerate(words)}
    for line in re.sub(r"\.reg [^;]*;", "", asm).strip("{}\n ").split(";"):
        if line := line.strip():
            operation, _, operands = line.partition(" ")
            target, *sources = (o.strip() for o in operands.split(","))
            registers[target] = OPERATIONS[operation](*(_value(s, registers) for s in sources)) & WORD
    out = _TYPES[dtype]
    results = torch.stack([registers[f"${i}"] for i in range(made)], -1).to(torch.uint32)
    return results.contiguous().view(out).reshape(given.shape)


def _words(x: torch.Tensor, pack: int) -> list[torch.Tensor]:
    """What the registers of each packet of elements hold, as int64 from 0 on."""
    packed = x.contiguous().view(torch.int32).view(len(x), -1)
    assert packed.shape[1] == pack * x.dtype.itemsize // 4
    return [column.to(torch.int64) & WORD for column in packed.unbind(1)]


def _value(source: str, registers: dict[str, torch.Tensor]) -> Any:
    if source.startswith("0f"):
        return torch.tensor(int(source[2:], 16))
    return registers[source] if source in registers else int(source, 0)


def _float(word: torch.Tensor) -> torch.Tensor:
    return word.to(torch.uint32).view(torch.float32)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).to(torch.int64)


def _half(word: torch.Tensor) -> torch.Tensor:
    x = _float(word)
    return torch.where(x.isnan(), 0x7FFF, x.half().view(torch.int16).to(torch.int64) & 0xFFFF)


def _select(a: Any, b: Any, selector: int) -> Any:
    """``prmt``: each digit of the selector says which of eight bytes, a's and then b's."""
    out = 0
    for i in range(4):
        n = selector >> (4 * i) & 0xF
        assert n < 8, "a digit from 8 copies a sign"
        out = out | ((b >> (8 * (n - 4)) if n > 3 else a >> (8 * n)) & 0xFF) << (8 * i)
    return out


def _any_logic(a: Any, b: Any, c: Any, table: int) -> Any:
    """``lop3``: bit ``4 a + 2 b + c`` of the table."""
    out = 0
    for i in (i for i in range(8) if table >> i & 1):
        out = out | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "cvt.rn.f16x2.f32": lambda high, low: _half(high) << 16 | _half(low),
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "lop3.b32": _any_logic,
    "prmt.b32": _select,
    "add.rn.f32": lambda a, b: _bits(_float(a) + _float(b)),
    "sub.rn.f32": lambda a, b: _bits(_float(a) - _float(b)),
}
