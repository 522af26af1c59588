"""The FP8 flow in plain torch, with each of its roundings switched on or off: what `gradients.py` splits errors with.

Products are fp32, and each operand is rounded to the values of its codes before it is multiplied. Scales, norms and
codes are those of `coat_dist.reference`, so with :data:`FLOW` the gradients are those of `coat_dist.flow` on one rank;
`gradients.py` checks that before it measures anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from benchmarks.small_gpt import Block
from coat_dist.formats import E3M4, E4M3, E5M2, INT8, FP8Format
from coat_dist.reference.activation import FUNCTIONS
from coat_dist.reference.norm import NormStats, norm_apply, norm_backward, norm_stats
from coat_dist.reference.quantize import (
    amax,
    amaxes,
    dequantize,
    group_scales,
    power_of_two,
    requantize_rows,
    scale_values,
    tensor_scale,
)

__all__ = ["EXACT", "FLOW", "FORMER", "GEMMS", "Plan", "Recipe", "Rounding", "everywhere", "rope", "rounded_block"]

GEMMS = "qkv", "proj", "fc1", "fc2"
FORWARD: Literal["forward"] = "forward"


@dataclass(frozen=True)
class Grid:
    """A format of 8 bits that the package does not have: floating-point with a largest value."""

    max: float
    mantissa_bits: int
    smallest: float


GRIDS: dict[str, Any] = {
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e3m4": E3M4,
    "e2m5": Grid(7.875, 5, 2.0**-5),
    "int8": INT8,
}


def on_grid(x: torch.Tensor, grid: Any, stochastic: bool) -> torch.Tensor:
    """x (fp32) rounded to the grid: to nearest even, or up with the probability of the remainder; saturates."""
    x = x.clamp(-grid.max, grid.max)
    exponent = (x.view(torch.int32) >> 23 & 0xFF) - 127
    step = torch.exp2((exponent - grid.mantissa_bits).float()).clamp(min=grid.smallest)
    ratio = x / step
    whole = (ratio + torch.rand_like(x)).floor() if stochastic else ratio.round()
    return (whole * step).clamp(-grid.max, grid.max)


@dataclass(frozen=True)
class Rounding:
    """How one matrix ``[rows, n]`` is rounded."""

    scope: Literal["tensor", "row", "column", "group", "tokens"] = "tensor"
    """What shares a scale: everything, a row, a column, ``group`` elements of a row, or of a column."""
    format: str = "e4m3"
    aligned: bool = False
    """Powers of two as scales; those of groups always are."""
    stochastic: bool = False
    group: int = 32
    headroom: float = 1.0
    """The scale fits a value so many times as large as the largest."""

    def __call__(self, x: torch.Tensor, top: torch.Tensor | None = None, precise: bool = False) -> torch.Tensor:
        """Values of the codes of x (fp32).

        Args:
            top: an amax for the scale of the whole tensor other than x's own.
            precise: codes times scales in fp64, unless scales are those of groups.
        """
        if self.scope in ("column", "tokens"):
            return self._rows(x.t(), top, precise).t()
        return self._rows(x, top, precise)

    def _rows(self, x: torch.Tensor, top: torch.Tensor | None, precise: bool) -> torch.Tensor:
        grid = GRIDS[self.format]
        if self.scope in ("tensor", "row", "column"):
            if self.scope != "tensor":
                top = amaxes(x, -1)[..., None]
            scales = tensor_scale((amax(x) if top is None else top) * self.headroom, grid)
            return self._codes(x, power_of_two(scales) if self.aligned else scales, precise)
        n = x.shape[-1]
        groups = F.pad(x, (0, -n % self.group)).unflatten(-1, (-1, self.group))
        tops = amaxes(groups, -1)[..., None]
        if isinstance(grid, FP8Format):
            scales = scale_values(group_scales(tops, grid, "e8m0"))
        else:
            scales = power_of_two(tensor_scale(tops, grid))
        return self._codes(groups, scales).flatten(-2)[..., :n]

    def _codes(self, x: torch.Tensor, scales: torch.Tensor, precise: bool = False) -> torch.Tensor:
        grid = GRIDS[self.format]
        if self.stochastic or isinstance(grid, Grid):
            return on_grid(x * scales.reciprocal(), grid, self.stochastic) * scales
        q8 = requantize_rows(x, grid, scales)
        return q8.codes.double() * scales.double() if precise else dequantize(q8)


@dataclass(frozen=True)
class Recipe:
    """How the operands around one product are rounded; None is not at all, :data:`FORWARD` the values of forward."""

    forward_x: Rounding | None = None
    forward_w: Rounding | None = None
    saved_x: Rounding | None = None
    """The input of the norm before the product, as backward sees it."""
    saved_pre: Rounding | None = None
    """Gate and up before the activation whose result the product reads, as backward sees them."""
    wgrad_x: Rounding | Literal["forward"] | None = None
    wgrad_dy: Rounding | None = None
    dgrad_dy: Rounding | None = None
    dgrad_w: Rounding | Literal["forward"] | None = None
    precise: bool = False
    """Products of fp64 values, rounded to fp32 once: where both operands are rounded, the bits of the definition."""

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """``a @ b``, fp32."""
        return a @ b if a.dtype == b.dtype == torch.float32 else (a.double() @ b.double()).float()


Plan = Callable[[int, str], Recipe]
"""The recipe of a layer's product, one of :data:`GEMMS`."""
EXACT = Recipe()
TENSOR, ROW, GROUP = Rounding(), Rounding("row"), Rounding("group")
ALIGNED, ALIGNED_ROW = Rounding(aligned=True), Rounding("row", aligned=True)
SAVED, SAVED_PRE = Rounding("group", "e3m4"), Rounding("group", "int8")
FLOW = Recipe(ALIGNED_ROW, ALIGNED_ROW, SAVED, SAVED_PRE, ALIGNED, TENSOR, TENSOR, ALIGNED)
"""The defaults of the "activation" block."""
FORMER = Recipe(ROW, ROW, GROUP, GROUP, TENSOR, TENSOR, TENSOR, TENSOR)
"""Its defaults when candidates for them were compared: scales of any value, E4M3 for all that is saved."""


def everywhere(recipe: Recipe) -> Plan:
    """The same recipe for all products."""
    return lambda layer, gemm: recipe


def _rounded(rounding: Rounding | None, x: torch.Tensor, precise: bool = False) -> torch.Tensor:
    return x if rounding is None else rounding(x, precise=precise)


class _Norm(torch.autograd.Function):
    """RMSNorm of x ``[rows, h]``: y, and what backward makes of the saved x in its place."""

    @staticmethod
    def forward(ctx: Any, x, gain, eps: float, recipe: Recipe):
        stats = norm_stats(x, "rmsnorm", eps)
        saved = _rounded(recipe.saved_x, x)
        ctx.save_for_backward(saved, stats.rstd, gain)
        kept = norm_apply(saved, stats, gain, None)
        ctx.mark_non_differentiable(kept)
        return norm_apply(x, stats, gain, None), kept

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: Any):
        saved, rstd, gain = ctx.saved_tensors
        dx, dgain, _ = norm_backward(dy, saved, "rmsnorm", NormStats(rstd, None), gain, bias=False)
        return dx, dgain, None, None


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` of pre ``[rows, 2 f]``, and what backward makes of the saved pre in its place."""

    @staticmethod
    def forward(ctx: Any, pre, recipe: Recipe):
        saved = torch.cat([_rounded(recipe.saved_pre, part) for part in pre.chunk(2, -1)], -1)
        ctx.save_for_backward(saved)
        values = [FUNCTIONS["silu"](gate)[0] * up for gate, up in (p.chunk(2, -1) for p in (pre, saved))]
        ctx.mark_non_differentiable(values[1])
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, da: torch.Tensor, _: Any):
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        value, slope = FUNCTIONS["silu"](gate)
        return torch.cat([da * up * slope, da * value], -1), None


class _Product(torch.autograd.Function):
    """``x @ weight.T``; wgrad multiplies ``kept``, with the scale of x."""

    @staticmethod
    def forward(ctx: Any, x, kept, weight, recipe: Recipe):
        a, b = (_rounded(r, t, recipe.precise) for r, t in ((recipe.forward_x, x), (recipe.forward_w, weight)))
        ctx.save_for_backward(a if recipe.wgrad_x == FORWARD else kept, b if recipe.dgrad_w == FORWARD else weight)
        ctx.recipe, ctx.top = recipe, amax(x)
        return recipe.product(a, b.t())

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor):
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        if isinstance(recipe.wgrad_x, Rounding):
            x = recipe.wgrad_x(x, ctx.top, recipe.precise)
        if isinstance(recipe.dgrad_w, Rounding):
            weight = recipe.dgrad_w(weight, precise=recipe.precise)
        for_dgrad, for_wgrad = (_rounded(r, dy, recipe.precise) for r in (recipe.dgrad_dy, recipe.wgrad_dy))
        return recipe.product(for_dgrad, weight), None, recipe.product(for_wgrad.t(), x), None


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x ``[..., s, d]``, of the pairs ``(i, i + d/2)``."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rounded_block(
    plan: Plan, layer: int, block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The block of the small GPT with the roundings of ``plan``; x fp32 ``[b, s, h]``."""
    (b, s, h), n = x.shape, block.heads
    qkv, proj, fc1, fc2 = (plan(layer, gemm) for gemm in GEMMS)
    x = x.flatten(0, 1)
    y, kept = _Norm.apply(x, block.norm1.weight, block.norm1.eps, qkv)
    out = _Product.apply(y, kept, block.qkv.weight, qkv)
    q, k, v = out.view(b, s, 3, n, h // n).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
    o = o.transpose(1, 2).reshape(b * s, h)
    x = x + _Product.apply(o, o.detach(), block.proj.weight, proj)
    y, kept = _Norm.apply(x, block.norm2.weight, block.norm2.eps, fc1)
    a, kept = _SwiGLU.apply(_Product.apply(y, kept, block.fc1.weight, fc1), fc2)
    return (x + _Product.apply(a, kept, block.fc2.weight, fc2)).view(b, s, h)
