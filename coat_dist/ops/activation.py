"""Activations around quantized tensors; the definitions are in ``reference/activation.py``."""

from ..reference import activation as reference
from ..reference.activation import (
    ACTIVATIONS,
    Activation,
    ActivationForward,
    ActivationGradients,
    ActivationRows,
    activation_apply,
    check_activation,
)
from .dispatch import operation

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ActivationForward",
    "ActivationGradients",
    "ActivationRows",
    "activation_apply",
    "activation_backward",
    "activation_compress",
    "activation_compress_rows",
    "activation_grad_amax",
    "activation_quantize",
    "check_activation",
]

activation_backward = operation(reference.activation_backward)
activation_compress = operation(reference.activation_compress)
activation_compress_rows = operation(reference.activation_compress_rows)
activation_grad_amax = operation(reference.activation_grad_amax)
activation_quantize = operation(reference.activation_quantize)
