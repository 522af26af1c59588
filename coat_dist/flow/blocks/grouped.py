"""fc1 → activation → fc2 of all experts of a layer in one autograd function, with grouped products.

**Rows.** The rows of all experts are one matrix, in which each expert's begin at a multiple of 32,
with rows of zeros between (:class:`~coat_dist.ops.ExpertRows`): so a tile of a kernel belongs to
one expert, and FP8 products of an expert's rows are aligned. Zeros change no amax and no sum. There
are two callers: :func:`grouped_mlp` is given tokens that were sorted by expert before, as
Megatron's dispatchers do; :func:`routed_mlp` is given a router's choices, K for a token, and sorts
them itself (``reference/routing.py``).

**A token is quantized once**, whatever K is: its codes travel to the experts' rows, in forward with
their row scales, in backward rounded to one scale an expert, because wgrad sums over rows. The
gradient of a token is quantized once too, with one scale for all, and its codes travel likewise.

**The factor of a choice** (a router's probability p) multiplies an expert's output, y = p W2 a. It
needs no saved output: with d the gradient of the token, the gradient of p is the sum over a row of
(d W2) a, and a is recomputed anyway. wgrad of W2 multiplies d by p a. The algebra is SonicMoE's
(arXiv 2512.14080).

**Biases**, one of each product an expert, come with :func:`routed_mlp` alone. Rows of zeros have
fc1's too: nothing of them is read, and their factors are zero in backward. fc2's is multiplied by
the factors, outside of the autograd function.

**Weights** lie as Megatron stores them, ``[experts, in, out]``, or as transformers does,
``[experts, out, in]``. FP8 products want the summed dimension last, so of each weight one of
forward's and dgrad's codes is transposed while it is quantized.

**Saved**: codes and a row scale of x, once a token, unless fc1 is frozen; the pre-activation in
groups of 8 bits, once a choice; places of rows (8 bytes a choice). No copy of a weight, but
``weights: "cached"`` keeps forward's codes from one micro-batch to the next (``core/weights.py``).
Frozen weights may be codes alone (``core/frozen.py``): forward's, which dgrad transposes.
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
    activation_backward,
    activation_compress_rows,
    activation_factor_grad,
    activation_grad_amax,
    activation_quantize,
    amax,
    apart,
    check_activation,
    expert_rows,
    grouped_mm,
    grouped_wgrad,
    largest_rows,
    one_by_one,
    quantize_columns,
    quantize_experts,
    quantize_rows,
    quantize_tensor,
    route,
    sum_rows,
    take_codes,
    take_codes_transposed,
    tensor_scale,
)
from ..core.frozen import FrozenWeight, codes_of
from ..core.inputs import row_codes
from ..core.main_grad import Product, into_main_grad, row_blocks
from ..core.products import Operand, saved_format
from ..core.weights import cacheable, from_cache
from ..function import Function, check_settings, shaped


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
    _check(x, experts, fc1_weight, fc2_weight, activation, settings)
    if probs is not None and probs.shape != x.shape[:1]:
        raise ValueError(f"probs: got shape {list(probs.shape)}, accepted: {list(x.shape[:1])}")
    rows = expert_rows(tokens_per_expert, x.shape[0], x.device)
    call = rows, 1, True, activation, settings
    return _Experts.apply(call, x, probs, fc1_weight, fc2_weight, None)


def routed_mlp(
    x: torch.Tensor,
    index: torch.Tensor,
    probs: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    activation: str,
    settings: ActivationConfig,
    transposed: bool = False,
    fc1_bias: torch.Tensor | None = None,
    fc2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts of a layer, and the sum of what a token's experts give, each times its factor.

    Args:
        x: ``[tokens, h]``, bfloat16 or float32; any number of tokens.
        index: int ``[tokens, K]``: experts by number; a number that is no expert's drops a choice.
            The host waits for it where experts have so many rows that products one by one are
            faster.
        probs: ``[tokens, K]``, any floating dtype: the factors.
        fc1_weight: contiguous ``[experts, parts f, h]``, gate rows first, as transformers stores
            it; with ``transposed`` ``[experts, h, parts f]``.
        fc2_weight: contiguous ``[experts, h, f]``; with ``transposed`` ``[experts, f, h]``.
        activation: as in :func:`~coat_dist.flow.norm_mlp`.
        fc1_bias: ``[experts, parts f]``; added in fp32.
        fc2_bias: ``[experts, h]``. What a token gets of it is a product: its factors of all
            experts times the biases.

    Returns:
        ``[tokens, h]`` of x's dtype: fp32 sums, rounded once; once more with ``fc2_bias``.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    _check(x, fc1_weight.shape[0], fc1_weight, fc2_weight, activation, settings)
    for name, t in (("index", index), ("probs", probs)):
        if t.dim() != 2 or t.shape != index.shape or t.shape[0] != x.shape[0]:
            raise ValueError(f"{name}: got shape {list(t.shape)}, accepted: [{x.shape[0]}, K]")
    experts = fc1_weight.shape[0]
    rows = route(index, experts)
    if rows.known is None and one_by_one(index.numel(), experts, fc2_weight.numel() // experts):
        rows = rows._replace(known=tuple(rows.ends.tolist()))
    call = rows, index.shape[1], transposed, activation, settings
    y = _Experts.apply(call, x, probs, fc1_weight, fc2_weight, fc1_bias)
    if fc2_bias is None:
        return y
    index = index.long().masked_fill(rows.place.view(index.shape) < 0, experts)
    factors = probs.new_zeros(len(x), experts + 1).scatter_add(1, index, probs)
    return y + (factors[:, :-1].to(y.dtype) @ fc2_bias.to(y.dtype)).to(y.dtype)


def _check(x, experts, fc1_weight, fc2_weight, activation, settings) -> None:
    check_settings(settings)
    parts = check_activation(activation).parts
    for name, t in (("x", x), ("fc1_weight", fc1_weight), ("fc2_weight", fc2_weight)):
        if t.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{name}: got {t.dtype}, accepted: torch.bfloat16, torch.float32")
    if x.dim() != 2:
        raise ValueError(f"x: got shape {list(x.shape)}, accepted: [tokens, h]")
    h = x.shape[1]
    for name, t, form, unit in (
        ("fc1_weight", fc1_weight, "experts x h x parts f", experts * h * parts),
        ("fc2_weight", fc2_weight, "experts x f x h", experts * h),
    ):
        if not t.is_contiguous(memory_format=torch.contiguous_format) or t.numel() % unit:
            raise ValueError(
                f"{name}: got shape {list(t.shape)}, accepted: contiguous, {form} elements "
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


class _Weight:
    """The weights of all experts in one call, as :class:`~coat_dist.flow.core.weights.Weight`:
    ``[experts, in, out]``, or with ``rows_first`` ``[experts, out, in]``.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        experts: int,
        inputs: int,
        settings: ActivationConfig,
        rows_first: bool,
    ) -> None:
        outputs = parameter.numel() // (experts * inputs)
        self.parameter = parameter
        self.shape = (experts, outputs, inputs) if rows_first else (experts, inputs, outputs)
        self.settings = settings
        # Codes of a frozen weight are [experts, out, in], whatever its own shape.
        self.rows_first = rows_first or isinstance(parameter, FrozenWeight)

    def quantized(self) -> Operand:
        """For forward, codes ``[experts, out, in]``; the scale, fp32 ``[experts]``, is to be
        saved.
        """
        if isinstance(self.parameter, FrozenWeight):
            q8 = self.parameter.q8
            return Operand(q8, q8.scales.amax((1, 2)))
        if self.settings.weights == "cached" and cacheable(self.parameter):
            kind = self.shape, self.rows_first
            return from_cache(self.parameter, self.settings, kind, self._quantize)
        return self._quantize()

    def _quantize(self) -> Operand:
        fmt, weight = FORMATS[self.settings.format], _shaped(self.parameter, self.shape)
        q8 = quantize_rows(weight, fmt, True) if self.rows_first else quantize_columns(weight, fmt)
        scale = q8.scales.amax((1, 2))
        if self.settings.forward_scales == "row":
            return Operand(q8, scale)
        return Operand(quantize_experts(weight, fmt, scale, not self.rows_first), scale)

    def for_dgrad(self, weight: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """Codes ``[experts, in, out]`` with forward's scale; ``weight`` as ``saved_tensors``
        returns it.
        """
        fmt, given = FORMATS[self.settings.format], codes_of(_shaped(weight, self.shape))
        return quantize_experts(given, fmt, scale, self.rows_first)

    def gradient(
        self, x8_t: QuantizedTensor, d8_t: QuantizedTensor, rows: ExpertRows
    ) -> torch.Tensor | None:
        """wgrad; see :meth:`~coat_dist.flow.core.weights.Weight.gradients`. Operands ``[in,
        rows]`` and ``[out, rows]``.
        """
        left, right = (d8_t, x8_t) if self.rows_first else (x8_t, d8_t)
        if self.settings.wgrad == "main_grad":
            return into_main_grad(
                self.parameter, lambda out, whole: self._products(out, whole, left, right, rows)
            )
        whole = grouped_wgrad(left, right, rows, self.parameter.dtype)
        return _shaped(whole, self.parameter.shape)

    def _products(self, out, whole, left, right, rows) -> Iterator[tuple[torch.Tensor, Product]]:
        out, missing = out.view(self.shape), set(range(self.shape[0]))
        scales = apart(left.scales), apart(right.scales)
        for expert, at in rows.pieces():
            missing.remove(expert)
            a, b = (
                QuantizedTensor(q.codes[:, at].contiguous(), s[expert], "tensor")
                for q, s in zip((left, right), scales, strict=True)
            )
            yield from row_blocks(out[expert], whole, a, b, self.settings)
        for expert in missing:
            yield out[expert], lambda part: out.new_zeros(()) if part is None else part.zero_()


def _shaped(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return t if t.shape == shape else t.view(shape)


class _Experts(Function):
    saves = (
        *("x", "x_scales", "x_scale", "pre", "pre_scales", "a_scale"),
        *("w1", "w1_scale", "w2", "w2_scale", "probs", "source", "place", "blocks", "ends"),
    )

    @staticmethod
    def forward(ctx: Any, call: tuple, x, probs, fc1_weight, fc2_weight, fc1_bias) -> torch.Tensor:
        rows, choices, transposed, activation, settings = call
        fmt, width = FORMATS[settings.format], x.shape[1]
        inner_width = fc2_weight.numel() // (rows.experts * width)
        fc1 = _Weight(fc1_weight, rows.experts, width, settings, not transposed)
        fc2 = _Weight(fc2_weight, rows.experts, inner_width, settings, not transposed)
        wgrad, x_scale = _Experts.needs(ctx, "fc1_weight"), None
        if settings.forward_scales == "row":
            x8, _ = row_codes(x, settings)
            y8 = take_codes(x8, rows, choices)
            if wgrad:
                x_scale = largest_rows(y8.scales, rows, SMALLEST_SCALE)
        else:
            x8 = quantize_tensor(x, fmt, tensor_scale(amax(x), fmt, True))
            y8 = _of_experts(take_codes(x8, rows, choices), rows)
        w1, w1_scale = fc1.quantized()
        pre = grouped_mm(y8, w1, rows, x.dtype, fast_accum=True)
        del y8, w1
        pre8, a8, a_scale = _activate(pre, fc1_bias, activation, probs, rows, settings)
        del pre
        w2, w2_scale = fc2.quantized()
        out = grouped_mm(a8, w2, rows, x.dtype, fast_accum=True)
        del a8, w2
        of_x: tuple[torch.Tensor | None, ...] = None, None, None
        if wgrad:
            of_x = x8.codes, x8.scales, x_scale
        saved = _Experts.Saved(
            *of_x,
            pre=pre8.codes,
            pre_scales=pre8.scales,
            a_scale=a_scale,
            w1=fc1_weight,
            w1_scale=w1_scale,
            w2=fc2_weight,
            w2_scale=w2_scale,
            probs=probs,
            source=rows.source,
            place=rows.place,
            blocks=rows.blocks,
            ends=rows.ends,
        )
        ctx.save_for_backward(*saved)
        ctx.fc1, ctx.fc2, ctx.known, ctx.dtype, ctx.choices = fc1, fc2, rows.known, x.dtype, choices
        ctx.activation, ctx.settings = activation, settings
        ctx.bias_dtype = None if fc1_bias is None else fc1_bias.dtype
        places = rows.place.view(-1, choices)
        factor = None if probs is None else probs.view(-1, choices)
        return shaped(sum_rows(out, places, factor), *x.shape)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor):
        saved, _ = _Experts.saved(ctx)
        fc1, fc2, settings, activation = ctx.fc1, ctx.fc2, ctx.settings, ctx.activation
        rows = ExpertRows(saved.source, saved.place, saved.blocks, saved.ends, ctx.known)
        fmt, grad_fmt = FORMATS[settings.format], FORMATS[settings.grad_format]
        pre8 = QuantizedTensor(saved.pre, saved.pre_scales, "group", settings.group_size)
        dx = dfc1 = dfc2 = dbias = None
        token8 = quantize_tensor(dout, grad_fmt, tensor_scale(amax(dout), grad_fmt))
        d8 = _of_experts(take_codes(token8, rows, ctx.choices), rows)
        da = grouped_mm(d8, fc2.for_dgrad(saved.w2, saved.w2_scale), rows, ctx.dtype)
        del d8
        given = da, pre8, activation
        if saved.probs is None:
            top, dprobs = activation_grad_amax(*given, rows), None
        else:
            top, dprobs = activation_factor_grad(*given, rows, saved.probs)
        scale = tensor_scale(top, grad_fmt)
        bias_sum = torch.float32 if _Experts.needs(ctx, "fc1_bias") else None
        inner: Any = activation_backward(
            *given, grad_fmt, scale, fmt, saved.a_scale, bias_sum, rows, saved.probs
        )
        if bias_sum is not None:
            dbias = inner.dbias.to(ctx.bias_dtype)
        del da, given
        if _Experts.needs(ctx, "fc2_weight"):
            d8_t = _of_experts(take_codes_transposed(token8, rows, ctx.choices), rows)
            dfc2 = fc2.gradient(inner.a8_t, d8_t, rows)
            del d8_t
        d8, d8_t = inner.d8, inner.d8_t
        del inner, token8
        if _Experts.needs(ctx, "x"):
            dy = grouped_mm(d8, fc1.for_dgrad(saved.w1, saved.w1_scale), rows, ctx.dtype)
            dx = sum_rows(dy, rows.place.view(-1, ctx.choices))
            del dy
        del d8
        if _Experts.needs(ctx, "fc1_weight"):
            layout = "tensor" if saved.x_scale is None else "row"
            x8 = QuantizedTensor(saved.x, saved.x_scales, layout)
            x8_t = take_codes_transposed(x8, rows, ctx.choices, saved.x_scale)
            dfc1 = fc1.gradient(_of_experts(x8_t, rows), d8_t, rows)
        return None, dx, dprobs, dfc1, dfc2, dbias


def _of_experts(q: QuantizedTensor, rows: ExpertRows) -> QuantizedTensor:
    """Codes with one scale for all rows, as those with one an expert."""
    if q.layout == "expert":
        return q
    return QuantizedTensor(q.codes, q.scales.expand(rows.experts), "expert")


def _activate(
    pre: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    probs: torch.Tensor | None,
    rows: ExpertRows,
    settings: ActivationConfig,
) -> tuple[QuantizedTensor, QuantizedTensor, torch.Tensor]:
    """From fc1's output: what is saved of it, the input of fc2, and the scales of that times
    ``probs`` for backward.
    """
    fmt, exact = FORMATS[settings.format], settings.forward == "exact"
    saved = saved_format(settings, pre_activation=True)
    pre8, a8 = activation_compress_rows(
        pre, activation, fmt, settings.group_size, settings.scale, exact, bias, saved, rows.blocks
    )
    backward = largest_rows(a8.scales, rows, SMALLEST_SCALE, probs)
    if settings.forward_scales == "row":
        return pre8, a8, backward
    scale = largest_rows(a8.scales, rows, SMALLEST_SCALE)
    for expert, at in rows.pieces():
        part: torch.Tensor | QuantizedTensor = pre[at]
        own = None if bias is None else bias[expert]
        if not exact:
            part = QuantizedTensor(pre8.codes[at], pre8.scales[at], "group", pre8.group_size)
            own = None
        a8.codes[at] = activation_quantize(part, activation, fmt, scale[expert], bias=own).codes
    return pre8, QuantizedTensor(a8.codes, scale, "expert"), backward
