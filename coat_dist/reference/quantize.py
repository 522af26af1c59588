"""FP8 quantization, linear: ``value = code * scale``.

Rules that every quantizer here follows:

* **Scale from amax.** With F the format's largest value, a scale is ``amax * (1 / F)`` in fp32,
  never smaller than 2**-126, so zeros need no special case and no epsilon biases small tensors.
* **Quantize with the stored scale.** Where a scale is stored in fewer bits it is rounded up first
  and then used, so that reading back multiplies by exactly what quantizing divided by and the
  largest element does not saturate.
* **One rounding.** ``code = round_to_nearest_even(clamp(x * (1 / scale), -F, F))``; product and
  reciprocal are fp32. The clamp is explicit: casts of values beyond F differ between formats,
  devices and torch versions.
* **Nothing non-finite is hidden.** An amax over infinity or NaN is +inf, which survives a MAX over
  ranks (NaN may not), and its scale is NaN: the whole group, or tensor, reads back as NaN.

Sources: COAT (arXiv 2410.19313) section 5 for per-group and per-tensor use, OCP Microscaling
Formats 1.0 for E8M0.
"""

from __future__ import annotations

import math

import torch

from ..formats import E3M4, INT8, FP8Format, QuantizedTensor

SMALLEST_SCALE = 2.0**-126
"""Smallest normal fp32: its reciprocal is finite, and hardware that flushes subnormals reads it
unchanged.
"""


def amax(x: torch.Tensor) -> torch.Tensor:
    """max|x| over everything, fp32 scalar. 0 for an empty tensor, +inf where any element is
    infinite or NaN.
    """
    return amaxes(x, None)


def amaxes(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """:func:`amax` over ``dim``, which is removed."""
    if x.numel() == 0:  # has no largest element
        return x.float().sum(dim)
    magnitude = x.abs().amax() if dim is None else x.abs().amax(dim)
    return magnitude.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def tensor_scale(amax: torch.Tensor, fmt: FP8Format, aligned: bool = False) -> torch.Tensor:
    """fp32 scale that maps ``amax`` (fp32, any shape) to the format's largest value; NaN where amax
    is not finite.

    Args:
        aligned: round it up to a power of two. Codes with such scales are the same values, whatever
            the scales, as long as these are no larger than needed and values no subnormals: tensors
            quantized by rows and as a whole agree.
    """
    scale = (amax * (1.0 / fmt.max)).clamp(min=SMALLEST_SCALE)
    scale = power_of_two(scale) if aligned else scale
    return torch.where(amax.isfinite(), scale, torch.nan)


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two not below a normal, positive fp32 scale; NaN stays NaN."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isnan(), scale, bits.view(torch.float32))


def quantize_tensor(
    x: torch.Tensor | QuantizedTensor,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
    out: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantize with one given scale; what it maps beyond F saturates, NaN stays NaN.

    Args:
        x: ``[..., n]``, any floating dtype; or quantized by rows, whose values are rounded again:
            where both scales are powers of two, only those change that become subnormal.
        scale: fp32 scalar.
        transpose: return codes ``[n, rows]`` of the tensor seen as ``[rows, n]``, contiguous: the
            layout in which FP8 GEMMs want an operand whose summed dimension is ``rows``.
        out: takes the codes: contiguous, or with ``transpose`` whole columns of a wider contiguous
            matrix.
    """
    values = dequantize(x) if isinstance(x, QuantizedTensor) else x.float()
    codes = _codes(values, scale, fmt)
    if transpose:
        codes = codes.flatten(0, -2).t().contiguous()
    return QuantizedTensor(codes if out is None else out.copy_(codes), scale, "tensor")


def quantize_both(
    x: torch.Tensor, fmt: FP8Format, scale: torch.Tensor
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """:func:`quantize_tensor` in both memory orders: codes of the shape of x ``[..., n]``, and
    ``[n, rows]``.
    """
    q = quantize_tensor(x, fmt, scale)
    return q, transpose(QuantizedTensor(q.codes.flatten(0, -2), scale, "tensor"))


def group_scales(amax: torch.Tensor, fmt: FP8Format, scale: str) -> torch.Tensor:
    """Stored scales for groups of the given amax (fp32, >= 0, any shape), rounded up.

    Args:
        scale: "e8m0": uint8, the biased exponent of the smallest power of two not below amax / F, 1
            at least, 255 where amax is not finite; "bf16": bfloat16, NaN where amax is not finite.
    """
    if scale == "e8m0":
        carry, power = carry_and_power(fmt)
        exponent = (amax.float().view(torch.int32) + carry) >> 23
        return torch.where(amax.isfinite(), (exponent - power).clamp(min=1), 255).to(torch.uint8)
    bits = (tensor_scale(amax, fmt).view(torch.int32) + 0xFFFF) & ~0xFFFF
    return torch.where(amax.isfinite(), bits.view(torch.float32), torch.nan).to(torch.bfloat16)


def carry_and_power(fmt: FP8Format) -> tuple[int, int]:
    """What E8M0 scales are found with, without a logarithm or rounding. With F = f * 2**power, amax
    / F needs the next power of two exactly where amax's significand exceeds f: where adding
    ``carry`` to its bits reaches the exponent.
    """
    significand, exponent = math.frexp(fmt.max)
    return 2**23 - 1 - int((2 * significand - 1) * 2**23), exponent - 1


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Stored scales of any kind as fp32 factors: uint8 is E8M0, everything else is itself."""
    if scales.dtype != torch.uint8:
        return scales.float()
    # Exponent 0 is 2**-127, a subnormal.
    bits = torch.where(scales == 0, 0x400000, scales.to(torch.int32) << 23)
    return torch.where(scales == 255, torch.nan, bits.view(torch.float32))


def quantize_groups(
    x: torch.Tensor, fmt: FP8Format, group_size: int, scale: str
) -> QuantizedTensor:
    """Quantize with one scale per ``group_size`` consecutive elements of the last dimension.

    Args:
        x: ``[..., n]``, any floating dtype; the last group of a row is shorter where n is no
            multiple of the group size.
        scale: kind of stored scale, see :func:`group_scales`.

    Returns:
        layout "group": codes ``[..., n]``, scales ``[..., ceil(n / group_size)]``.
    """
    n = x.shape[-1]
    filled = torch.nn.functional.pad(x.float(), (0, -n % group_size)).unflatten(
        -1, (-1, group_size)
    )
    scales = group_scales(amaxes(filled, -1), fmt, scale)
    codes = _codes(filled, scale_values(scales)[..., None], fmt).flatten(-2)[..., :n]
    return QuantizedTensor(codes.contiguous(), scales, "group", group_size)


def quantize_rows(
    x: torch.Tensor, fmt: FP8Format, aligned: bool = False, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """Quantize with one scale per row: :func:`tensor_scale` of the row's own amax.

    As that function is monotone, the largest of the row scales is the scale that the whole tensor
    would have.

    Args:
        x: ``[..., k]``, any floating dtype.
        aligned: make scales powers of two.
        out: takes codes and scales, both contiguous; its ``top``, if it has one, is raised to the
            largest of these scales.

    Returns:
        layout "row": codes ``[..., k]``, scales fp32 ``[..., 1]``, and the largest of these, unless
        there are none; a row with a non-finite value is all NaN.
    """
    q = requantize_rows(x, fmt, tensor_scale(amaxes(x, -1), fmt, aligned)[..., None])
    q.top = q.scales.amax() if q.scales.numel() else None
    if out is None:
        return q
    out.codes.copy_(q.codes)
    out.scales.copy_(q.scales)
    if out.top is None:
        out.top = q.top
    elif q.top is not None:
        out.top.copy_(torch.maximum(out.top, q.top))
    return out


def requantize_rows(x: torch.Tensor, fmt: FP8Format, scales: torch.Tensor) -> QuantizedTensor:
    """:func:`quantize_rows` with given scales, fp32 ``[..., 1]``: those that several parts of a row
    share. There is no ``top``.
    """
    return QuantizedTensor(_codes(x.float(), scales, fmt), scales, "row")


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """A 2-D per-tensor FP8 tensor in the other memory order, codes unchanged."""
    return QuantizedTensor(q.codes.t().contiguous(), q.scales, q.layout)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of a quantized tensor of any layout, in the shape of its codes; fp32 products
    rounded to ``dtype``.

    BF16 holds them exactly where scales are powers of two and values are no denormals.
    """
    scales = scale_values(q.scales)
    if q.layout == "group":
        scales = scales.repeat_interleave(q.group_size, dim=-1)[..., : q.codes.shape[-1]]
    return (code_values(q.codes) * scales).to(dtype)


def code_values(codes: torch.Tensor) -> torch.Tensor:
    """What codes of any format stand for, fp32."""
    if codes.dtype != E3M4.dtype:
        return codes.float()
    # The bits of fp32, but for the exponent's bias, which is 124 less.
    bits = codes.view(torch.int8).to(torch.int32) << 19 & -0x7C080000
    return bits.view(torch.float32) * 2.0**124


def _codes(x: torch.Tensor, scale: torch.Tensor, fmt: FP8Format) -> torch.Tensor:
    if fmt.dtype == E3M4.dtype:
        largest = fmt.max * 2.0**-12
        return _e3m4((x * (scale.reciprocal() * 2.0**-12)).clamp(-largest, largest))
    x = (x * scale.reciprocal()).clamp(-fmt.max, fmt.max)
    return (x.nan_to_num().round() if fmt.dtype == INT8.dtype else x).to(fmt.dtype)


def _e3m4(x: torch.Tensor) -> torch.Tensor:
    """Codes of fp32 values, times 2**-12, of at most E3M4's largest; of NaN any.

    fp16 has E3M4's normal and subnormal numbers as its own, times 2**-12: its upper bits are
    rounded to nearest even. So kernels take two numbers at a time. Numbers of more bits than fp16
    has are rounded twice, those of BF16 once, but for some below 2**-5.
    """
    bits = x.half().view(torch.int16).to(torch.int32)
    bits = bits + 0x1F + (bits >> 6 & 1)
    return (bits >> 8 & 0x80 | bits >> 6 & 0x7F).to(torch.uint8)
