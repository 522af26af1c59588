"""FP8 quantization of activations, weights and gradients; the definitions are in ``reference/quantize.py``."""

from ..reference.quantize import amax, dequantize, quantize_groups, quantize_tensor, tensor_scale

__all__ = ["amax", "dequantize", "quantize_groups", "quantize_tensor", "tensor_scale"]
