"""8-bit formats and the one quantized-tensor type of the project.

A quantized tensor is codes plus scales: ``value = code * scale``. What the scale covers is its
*layout*:

==========  =====================================================  ==============================
layout      one scale per                                          used for
==========  =====================================================  ==============================
"tensor"    whole tensor                                           GEMM operands
"row"       row of the last dimension                              GEMM operands, row-wise option
"group"     ``group_size`` consecutive elements of the last dim    tensors saved for backward
==========  =====================================================  ==============================

Optimizer moments are not of this type: their decoding is not linear (``reference/moments.py``).
Here are only the names of their formats; what a name means is a class in
``reference/moment_formats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FirstMomentFormat = Literal["e4m3", "e5m2", "int8"]
SecondMomentFormat = Literal["e4m3", "e5m2", "log8"]
ALWAYS_EXPANDED = ("log8",)
"""Moment formats whose codes always span a group's range: ``expand=False`` means nothing for
them and is refused.
"""


@dataclass(frozen=True)
class FP8Format:
    """One 8-bit format. Source: OCP 8-bit Floating Point Specification 1.0."""

    name: str
    dtype: torch.dtype  # of its codes
    max: float  # the largest finite value F
    mantissa_bits: int  # explicit ones
    smallest: float  # the smallest positive (subnormal) value


E4M3 = FP8Format("e4m3", torch.float8_e4m3fn, 448.0, 3, 2.0**-9)
E5M2 = FP8Format("e5m2", torch.float8_e5m2, 57344.0, 2, 2.0**-16)
E3M4 = FP8Format("e3m4", torch.uint8, 31.0, 4, 2.0**-6)
"""Of tensors that are saved by groups and not multiplied: no GPU has a product of it, and torch no
dtype.

Against E4M3 a bit of exponent became one of mantissa: in a group it is twice as fine down to 1/124
of the largest value, and its smallest step is 1/1984 of that. All codes are numbers: that one is
not finite, a group's scale says.
"""
INT8 = FP8Format("int8", torch.int8, 127.0, 7, 1.0)
"""As E3M4, and in steps of 1/127 of a group's largest value: the finest where a group's values have
one size, the coarsest where one is large. With powers of two as scales it is the MXINT8 of OCP
Microscaling Formats 1.0.
"""
FORMATS = {f.name: f for f in (E4M3, E5M2, E3M4, INT8)}
"""By name, as the configuration spells it."""
_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}


def format_of(dtype: torch.dtype) -> FP8Format:
    """The format whose codes have this dtype."""
    return _BY_DTYPE[dtype]


@dataclass
class QuantizedTensor:
    """Codes and scales of one tensor.

    Attributes:
        codes: tensor of the original shape; its dtype says the format.
        scales: "tensor": fp32 scalar; "row": fp32 ``[..., 1]``; "group": ``[..., ceil(n /
            group_size)]``, either bfloat16 or uint8 holding E8M0 exponents (value ``2**(scales -
            127)``, 255 = NaN).
        layout: "tensor", "row" or "group".
        group_size: elements a scale covers along the last dimension; 0 unless ``layout ==
            "group"``.
        top: the largest of "row" ``scales`` (fp32 scalar, NaN if one is NaN), where the pass that
            wrote them found it. It is theirs alone: a tensor of other rows, gathered or cut out, or
            with other scales is made without it.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    layout: str
    group_size: int = 0
    top: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held by codes and scales."""
        return self.codes.nbytes + self.scales.nbytes
