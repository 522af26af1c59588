"""Activations of MLPs by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from coat_dist.reference.activation import ACTIVATIONS

__all__ = ["TORCH", "torch_activation"]

TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "quick_gelu": lambda g: g * torch.sigmoid(1.702 * g),
    "squared_relu": lambda g: F.relu(g).square(),
}


def torch_activation(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """An activation of the gate and of what it multiplies, or of one tensor alone."""
    value = TORCH[ACTIVATIONS[name].function](parts[0])
    return value * parts[1] if ACTIVATIONS[name].gated else value
