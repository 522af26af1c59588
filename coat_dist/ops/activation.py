"""Gated activations around quantized tensors; the definitions are in ``reference/activation.py``."""

from ..reference.activation import (
    ACTIVATIONS,
    ActivationForward,
    ActivationGradients,
    activation_backward,
    activation_compress,
    activation_grad_amax,
    activation_quantize,
    check_activation,
)

__all__ = [
    "ACTIVATIONS",
    "ActivationForward",
    "ActivationGradients",
    "activation_backward",
    "activation_compress",
    "activation_grad_amax",
    "activation_quantize",
    "check_activation",
]
