"""RMSNorm and LayerNorm around quantized tensors; the definitions are in ``reference/norm.py``."""

from ..reference import norm as reference
from ..reference.norm import NormForward, NormRows, NormStats, norm_apply
from .dispatch import operation

__all__ = [
    "NormForward",
    "NormRows",
    "NormStats",
    "norm_apply",
    "norm_backward",
    "norm_compress",
    "norm_compress_rows",
    "norm_forward",
    "norm_quantize",
]

norm_backward = operation(reference.norm_backward)
norm_compress = operation(reference.norm_compress)
norm_compress_rows = operation(reference.norm_compress_rows)
norm_forward = operation(reference.norm_forward)
norm_quantize = operation(reference.norm_quantize)
