"""What the flow's tests share: layers with fresh parameters, and a second implementation of the
precision flow.

The second implementation is plain autograd over values that are quantized and read back, gradients
passing straight through. It shares no code with the flow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from coat_dist.config import ActivationConfig
from coat_dist.flow import Norm, TensorParallel, linear, mlp, norm_linear, norm_mlp

ONE = TensorParallel()
EPS = 1e-5
LARGEST = {"int8": 127.0, "e3m4": 31.0, "e4m3": 448.0, "e5m2": 57344.0}
E3M4 = (torch.arange(8)[:, None] - 3).clamp(min=-2).exp2() * (
    torch.arange(16) / 16 + torch.arange(8)[:, None].clamp(max=1)
)
"""Its numbers from 0 to 31, in order."""
GATED = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "quick_geglu": lambda g: g * torch.sigmoid(1.702 * g),
}
PLAIN = {
    "gelu": F.gelu,
    "gelu_tanh": GATED["geglu_tanh"],
    "quick_gelu": GATED["quick_geglu"],
    "squared_relu": lambda g: F.relu(g) ** 2,
}


def act(pre, activation):
    """The activation of fc1's output by torch."""
    if activation in PLAIN:
        return PLAIN[activation](pre)
    gate, up = pre.chunk(2, -1)
    return GATED[activation](gate) * up


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

        parts = 1 if activation in PLAIN else 2
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
        return act(pre if self.fc1_bias is None else pre + self.fc1_bias, activation) @ self.fc2.t()

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
        parts = (pre,) if activation in PLAIN else pre.chunk(2, -1)
        pre = torch.cat([self.grouped(t, config, "int8") for t in parts], -1)
        return self.fp8_linear(act(pre, activation), self.fc2, config)

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
    return rounded(x.detach(), x.detach().abs().max(), fmt, aligned)


def per_row(x, fmt):
    return rounded(x.detach(), x.detach().abs().amax(-1, keepdim=True), fmt, True)


def rounded(x, amax, fmt, aligned):
    scale = amax / LARGEST[fmt]
    if aligned:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return as_format(x / scale, fmt) * scale


def as_format(x, fmt):
    """The nearest numbers of a format; E3M4's of what fp16 makes of x."""
    if fmt == "int8":
        return x.round()
    if fmt != "e3m4":
        return x.to({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt]).to(x.dtype)
    x, numbers = ((x * 2.0**-12).half() * 2.0**12).to(x.dtype), E3M4.flatten().to(x)
    above = torch.searchsorted(numbers, x.abs().contiguous()).clamp(1, 127)
    low, high = numbers[above - 1], numbers[above]
    up = torch.where(
        x.abs() - low == high - x.abs(), above % 2 == 0, x.abs() - low > high - x.abs()
    )
    return torch.where(up, high, low).copysign(x)


def per_group(x, fmt, group_size, kind):
    parts = []
    for part in x.detach().split(group_size, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / LARGEST[fmt]
        if kind == "e8m0":
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        else:
            rounded = scale.bfloat16()
            up = torch.where(
                rounded.float() < scale, rounded.view(torch.int16) + 1, rounded.view(torch.int16)
            )
            scale = up.to(torch.int16).view(torch.bfloat16).float()
        parts.append(as_format(part / scale, fmt) * scale)
    return torch.cat(parts, -1)


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
