"""Device functions for tensors that are saved by groups: codes of four formats, with a scale every
G columns.

S is a :class:`~coat_dist.kernels.fp8.Format` with ``e8m0``, from :func:`saved_as` or
:func:`unpack`; its mantissa bits tell formats apart. They follow ``reference/quantize.py`` to the
bit, but for codes of groups whose scale is NaN, which mean nothing. What Triton has no conversion
for is converted by instructions that take four numbers at a time: Triton would make several times
as many of the plain arithmetic beside them, which the interpreter runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor, format_of
from .fp8 import INF_BITS, NAN_BITS, Format, constants, from_fp8, magnitude_bits, scale_of, to_fp8

E3M4_BITS = tl.constexpr(4)  # of mantissa
INT8_BITS = tl.constexpr(7)


def saved_as(fmt: FP8Format, scale: str, tensor: torch.Tensor) -> Format:
    """S for codes of ``fmt`` with scales of the kind ``scale``, on the device of ``tensor``."""
    return constants(fmt, tensor, scale == "e8m0")


def unpack(
    x: torch.Tensor | QuantizedTensor,
) -> tuple[torch.Tensor, torch.Tensor | None, int, Format | None]:
    """What kernels take of a tensor that may be quantized by groups: values or codes, stored
    scales, G and S; of plain values, which have no scales, 0 and None.
    """
    if not isinstance(x, QuantizedTensor):
        return x, None, 0, None
    return (
        x.codes,
        x.scales,
        x.group_size,
        constants(format_of(x.codes.dtype), x.codes, x.scales.dtype == torch.uint8),
    )


@triton.jit
def _e3m4(y, FAST: tl.constexpr):
    """Codes of E3M4 of numbers that are 2**-12 times what they stand for: in fp16, which then has
    its normal and its subnormal numbers, the upper bits rounded to nearest even.
    """
    if FAST:
        out = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t;
            cvt.rn.f16x2.f32 a, $2, $1;
            cvt.rn.f16x2.f32 b, $4, $3;
            shr.u32 s, a, 6;
            shr.u32 t, b, 6;
            and.b32 s, s, 0x10001;
            and.b32 t, t, 0x10001;
            add.u32 a, a, 0x1F001F;
            add.u32 b, b, 0x1F001F;
            add.u32 a, a, s;
            add.u32 b, b, t;
            shr.u32 s, a, 6;
            shr.u32 t, b, 6;
            shr.u32 a, a, 8;
            shr.u32 b, b, 8;
            lop3.b32 a, a, s, 0x7F007F, 0xD8;
            lop3.b32 b, b, t, 0x7F007F, 0xD8;
            prmt.b32 $0, a, b, 0x6420;
            }""",
            "=r,r,r,r,r",
            [y],
            tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        bits = y.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        bits += 0x1F + ((bits >> 6) & 1)
        out = (((bits >> 8) & 0x80) | ((bits >> 6) & 0x7F)).to(tl.uint8)
    return out


@triton.jit
def _int8(y, FAST: tl.constexpr):
    """Nearest integers, ties to even: 1.5 * 2**23 on top leaves them in a number's low bits, in
    two's complement.
    """
    # add.rn, as an addition without a rounding mode may be fused with the product before it.
    if FAST:
        out = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            add.rn.f32 a, $1, 0f4B400000;
            add.rn.f32 b, $2, 0f4B400000;
            add.rn.f32 c, $3, 0f4B400000;
            add.rn.f32 d, $4, 0f4B400000;
            prmt.b32 a, a, b, 0x40;
            prmt.b32 c, c, d, 0x40;
            prmt.b32 $0, a, c, 0x5410;
            }""",
            "=r,r,r,r,r",
            [y],
            tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        out = ((y + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)
    return out


@triton.jit
def _from_int8(codes, FAST: tl.constexpr):
    """fp32 of int8: as the low byte of 2**23 it needs no conversion, of which a GPU does few at
    a time.
    """
    if FAST:
        out = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x4B000000, 0x7650;
            prmt.b32 $1, t, 0x4B000000, 0x7651;
            prmt.b32 $2, t, 0x4B000000, 0x7652;
            prmt.b32 $3, t, 0x4B000000, 0x7653;
            sub.rn.f32 $0, $0, 0f4B000080;
            sub.rn.f32 $1, $1, 0f4B000080;
            sub.rn.f32 $2, $2, 0f4B000080;
            sub.rn.f32 $3, $3, 0f4B000080;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        out = codes.to(tl.float32)
    return out


@triton.jit
def group_encode(x, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Quantize a tile [BM, BN] with one scale per G columns: codes [BM, BN] and stored scales
    [BM, BN / G].
    """
    groups = tl.reshape(x, (BM, BN // G, G))
    top = tl.max(magnitude_bits(groups), 2)
    if S.e8m0:
        finite = top < INF_BITS
        exponent = tl.maximum(((tl.where(finite, top, 0) + S.carry) >> 23) - S.power, 1)
        inverse = tl.where(finite, (254 - exponent) << 23, NAN_BITS).to(tl.float32, bitcast=True)
        stored = tl.where(finite, exponent, 255).to(tl.uint8)
    else:
        scale, inverse = scale_of(top, 16, S)
        stored = scale.to(tl.bfloat16)
    if S.mantissa_bits == E3M4_BITS:
        codes = _e3m4(groups * (inverse * 2.0**-12)[:, :, None], S.fast)
    elif S.mantissa_bits == INT8_BITS:
        codes = _int8(groups * inverse[:, :, None], S.fast)
    else:
        codes = to_fp8(groups * inverse[:, :, None], S)
    return tl.reshape(codes, (BM, BN)), stored


@triton.jit
def group_decode(
    codes, stored, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, S: tl.constexpr
):
    """Values of a tile of codes [BM, BN] with stored scales [BM, BN / G]."""
    if S.e8m0:
        bits = stored.to(tl.int32)
        scale = tl.where(bits == 255, NAN_BITS, tl.where(bits == 0, 0x400000, bits << 23)).to(
            tl.float32, bitcast=True
        )
    else:
        scale = stored.to(tl.float32)
    # The bits of fp32, but for the exponent's bias, which is 124 less.
    if S.mantissa_bits == E3M4_BITS:
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 19) & -0x7C080000
        values = bits.to(tl.float32, bitcast=True) * 2.0**124
    elif S.mantissa_bits == INT8_BITS:
        values = _from_int8(codes, S.fast)
    else:
        values = from_fp8(codes)
    return tl.reshape(tl.reshape(values, (BM, BN // G, G)) * scale[:, :, None], (BM, BN))


@triton.jit
def place(row, tile, rows, columns, groups, BN: tl.constexpr, G: tl.constexpr):
    """Where a tile of BN columns lies in a tensor [rows, columns]: its rows, columns and groups,
    which elements and which groups there are, and the sizes of a row. ``tile`` counts along a row;
    ``rows`` is None where all rows are there.
    """
    return place_from(
        row, tile * BN, tile * (BN // max(G, 1)), rows, columns, groups, BN, BN // max(G, 1)
    )


@triton.jit
def place_from(row, first, first_group, rows, columns, groups, BN: tl.constexpr, BG: tl.constexpr):
    """:func:`place` of a tile by its first column and its first group, of BG: a loop over a row
    counts in columns, since a product in each turn costs registers.
    """
    column = (first + tl.arange(0, BN))[None, :]
    group = (first_group + tl.arange(0, BG))[None, :]
    if rows is None:
        inside = column < columns
        in_group = group < groups
    else:
        inside = (row < rows) & (column < columns)
        in_group = (row < rows) & (group < groups)
    return row, column, group, inside, in_group, columns, groups


@triton.jit
def load_tile(
    x,
    scales,
    row,
    column,
    group,
    inside,
    in_group,
    columns,
    groups,
    BM: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
):
    """A tile of a tensor [rows, columns] as fp32, from plain values (G = 0) or from codes of G
    columns a scale.
    """
    value, stored = load_raw(x, scales, row, column, group, inside, in_group, columns, groups, G)
    return decode_raw(value, stored, BM, BN, G, S)


@triton.jit
def load_raw(x, scales, row, column, group, inside, in_group, columns, groups, G: tl.constexpr):
    """What :func:`load_tile` reads, for :func:`decode_raw`."""
    value = tl.load(x + row * columns + column, mask=inside, other=0.0)
    stored = value if G == 0 else tl.load(scales + row * groups + group, mask=in_group, other=0)
    return value, stored


@triton.jit
def decode_raw(value, stored, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    out = value.to(tl.float32) if G == 0 else group_decode(value, stored, BM, BN, G, S)
    return out


def room(
    shape: tuple[int, ...], fmt: FP8Format, group_size: int, scale: str, device: torch.device
) -> QuantizedTensor:
    """Uninitialized codes and scales of a tensor ``[..., n]``."""
    groups = -(-shape[-1] // group_size)
    codes = torch.empty(shape, dtype=fmt.dtype, device=device)
    stored = torch.uint8 if scale == "e8m0" else torch.bfloat16
    return QuantizedTensor(
        codes, torch.empty(*shape[:-1], groups, dtype=stored, device=device), "group", group_size
    )
