"""Master weights of bfloat16 parameters and their remainders, inside a kernel:
``reference/master.py``, on tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import NAN_BITS


@triton.jit
def join(p, low):
    """fp32 of a bfloat16 tile and an int16 tile."""
    upper = p.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    joined = (upper + low.to(tl.int32).to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
    # The pairs that no split makes are those that would turn a number into NaN.
    return tl.where(joined == joined, joined, upper.to(tl.float32, bitcast=True))


@triton.jit
def split(x):
    """The bfloat16 tile and the int16 tile of an fp32 tile."""
    bits = tl.where(x == x, x.to(tl.uint32, bitcast=True), NAN_BITS)
    upper = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return upper, bits.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def load_master(param, low, inside, LOW: tl.constexpr):
    """An fp32 tile of master weights; with LOW from bfloat16 parameters and their remainders.
    Tiles of pointers.
    """
    p = tl.load(param, mask=inside, other=0.0)
    return join(p, tl.load(low, mask=inside, other=0)) if LOW else p.to(tl.float32)


@triton.jit
def store_master(p, param, low, copy, inside, LOW: tl.constexpr, COPY: tl.constexpr):
    """Write an fp32 tile as :func:`load_master` reads it; with COPY also to ``copy``, in that
    one's type.
    """
    if COPY:
        tl.store(copy, p.to(copy.dtype.element_ty), mask=inside)
    if LOW:
        upper, rest = split(p)
        tl.store(param, upper, mask=inside)
        tl.store(low, rest, mask=inside)
    else:
        tl.store(param, p.to(param.dtype.element_ty), mask=inside)
