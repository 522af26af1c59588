"""What the flow's tests share: layers with fresh parameters, and a second implementation of the
precision flow.

The second implementation is plain autograd over values that are quantized and read back, gradients
passing straight through. It shares no code with the flow but the quantizers of ``reference/``,
which ``tests/coat_dist/ops/test_quantize.py`` compares with rounding by search.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from coat_dist.config import ActivationConfig
from coat_dist.flow import Norm, TensorParallel, linear, mlp, norm_linear, norm_mlp
from coat_dist.formats import FORMATS
from coat_dist.reference.activation import ACTIVATIONS
from coat_dist.reference.quantize import (
    amax,
    dequantize,
    quantize_groups,
    quantize_rows,
    quantize_tensor,
    tensor_scale,
)
from tests.support.activations import split, torch_activation

ONE = TensorParallel()
EPS = 1e-5


def act(pre, activation):
    """The activation of fc1's output by torch."""
    return torch_activation(activation, split(pre, activation))


@dataclass
class Layer:
    """Parameters of norm → linear → (linear back) and of norm → MLP."""

    kind: str
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor
    back: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_bias: torch.Tensor | None = None

    @classmethod
    def random(
        cls,
        h=64,
        n=48,
        f=96,
        kind="rmsnorm",
        dtype=torch.float32,
        activation="swiglu",
        biased=False,
    ):
        def leaf(t):
            return t.to(dtype).requires_grad_()

        parts = ACTIVATIONS[activation].parts
        return cls(
            kind,
            leaf(torch.rand(h) + 0.5),
            leaf(torch.randn(h) * 0.5) if kind == "layernorm" else None,
            leaf(torch.randn(n, h) * h**-0.5),
            leaf(torch.randn(n) * 0.5),
            leaf(torch.randn(h, n) * n**-0.5),
            leaf(torch.randn(parts * f, h) * h**-0.5),
            leaf(torch.randn(h, f) * f**-0.5),
            leaf(torch.randn(parts * f) * 0.5) if biased else None,
        )

    @property
    def norm(self) -> Norm:
        return Norm(self.kind, EPS, self.norm_weight, self.norm_bias)

    def copy(self, device=None, dtype=None) -> Layer:
        """A copy with leaves of its own, there and in that dtype."""
        made = {n: t.detach().to(device, dtype, copy=True) for n, t in self.parameters().items()}
        return Layer(**vars(self) | {n: t.requires_grad_() for n, t in made.items()})

    def parameters(self):
        named = vars(self).items()
        return {name: t for name, t in named if isinstance(t, torch.Tensor)}

    def flow(self, x, settings: ActivationConfig, activation="swiglu", tp=ONE):
        x = x + linear(
            norm_linear(x, self.norm, self.weight, self.bias, tp, settings), self.back, tp, settings
        )
        return x + self.norm_mlp(x, settings, activation, tp)

    def norm_mlp(self, x, settings, activation="swiglu", tp=ONE):
        return norm_mlp(x, self.norm, self.fc1, self.fc2, activation, tp, settings, self.fc1_bias)

    def mlp(self, x, settings, activation="swiglu", tp=ONE):
        return mlp(x, self.fc1, self.fc2, activation, tp, settings, self.fc1_bias)

    def plain(self, x, activation="swiglu"):
        """The unquantized layer."""
        x = x + (self._norm(x) @ self.weight.t() + self.bias) @ self.back.t()
        return x + self.plain_mlp(self._norm(x), activation)

    def plain_mlp(self, y, activation="swiglu"):
        pre = y @ self.fc1.t()
        pre = pre if self.fc1_bias is None else pre + self.fc1_bias
        return act(pre, activation) @ self.fc2.t()

    def fp8_linear(self, a, w, config, bias=None):
        """Straight-through autograd of a linear: operands and the gradient of its output are
        quantized per tensor.

        With row scales the product's value is that of operands quantized by rows, its gradients are
        the same.
        """
        by_rows = per_row(a, config.format) @ per_row(w, config.format).t()
        a, w = (StraightThrough.apply(t, per_tensor(t, config.format)) for t in (a, w))
        product = a @ w.t()
        if config.forward_scales == "row":
            product = StraightThrough.apply(product, by_rows)
        y = GradQuantized.apply(product, config.grad_format)
        return y if bias is None else y + bias

    def grouped(self, t, config, mixed="e3m4"):
        fmt = mixed if config.saved_format == "mixed" else config.saved_format
        return StraightThrough.apply(t, per_group(t, fmt, config.group_size, config.scale))

    def straight_norm_linear(self, x, config):
        """:func:`coat_dist.flow.norm_linear` in "quantized" mode."""
        return self.fp8_linear(self.grouped_norm(x, config), self.weight, config, self.bias)

    def straight_norm_mlp(self, x, config, activation):
        """:func:`coat_dist.flow.norm_mlp` in "quantized" mode."""
        return self.straight_mlp(self.grouped_norm(x, config), config, activation)

    def straight_mlp(self, y, config, activation):
        """:func:`coat_dist.flow.mlp` in "quantized" mode."""
        pre = self.fp8_linear(y, self.fc1, config, self.fc1_bias)
        parts = [self.grouped(t, config, "int8") for t in split(pre, activation)]
        return self.fp8_linear(torch_activation(activation, parts), self.fc2, config)

    def grouped_norm(self, x, config):
        """The norm of values that groups rounded; of a LayerNorm they are those of x less its
        mean.
        """
        if self.kind == "rmsnorm":
            return self._norm(self.grouped(x, config))
        x = self.grouped(x - x.mean(-1, keepdim=True), config)
        return F.rms_norm(x, x.shape[-1:], self.norm_weight, EPS) + self.norm_bias

    def _norm(self, x):
        h = x.shape[-1:]
        if self.kind == "layernorm":
            return F.layer_norm(x, h, self.norm_weight, self.norm_bias, EPS)
        return F.rms_norm(x, h, self.norm_weight, EPS)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GradQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fmt):
        ctx.fmt = fmt
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return per_tensor(grad, ctx.fmt, aligned=False), None


def per_tensor(x, fmt, aligned=True):
    scale = tensor_scale(amax(x), FORMATS[fmt], aligned)
    return dequantize(quantize_tensor(x.detach(), FORMATS[fmt], scale))


def per_row(x, fmt):
    return dequantize(quantize_rows(x.detach(), FORMATS[fmt], aligned=True))


def per_group(x, fmt, group_size, kind):
    return dequantize(quantize_groups(x.detach(), FORMATS[fmt], group_size, kind))


def relative_error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def median_error(got, expected):
    """Median absolute error relative to the rms: blind to a few values that took the other code
    at a tie.
    """
    return ((got - expected).abs().median() / expected.square().mean().sqrt()).item()


def cosine(got, expected):
    return F.cosine_similarity(got.double().flatten(), expected.double().flatten(), dim=0).item()


def gradients(output, weighting, inputs):
    return torch.autograd.grad(output, list(inputs), weighting, retain_graph=True)


def settings(**changes) -> ActivationConfig:
    return ActivationConfig(**changes)
