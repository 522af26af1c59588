"""Master weights of bfloat16 parameters and their remainders, inside a kernel: ``reference/master.py``, on tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import NAN_BITS

__all__ = ["join", "split"]


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
