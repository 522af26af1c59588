"""FP8 quantization of activations, weights and gradients; the definitions are in ``reference/quantize.py``."""

from ..reference import quantize as reference
from ..reference.quantize import SMALLEST_SCALE, power_of_two, requantize_rows
from .dispatch import operation

__all__ = [
    "SMALLEST_SCALE",
    "amax",
    "dequantize",
    "power_of_two",
    "quantize_both",
    "quantize_groups",
    "quantize_rows",
    "quantize_tensor",
    "requantize_rows",
    "tensor_scale",
    "transpose",
]

amax = operation(reference.amax)
dequantize = operation(reference.dequantize)
quantize_both = operation(reference.quantize_both)
quantize_groups = operation(reference.quantize_groups)
quantize_rows = operation(reference.quantize_rows)
tensor_scale = operation(reference.tensor_scale)
quantize_tensor = operation(reference.quantize_tensor)
transpose = operation(reference.transpose)
