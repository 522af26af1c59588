"""Activations of MLPs by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from coat_dist.reference.activation import ACTIVATIONS

TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "quick_gelu": lambda g: g * torch.sigmoid(1.702 * g),
    "squared_relu": lambda g: F.relu(g).square(),
}


def torch_activation(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """An activation of the gate and of what it multiplies, or of one tensor alone."""
    act = ACTIVATIONS[name]
    value = TORCH[act.function](parts[0].clamp(max=act.limit))
    return value * (parts[1].clamp(-act.limit, act.limit) + act.offset) if act.gated else value


def split(pre: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
    """The gate and what it multiplies, or one tensor alone, of what fc1 writes."""
    act = ACTIVATIONS[name]
    return (pre[..., ::2], pre[..., 1::2]) if act.interleaved else pre.chunk(act.parts, -1)


def joined(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """What fc1 writes, of its parts."""
    if ACTIVATIONS[name].interleaved:
        return torch.stack(tuple(parts), -1).flatten(-2)
    return torch.cat(tuple(parts), -1)
