"""Gated activations around quantized tensors: ``a = act(gate) * up``.

``gate_up`` is what fc1 writes, ``[..., 2 f]``: the gates, then the ups. Its FP8 form keeps the two apart, codes
``[..., 2, f]``, so that no group spans both. All arithmetic is fp32.

Forward and backward take two passes each, because a per-tensor scale is known only when the whole tensor has been seen:
one pass for the amax, one that writes codes. Backward's second pass also writes ``a`` again, transposed, for wgrad, so
that nothing of size f is kept but gate and up in FP8 (COAT section 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..formats import FP8Format, QuantizedTensor
from .quantize import amax, dequantize, quantize_groups, quantize_tensor

__all__ = [
    "ACTIVATIONS",
    "ActivationForward",
    "ActivationGradients",
    "activation_apply",
    "activation_backward",
    "activation_compress",
    "activation_grad_amax",
    "activation_quantize",
    "check_activation",
]


class ActivationForward(NamedTuple):
    """What the first pass finds: gate and up in per-group FP8 and the amax of a (fp32 scalar)."""

    gate_up8: QuantizedTensor
    amax: torch.Tensor


class ActivationGradients(NamedTuple):
    """What backward's second pass writes, per-tensor FP8: ``d8`` ``[rows, 2 f]`` is the gradient of gate_up, ``d8_t``
    ``[2 f, rows]`` the same codes transposed, ``a8_t`` ``[f, rows]`` the activation again, transposed."""

    d8: QuantizedTensor
    d8_t: QuantizedTensor
    a8_t: QuantizedTensor


def _silu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.sigmoid(g)
    return g * s, s * (1.0 + g * (1.0 - s))


def _gelu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cdf = 0.5 * (1.0 + torch.erf(g * math.sqrt(0.5)))
    return g * cdf, cdf + g * torch.exp(-0.5 * g * g) * (1.0 / math.sqrt(2.0 * math.pi))


def _gelu_tanh(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    c, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = torch.tanh(c * g * (1.0 + cubic * g * g))
    slope = c * (1.0 + 3.0 * cubic * g * g)
    return 0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * slope


ACTIVATIONS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "swiglu": _silu,
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
}
"""Name -> function of the gate (fp32) that returns its value and its derivative. "geglu" is the exact GELU (erf)."""


def check_activation(name: str) -> None:
    """Raises ValueError, naming what is accepted, unless ``name`` is a gated activation known here."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}, accepted: {', '.join(map(repr, ACTIVATIONS))}")


def activation_apply(gate_up: torch.Tensor | QuantizedTensor, activation: str) -> torch.Tensor:
    """a, fp32 ``[..., f]``, from gate_up in either form."""
    gate, up = _gate_and_up(gate_up)
    return ACTIVATIONS[activation](gate)[0] * up


def activation_compress(
    gate_up: torch.Tensor, activation: str, fmt: FP8Format, group_size: int, scale: str, exact: bool
) -> ActivationForward:
    """First pass over gate_up ``[..., 2 f]``; ``exact``: amax of a from gate_up, otherwise from its FP8 values."""
    gate_up8 = quantize_groups(gate_up.unflatten(-1, (2, -1)), fmt, group_size, scale)
    return ActivationForward(gate_up8, amax(activation_apply(gate_up if exact else gate_up8, activation)))


def activation_quantize(
    gate_up: torch.Tensor | QuantizedTensor,
    activation: str,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
) -> QuantizedTensor:
    """a in per-tensor FP8 with the given scale; codes ``[..., f]``, or ``[f, rows]`` if ``transpose``."""
    return quantize_tensor(activation_apply(gate_up, activation), fmt, scale, transpose)


def activation_grad_amax(da: torch.Tensor, gate_up8: QuantizedTensor, activation: str) -> torch.Tensor:
    """Backward's first pass: the amax (fp32 scalar) of the gradient of gate_up, given da ``[..., f]``."""
    return amax(_gradient(da, gate_up8, activation))


def activation_backward(
    da: torch.Tensor,
    gate_up8: QuantizedTensor,
    activation: str,
    grad_fmt: FP8Format,
    grad_scale: torch.Tensor,
    fmt: FP8Format,
    scale: torch.Tensor,
) -> ActivationGradients:
    """Backward's second pass.

    Args:
        da: gradient of a, ``[rows, f]``.
        grad_fmt, grad_scale: of the gradient of gate_up.
        fmt, scale: of a, as in forward.
    """
    d8 = quantize_tensor(_gradient(da, gate_up8, activation), grad_fmt, grad_scale)
    d8_t = QuantizedTensor(d8.codes.t().contiguous(), grad_scale, "tensor")
    return ActivationGradients(d8, d8_t, activation_quantize(gate_up8, activation, fmt, scale, transpose=True))


def _gate_and_up(gate_up: torch.Tensor | QuantizedTensor) -> tuple[torch.Tensor, ...]:
    values = dequantize(gate_up) if isinstance(gate_up, QuantizedTensor) else gate_up.float().unflatten(-1, (2, -1))
    return values.unbind(-2)


def _gradient(da: torch.Tensor, gate_up8: QuantizedTensor, activation: str) -> torch.Tensor:
    """fp32 ``[..., 2 f]``."""
    gate, up = _gate_and_up(gate_up8)
    value, slope = ACTIVATIONS[activation](gate)
    da = da.float()
    return torch.cat([da * up * slope, da * value], dim=-1)
