"""Device functions that the kernels of the flow share: scales, codes, and the amax of a tensor.

They follow ``reference/quantize.py`` to the bit. Magnitudes are compared as integers: no reduction
loses a NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..devices import has_fp8
from ..formats import E3M4, E4M3, E5M2, INT8, FP8Format
from ..reference.quantize import carry_and_power
from .launch import cdiv, next_power_of_2

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
# Smallest normal fp32, to the bit; a smaller literal would turn a kernel to fp64.
TINY = tl.constexpr(2.0**-126)


class Format(NamedTuple):
    """An FP8 format as compile-time constants. ``lowest`` is the biased fp32 exponent of its
    smallest normal number; ``carry`` and ``power`` are of
    :func:`~coat_dist.reference.quantize.carry_and_power`. ``native``: numbers become codes by
    instructions, otherwise by :func:`code_bits`, as in the interpreter, whose own conversion does
    not round to nearest. ``fast``: the GPU's approximations may be used; not in the interpreter.
    ``fp8`` is what codes are made of: bytes for E4M3 where a GPU has no FP8 instructions, as Triton
    has no E4M3 there, and for what Triton does not know. ``e8m0``: of tensors saved by groups,
    whether scales are powers of two.
    """

    fp8: tl.dtype
    max: float
    inverse_max: float
    mantissa_bits: int
    lowest: int
    power: int
    carry: int
    fast: bool
    native: bool
    e8m0: bool = False


def _constants(fmt: FP8Format, fp8: tl.dtype, fast: bool, native: bool) -> Format:
    carry, power = carry_and_power(fmt)
    lowest = 126 + math.frexp(fmt.smallest)[1] + fmt.mantissa_bits
    return Format(
        fp8, fmt.max, 1.0 / fmt.max, fmt.mantissa_bits, lowest, power, carry, fast, native
    )


_CONSTANTS = {
    (fmt.name, fast, native): _constants(fmt, fp8, fast, native and fmt in (E4M3, E5M2))
    for fast, native, e4m3 in (
        (False, False, tl.float8e4nv),
        (True, False, tl.uint8),
        (True, True, tl.float8e4nv),
    )
    for fmt, fp8 in ((E4M3, e4m3), (E5M2, tl.float8e5), (E3M4, tl.uint8), (INT8, tl.int8))
}
_BY_GROUPS = {key: value._replace(e8m0=True) for key, value in _CONSTANTS.items()}


def constants(fmt: FP8Format, tensor: torch.Tensor, e8m0: bool = False) -> Format:
    """Those of kernels on the device of ``tensor``."""
    return (_BY_GROUPS if e8m0 else _CONSTANTS)[fmt.name, tensor.is_cuda, has_fp8(tensor)]


@triton.jit
def with_sign(x, of):
    """x >= 0 with the signs of ``of``, both fp32."""
    bits = x.to(tl.int32, bitcast=True) | (of.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def code_bits(y, C: tl.constexpr):
    """:func:`to_fp8` without instructions for it: codes of an fp32 tile as int32.

    The number's exponent, or that of the smallest normal code if it is above, says how far apart
    codes are around it. Adding 2**23 such steps has the adder round the number to steps and leaves
    their count in the sum's low bits.
    """
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = tl.minimum(magnitude, tl.full((), C.max, tl.float32).to(tl.int32, bitcast=True))
    exponent = tl.maximum(size & 0x7F800000, C.lowest << 23)
    offset = exponent + ((23 - C.mantissa_bits) << 23)
    total = size.to(tl.float32, bitcast=True) + offset.to(tl.float32, bitcast=True)
    code = total.to(tl.int32, bitcast=True) - offset  # steps; codes below the exponent come on top
    code += (exponent >> (23 - C.mantissa_bits)) - (C.lowest << C.mantissa_bits)
    return tl.where(magnitude > INF_BITS, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def to_fp8(y, C: tl.constexpr):
    """Nearest code, ties to even, saturating; NaN stays NaN (0x7F)."""
    return y.to(C.fp8) if C.native else code_bits(y, C).to(tl.uint8).to(C.fp8, bitcast=True)


@triton.jit
def from_fp8(codes):
    """fp32 values of a tile of codes, which are made of what :class:`Format` says."""
    # The bits of fp32, but for the exponent's bias, which differs by 120.
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)
        value = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
        value = (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(
            tl.float32, bitcast=True
        )
    else:
        value = codes.to(tl.float32)
    return value


@triton.jit
def _pair(low, high, C: tl.constexpr):
    """Codes of two tiles of numbers as one int32, ``low``'s in the low byte."""
    if not C.native:
        out = code_bits(low, C) | (code_bits(high, C) << 8)
    elif C.mantissa_bits == 3:
        out = tl.inline_asm_elementwise(
            "{.reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t;}",
            "=r,f,f",
            [low, high],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        out = tl.inline_asm_elementwise(
            "{.reg .b16 t; cvt.rn.satfinite.e5m2x2.f32 t, $2, $1; cvt.u32.u16 $0, t;}",
            "=r,f,f",
            [low, high],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    return out


@triton.jit
def pack_rows(packed, last, y, i: tl.constexpr, PACK: tl.constexpr, C: tl.constexpr):
    """Add the codes of y, row i of each packet of PACK rows, to ``packed`` (int32); ``last`` is row
    i - 1.

    Rows are converted straight into words. On an H200 with Triton 3.6 a tile of converted bytes
    that is both stored and widened to words came out wrong, in a quarter of its elements; so bytes
    are never widened here.
    """
    if PACK == 1:
        packed = _pair(y, y, C) & 0xFF
    elif i % 2 == 1:
        packed |= _pair(last, y, C) << (8 * i - 8)
    return packed


@triton.jit
def magnitude_bits(x):
    """|x| as int32, in the order of magnitudes, with NaN above infinity."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def atomic_amax(out, bits):
    """Raise the fp32 amax that ``out`` points to, as an integer, to the largest of a tile's
    :func:`magnitude_bits`; infinity for NaN.

    All tiles raise one word, and the memory system serves its atomics one by one, so a tile looks
    first: what it reads may be old, and is then too small, which costs an atomic and no more.
    """
    out = out.to(tl.pointer_type(tl.int32), bitcast=True)
    top = tl.minimum(tl.max(bits.reshape(bits.numel), 0), INF_BITS)
    tl.atomic_max(out, top, mask=top > tl.load(out))


@triton.jit
def atomic_top(out, scale, seen):
    """Raise the largest fp32 scale, which ``out`` points to, to ``scale``, a tile of one; NaN, as
    :func:`scale_of` writes it, is above all. ``seen`` is what ``out`` held: looked up before the
    row is reduced, it costs no waiting.
    """
    bits = tl.max(scale.to(tl.int32, bitcast=True), 0)
    raises = bits > seen.to(tl.int32, bitcast=True)
    # Nobody reads it before the kernel has ended, so no other memory traffic has to be ordered
    # around it.
    tl.atomic_max(out.to(tl.pointer_type(tl.int32), bitcast=True), bits, mask=raises, sem="relaxed")


@triton.jit
def inverse(scale):
    """The reciprocal, correctly rounded, of the fp32 number that ``scale`` points to, as a [1,
    1] tile.
    """
    return tl.div_rn(
        tl.full((1, 1), 1.0, tl.float32), tl.load(scale) + tl.zeros((1, 1), tl.float32)
    )


@triton.jit
def scale_of(top, DROP: tl.constexpr, C: tl.constexpr):
    """fp32 scale of the largest magnitude (bits), and its reciprocal, correctly rounded; NaN where
    that magnitude is not finite. The last DROP bits are rounded up to zero: 16 leaves bfloat16, 23
    a power of two.
    """
    finite = top < INF_BITS
    amax = tl.where(finite, top, 0).to(tl.float32, bitcast=True)
    bits = tl.maximum(amax * C.inverse_max, TINY).to(tl.int32, bitcast=True)
    bits = (bits + ((1 << DROP) - 1)) & -(1 << DROP)
    scale = tl.where(finite, bits, NAN_BITS).to(tl.float32, bitcast=True)
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def store_turned(out, codes, row, column, rows, inside):
    """Store a tile transposed into ``out`` [columns, rows]."""
    at = tl.trans(column).to(tl.int64) * rows + tl.trans(row)
    tl.store(out + at, tl.trans(codes).to(out.dtype.element_ty), mask=tl.trans(inside))


def row_tiles(
    columns: int, elements: int, most: int, group_size: int = 1
) -> tuple[int, int, bool, int]:
    """How a program takes one row: columns of a tile, tiles that stay in its registers, whether the
    row is longer than these, and warps. A thread has ``elements`` of a tile; longer rows get more
    warps, then tiles up to ``most``.
    """
    warps = 4
    while warps < 16 and 32 * warps * elements * most < columns:
        warps *= 2
    width = max(min(32 * warps * elements, next_power_of_2(columns)), group_size)
    tiles = cdiv(columns, width)
    return width, min(tiles, most), tiles > most, warps


_SLOTS = 256
_zeros: dict[tuple[int, int], list[torch.Tensor]] = {}


def amax_buffer(device: torch.device) -> torch.Tensor:
    """Where kernels collect an amax or the largest scale: an fp32 scalar, zero, never handed out
    before.

    On a GPU it is cut from a buffer that was zeroed on the same stream, as a launch to zero one
    word takes as long as that of a kernel. In a CUDA graph each replay has to zero it anew, so
    there it is a tensor of its own. Streams are told apart by their handles: torch's own are never
    destroyed, so no handle comes back for another one. Each scalar has a version counter of its
    own: one that autograd saves does not notice writes to others.
    """
    if (
        device.type != "cuda"
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
    ):
        return torch.zeros((), dtype=torch.float32, device=device)
    zeros = _zeros.setdefault((device.index, torch._C._cuda_getCurrentRawStream(device.index)), [])
    try:
        return zeros.pop()  # one operation, so that no two threads get the same
    except IndexError:
        with torch.inference_mode(False), torch.no_grad():
            # 16 bytes apart: kernels are compiled for that alignment
            fresh = torch.zeros(_SLOTS, 4, dtype=torch.float32, device=device)[:, 0]
            # Not the fake one of a tracer, which must not outlive it.
            if type(fresh) is torch.Tensor:
                zeros.extend(word.data for word in fresh[1:].unbind())
            return fresh[0].data


def dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A norm's weight or a bias as kernels read it, element after element."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()
