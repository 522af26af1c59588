"""fc1 → activation → fc2 of all experts of a layer in one autograd function, with grouped products.

What each expert computes and saves is what :func:`~coat_dist.flow.mlp` computes and saves of its
tokens alone, to the bit on the reference path.

**Rows.** Tokens come sorted by expert, any number for each. They are copied into one matrix in
which each expert's rows begin at a multiple of 32 (:class:`~coat_dist.ops.ExpertRows`), with rows
of zeros between: so a tile of a kernel belongs to one expert, and FP8 products of an expert's rows
are aligned. Zeros change no amax and no sum. The output is taken from there in the given order,
times ``probs`` if there are any.

**Scales.** Forward has scales of rows, or one an expert; backward has one an expert, for its sums
run over an expert's rows. No expert sees another one's outliers.

**Weights** lie as Megatron's ``GroupedMLP`` stores them, ``[experts, in, out]``, while FP8 products
want ``[out, in]``: forward quantizes them transposed, and dgrad as they lie.

**Saved**: x in FP8 with a scale an expert, the pre-activation in groups of 8 bits, where the rows
lie (8 bytes a row); with ``probs`` the output in groups, as :func:`~coat_dist.flow.scale_rows`
saves it. No copy of a weight, but ``weights: "cached"`` keeps forward's codes from one micro-batch
to the next (``core/weights.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...config import ActivationConfig
from ...formats import FORMATS, QuantizedTensor
from ...ops import (
    SMALLEST_SCALE,
    ExpertRows,
    activation_backward_experts,
    activation_compress_rows,
    activation_grad_amax_experts,
    activation_quantize,
    amax_experts,
    apart,
    check_activation,
    expert_rows,
    grouped_mm,
    grouped_wgrad,
    largest_rows,
    quantize_columns,
    quantize_experts,
    quantize_experts_both,
    quantize_groups,
    quantize_rows,
    spread_gradient,
    take_rows,
    tensor_scale,
    transpose,
)
from ..core.main_grad import Product, into_main_grad, row_blocks
from ..core.products import Operand, saved_format
from ..core.weights import cacheable, from_cache
from ..function import Function, check_settings, shaped

__all__ = ["grouped_mlp"]


def grouped_mlp(
    x: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    activation: str,
    settings: ActivationConfig,
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts of a layer on tokens that are sorted by expert, with FP8 products; each rank
    works by itself.

    Args:
        x: ``[tokens, h]``, bfloat16 or float32; any number of tokens.
        tokens_per_expert: int ``[experts]``, on the CPU or x's device; they add up to ``tokens``.
            On a GPU nothing waits for it where torch has the product (``kernels/gemm.py``).
        fc1_weight: contiguous, read as ``[experts, h, parts f]``, whatever its shape: x is
            multiplied by it as it is, gate columns first. So Megatron's ``GroupedMLP`` stores
            ``weight1``, ``[h, experts * parts f]``.
        fc2_weight: contiguous, read as ``[experts, f, h]``; ``weight2``.
        activation: as in :func:`~coat_dist.flow.norm_mlp`.
        probs: ``[tokens]``, any floating dtype: what each token's output is multiplied by.

    Returns:
        ``[tokens, h]`` of x's dtype.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    experts = tokens_per_expert.numel()
    _check(x, experts, fc1_weight, fc2_weight, activation, settings, probs)
    rows = expert_rows(tokens_per_expert, x.shape[0], x.device)
    return _GroupedMLP.apply(x, fc1_weight, fc2_weight, probs, rows, activation, settings)


def _check(x, experts, fc1_weight, fc2_weight, activation, settings, probs) -> None:
    check_settings(settings)
    parts = check_activation(activation).parts
    for name, t in (("x", x), ("fc1_weight", fc1_weight), ("fc2_weight", fc2_weight)):
        if t.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{name}: got {t.dtype}, accepted: torch.bfloat16, torch.float32")
    if x.dim() != 2:
        raise ValueError(f"x: got shape {list(x.shape)}, accepted: [tokens, h]")
    if not experts:
        raise ValueError("tokens_per_expert: got none, accepted: a number for each expert")
    h = x.shape[1]
    for name, t, form, unit in (
        ("fc1_weight", fc1_weight, "[experts, h, parts f]", experts * h * parts),
        ("fc2_weight", fc2_weight, "[experts, f, h]", experts * h),
    ):
        if not t.is_contiguous() or t.numel() % unit:
            raise ValueError(
                f"{name}: got shape {list(t.shape)}, accepted: contiguous, the elements of {form} "
                f"with {experts} experts, h {h} and {parts} parts ({activation!r})"
            )
    if fc1_weight.numel() != parts * fc2_weight.numel():
        raise ValueError(
            f"fc2_weight: got {fc2_weight.numel()} elements, accepted: "
            f"{fc1_weight.numel()}/{parts}, those of fc1_weight for each of the {parts} tensors "
            f"that {activation!r} takes"
        )
    if settings.tp_invariant:
        raise ValueError("tp_invariant: got true, accepted: false with grouped experts")
    if probs is not None and probs.shape != x.shape[:1]:
        raise ValueError(f"probs: got shape {list(probs.shape)}, accepted: {list(x.shape[:1])}")


class _Weight:
    """The weights of all experts, ``[experts, in, out]``, in one call, as
    :class:`~coat_dist.flow.core.weights.Weight`.
    """

    def __init__(
        self, parameter: torch.Tensor, experts: int, inputs: int, settings: ActivationConfig
    ) -> None:
        self.parameter = parameter
        self.shape = (experts, inputs, parameter.numel() // (experts * inputs))
        self.settings = settings

    def quantized(self) -> Operand:
        """For forward, codes ``[experts, out, in]``; the scale, fp32 ``[experts]``, is to be
        saved.
        """
        if self.settings.weights == "cached" and cacheable(self.parameter):
            return from_cache(self.parameter, self.settings, self.shape, self._quantize)
        return self._quantize()

    def _quantize(self) -> Operand:
        fmt = FORMATS[self.settings.format]
        q8 = quantize_columns(self.parameter.detach().view(self.shape), fmt)
        scale = q8.scales.flatten(1).amax(1)
        if self.settings.forward_scales == "row":
            return Operand(q8, scale)
        turned = self.parameter.detach().view(self.shape).transpose(1, 2).contiguous()
        return Operand(quantize_experts(turned, fmt, scale, None), scale)

    def straight(self, weight: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """For dgrad, codes ``[experts, in, out]`` with forward's scale; ``weight`` as
        ``saved_tensors`` returns it.
        """
        return quantize_experts(weight.view(self.shape), FORMATS[self.settings.format], scale, None)

    def gradient(
        self, x8_t: QuantizedTensor, d8_t: QuantizedTensor, rows: ExpertRows
    ) -> torch.Tensor | None:
        """wgrad; see :meth:`~coat_dist.flow.core.weights.Weight.gradients`. Operands ``[in,
        rows]`` and ``[out, rows]``.
        """
        if self.settings.wgrad == "main_grad":
            return into_main_grad(
                self.parameter, lambda out, whole: self._products(out, whole, x8_t, d8_t, rows)
            )
        return grouped_wgrad(x8_t, d8_t, rows, self.parameter.dtype).view(self.parameter.shape)

    def _products(self, out, whole, x8_t, d8_t, rows) -> Iterator[tuple[torch.Tensor, Product]]:
        out, missing = out.view(self.shape), set(range(self.shape[0]))
        scales = apart(x8_t.scales), apart(d8_t.scales)
        for expert, at in rows.pieces():
            missing.remove(expert)
            left, right = (
                QuantizedTensor(q.codes[:, at].contiguous(), s[expert], "tensor")
                for q, s in zip((x8_t, d8_t), scales, strict=True)
            )
            yield from row_blocks(out[expert], whole, left, right, self.settings)
        for expert in missing:
            yield out[expert], lambda part: out.new_zeros(()) if part is None else part.zero_()


class _GroupedMLP(Function):
    saves = (
        *("x", "x_scales", "pre", "pre_scales", "a_scale", "w1", "w1_scale", "w2", "w2_scale"),
        *("probs", "y", "y_scales", "source", "place", "blocks", "ends"),
    )

    @staticmethod
    def forward(
        ctx: Any, x, fc1_weight, fc2_weight, probs, rows: ExpertRows, activation: str, settings
    ) -> torch.Tensor:
        fmt, width = FORMATS[settings.format], x.shape[1]
        inner_width = fc2_weight.numel() // (rows.experts * width)
        fc1 = _Weight(fc1_weight, rows.experts, width, settings)
        fc2 = _Weight(fc2_weight, rows.experts, inner_width, settings)
        y8, x8 = _input(x, rows, settings)
        w1, w1_scale = fc1.quantized()
        pre = grouped_mm(y8, w1, rows, x.dtype, fast_accum=True)
        del y8, w1
        pre8, a8, a_scale = _activate(pre, activation, fmt, rows, settings)
        del pre
        w2, w2_scale = fc2.quantized()
        out = grouped_mm(a8, w2, rows, x.dtype, fast_accum=True)
        del a8, w2
        y = y_scales = None
        if _GroupedMLP.needs(ctx, "probs"):
            out8 = quantize_groups(out, saved_format(settings), settings.group_size, settings.scale)
            y, y_scales = out8.codes, out8.scales
        saved = _GroupedMLP.Saved(
            x=x8.codes,
            x_scales=x8.scales,
            pre=pre8.codes,
            pre_scales=pre8.scales,
            a_scale=a_scale,
            w1=fc1_weight,
            w1_scale=w1_scale,
            w2=fc2_weight,
            w2_scale=w2_scale,
            probs=probs,
            y=y,
            y_scales=y_scales,
            source=rows.source,
            place=rows.place,
            blocks=rows.blocks,
            ends=rows.ends,
        )
        ctx.save_for_backward(*saved)
        ctx.fc1, ctx.fc2, ctx.known, ctx.dtype = fc1, fc2, rows.known, x.dtype
        ctx.activation, ctx.settings = activation, settings
        return shaped(take_rows(out, rows.place, probs), *x.shape)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor):
        saved, _ = _GroupedMLP.saved(ctx)
        fc1, fc2, settings, activation = ctx.fc1, ctx.fc2, ctx.settings, ctx.activation
        rows = ExpertRows(saved.source, saved.place, saved.blocks, saved.ends, ctx.known)
        fmt, grad_fmt = FORMATS[settings.format], FORMATS[settings.grad_format]
        pre8 = QuantizedTensor(saved.pre, saved.pre_scales, "group", settings.group_size)
        dx = dfc1 = dfc2 = y8 = None
        if saved.y is not None:
            y8 = QuantizedTensor(saved.y, saved.y_scales, "group", settings.group_size)
        d, top, dprobs = spread_gradient(dout, rows, saved.probs, y8)
        assert top is not None
        d8, d8_t = quantize_experts_both(d, grad_fmt, tensor_scale(top, grad_fmt), rows)
        del d
        da = grouped_mm(d8, fc2.straight(saved.w2, saved.w2_scale), rows, ctx.dtype)
        del d8
        scale = tensor_scale(activation_grad_amax_experts(da, pre8, activation, rows), grad_fmt)
        inner = activation_backward_experts(
            da, pre8, activation, grad_fmt, scale, fmt, saved.a_scale, rows
        )
        del da
        if _GroupedMLP.needs(ctx, "fc2_weight"):
            dfc2 = fc2.gradient(inner.a8_t, d8_t, rows)
        d8, d8_t = inner.d8, inner.d8_t
        del inner
        if _GroupedMLP.needs(ctx, "x"):
            dy = grouped_mm(d8, fc1.straight(saved.w1, saved.w1_scale), rows, ctx.dtype)
            dx = take_rows(dy, rows.place)
            del dy
        del d8
        if _GroupedMLP.needs(ctx, "fc1_weight"):
            x8_t = transpose(QuantizedTensor(saved.x, saved.x_scales, "expert"))
            dfc1 = fc1.gradient(x8_t, d8_t, rows)
        return dx, dfc1, dfc2, dprobs, None, None, None


def _input(
    x, rows: ExpertRows, settings: ActivationConfig
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """What fc1 multiplies, and x in FP8 with a scale an expert for backward; the same where
    scales are per tensor.
    """
    fmt, values = FORMATS[settings.format], take_rows(x, rows.source)
    if settings.forward_scales != "row":
        x8 = quantize_experts(
            values, fmt, tensor_scale(amax_experts(values, rows), fmt, True), rows
        )
        return x8, x8
    y8 = quantize_rows(values, fmt, aligned=True)
    return y8, quantize_experts(values, fmt, largest_rows(y8.scales, rows, SMALLEST_SCALE), rows)


def _activate(
    pre: torch.Tensor, activation: str, fmt, rows: ExpertRows, settings: ActivationConfig
) -> tuple[QuantizedTensor, QuantizedTensor, torch.Tensor]:
    """From fc1's output: what is saved of it, the input of fc2, and that one's scales for
    backward.
    """
    exact, saved = settings.forward == "exact", saved_format(settings, pre_activation=True)
    pre8, a8 = activation_compress_rows(
        pre, activation, fmt, settings.group_size, settings.scale, exact, None, saved
    )
    scale = largest_rows(a8.scales, rows, SMALLEST_SCALE)
    if settings.forward_scales != "row":
        for expert, at in rows.pieces():
            part = (
                pre[at]
                if exact
                else QuantizedTensor(pre8.codes[at], pre8.scales[at], "group", pre8.group_size)
            )
            a8.codes[at] = activation_quantize(part, activation, fmt, scale[expert]).codes
        a8 = QuantizedTensor(a8.codes, scale, "expert")
    return pre8, a8, scale
