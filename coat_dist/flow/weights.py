"""Weights of the FP8 products: quantized for forward, transposed for dgrad, and their gradient.

Every autograd function of the flow handles a weight through one :class:`Weight`, made in forward and kept in its
context: ``quantized()`` for the forward product, ``transposed()`` for dgrad, ``gradient()`` for wgrad.
"""

from __future__ import annotations

import torch

from ..config import ActivationConfig
from ..formats import QuantizedTensor, fp8_format
from ..ops.quantize import quantize_tensor
from .scaling import TensorParallel, gemm, quantize_input

__all__ = ["Weight"]


class Weight:
    """One weight shard ``[out, in]`` in one call of an autograd function.

    Holds the parameter itself, not what ``saved_tensors`` returns for it: under checkpointing and offloading that is
    another tensor, without the attributes of the parameter. Its values are read from the saved one.
    """

    def __init__(self, parameter: torch.Tensor, tp: TensorParallel, settings: ActivationConfig) -> None:
        self.parameter = parameter
        self.tp = tp
        self.settings = settings

    def quantized(self) -> QuantizedTensor:
        """In per-tensor FP8, codes ``[out, in]``. Its scale is to be saved for :meth:`transposed`."""
        return quantize_input(self.parameter, self.tp, self.settings)

    def transposed(self, weight: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """The same codes as ``[in, out]``.

        Args:
            weight, scale: the parameter and forward's scale as ``saved_tensors`` returns them.
        """
        return quantize_tensor(weight, fp8_format(self.settings.format), scale, transpose=True)

    def gradient(self, d8_t: QuantizedTensor, x8_t: QuantizedTensor) -> torch.Tensor | None:
        """wgrad, ``[out, in]``, in the parameter's dtype.

        Args:
            d8_t: gradient of the product's output, ``[out, rows]``.
            x8_t: input of the product, ``[in, rows]``.
        """
        return gemm(d8_t, x8_t, self.parameter.dtype, self.settings)
