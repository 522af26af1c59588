"""(norm →) column-parallel linear, as one autograd function; for attention also its split into
rotated heads.

Saved per token: x8, with a norm also its group scales and rstd; per call: one scale of y8, one of
the weight, and a reference to the table of cosines and sines, which all layers share. Not saved: y,
y8, any copy of the weight.

With ``residual`` :func:`norm_qkv` returns x once more, as an alias for the residual connection. Its
gradient arrives in the same backward as that of the product, and the pass that computes the norm's
gradient adds it, in fp32 and before the one rounding: autograd has nothing left to add. The alias
is a view of x and costs no memory. Autograd refuses to change it in place. Where x gets no
gradient, it is x itself.
"""

from __future__ import annotations

from typing import Any

import torch

from ...config import ActivationConfig
from ...ops import Heads, RopeTable, split_rope, split_rope_backward
from ..function import check_settings, once_differentiable, shaped, without_autocast
from ..inputs import check_normed, quantized_input, residual_alias, restore_input
from ..parallel.tensor_parallel import TensorParallel
from ..products import check_input, gemm, summed_gemm
from ..scaling import gradient_amax, quantize_gradient
from ..weights import JoinedWeight, Weights, joined
from .norm import Norm

__all__ = ["norm_linear", "norm_qkv"]


def norm_linear(
    x: torch.Tensor,
    norm: Norm | None,
    weight: Weights,
    bias: Weights | None,
    tp: TensorParallel,
    settings: ActivationConfig,
) -> torch.Tensor:
    """``norm(x) @ weight.T + bias`` with an FP8 product, split over ranks by output features.

    Args:
        x: ``[..., h]``, bfloat16 or float32; with sequence parallelism, dimension 0 is this rank's
            part of it.
        norm: None where the linear reads x itself.
        weight, bias: this rank's ``[n / tp, h]`` and ``[n / tp]``; or several of each, one below
            the other, whose n add up.

    Returns:
        ``[..., n / tp]`` of x's dtype, for the whole sequence.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    weights, biases = joined(weight, bias)
    _check(x, norm, weights, biases, tp, settings)
    options = norm, tp, settings, None, None, False, len(weights)
    return _NormLinear.apply(x, *_parameters(norm), *options, *weights, *biases)


def norm_qkv(
    x: torch.Tensor,
    norm: Norm | None,
    weight: Weights,
    bias: Weights | None,
    heads: Heads,
    table: RopeTable | None,
    tp: TensorParallel,
    settings: ActivationConfig,
    residual: bool = False,
) -> tuple[torch.Tensor, ...]:
    """:func:`norm_linear` for attention: queries, keys and values, queries and keys with rotary
    position embedding.

    Backward takes the amax of the projection's output gradient in the pass that puts it together.

    Args:
        x: ``[s, b, h]``, bfloat16 or float32; with sequence parallelism, this rank's part of
            dimension 0. ``[b, s, h]`` with ``heads.batch_first``, without sequence parallelism.
        norm: None where the linear reads x itself; then there is no ``residual``.
        weight, bias: this rank's ``[heads.width, h]`` and ``[heads.width]``, in the layout of
            ``reference/rope.py``; or several of each, one below the other.
        heads: this rank's heads.
        table: from :func:`~coat_dist.flow.rope_table` for the whole sequence; None without rotary
            embedding.
        residual: also return x's alias for the residual connection.

    Returns:
        q ``[s, b, groups * per_group, size]``, k and v ``[s, b, groups, size]`` of x's dtype, for
        the whole sequence, each contiguous (``[b, s, ...]`` with ``heads.batch_first``); with
        ``residual`` also the alias.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    weights, biases = joined(weight, bias)
    _check(x, norm, weights, biases, tp, settings)
    if residual and norm is None:
        raise ValueError(
            "residual: got true without a norm, accepted: false (its backward has nothing to add "
            "to)"
        )
    if x.dim() != 3 or heads.batch_first and tp.sharded:
        raise ValueError(
            f"x: got shape {list(x.shape)}, accepted: [s, b, h], or [b, s, h] without sequence "
            "parallelism"
        )
    rows = x.shape[0] * (tp.size if tp.sharded else 1)
    heads.check((rows, x.shape[1], sum(w.shape[0] for w in weights)), table)
    alias = residual_alias(x, residual)
    options = norm, tp, settings, heads, table, alias, len(weights)
    out = _NormLinear.apply(x, *_parameters(norm), *options, *weights, *biases)
    return out if alias or not residual else (*out, x)


def _parameters(norm: Norm | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _check(
    x: torch.Tensor,
    norm: Norm | None,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor, ...],
    tp: TensorParallel,
    settings: ActivationConfig,
) -> None:
    check_settings(settings)
    for weight in weights:
        check_input(x, weight)
    if norm is not None:
        check_normed(x, norm, tp)
    for weight, bias in zip(weights, biases, strict=False):
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias: got shape {list(bias.shape)}, accepted: {list(weight.shape[:1])}"
            )


class _NormLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x,
        norm_weight,
        norm_bias,
        norm: Norm | None,
        tp: TensorParallel,
        settings: ActivationConfig,
        heads: Heads | None,
        table: RopeTable | None,
        alias: bool,
        count: int,
        *weights_and_biases,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        block_input, y8 = quantized_input(x.reshape(-1, x.shape[-1]), norm, tp, settings)
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.weight = JoinedWeight(weights, tp, settings)
        w8, w_scale = ctx.weight.quantized()
        out = gemm(y8, w8, x.dtype, settings, fast_accum=True)
        block_input.received(y8)
        if biases:
            out += biases[0] if count == 1 else torch.cat(biases)
        cos, sin = (None, None) if table is None else (table.cos, table.sin)
        ctx.save_for_backward(*block_input.save(), w_scale, cos, sin, *weights_and_biases)
        ctx.args = (
            block_input.options(),
            x.shape,
            heads,
            table is not None and table.interleaved,
            count,
            len(biases),
        )
        ctx.set_materialize_grads(False)
        leading = (x.shape[0] * (tp.size if tp.sharded else 1), *x.shape[1:-1])
        out = shaped(out, *leading, out.shape[1])
        outs = (out,) if heads is None else split_rope(out, heads, table)
        if alias:
            outs = (*outs, x.view_as(x))
        return outs if len(outs) > 1 else out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: torch.Tensor | None):
        options, shape, heads, interleaved, n, biased = ctx.args
        tensors = ctx.saved_tensors
        (*saved, w_scale, cos, sin), parameters = tensors[: -n - biased], tensors[-n - biased :]
        weights, biases = parameters[:n], parameters[n:]
        block_input = restore_input(saved, *options)
        tp, settings = block_input.tp, block_input.settings
        dx = dnorm_weight = dnorm_bias = None
        dweights: list[torch.Tensor | None] = [None] * n
        dbiases: list[torch.Tensor | None] = [None] * biased
        want_weights, want_biases = (
            ctx.needs_input_grad[10 : 10 + n],
            ctx.needs_input_grad[10 + n :],
        )
        count = 1 if heads is None else 3
        douts, residual = grads[:count], grads[count] if len(grads) > count else None
        given = [d for d in douts if d is not None]
        if not given:  # the alias alone was used
            return residual, *[None] * (9 + n + biased)
        if heads is None:
            dout, top = given[0], None
        else:
            table = None if cos is None else RopeTable(cos, sin, interleaved)
            dout, top = split_rope_backward(*_no_none(douts, heads), heads, table)
        dout = dout.reshape(-1, dout.shape[-1])
        # Other ranks' rows of y8 come while dgrad is computed, and dgrad's sum is made while wgrad
        # is.
        y8_t = block_input.y8(block_input.x8, transpose=True) if any(want_weights) else None
        d8, d8_t = quantize_gradient(
            dout, tp, settings, gather=False, top=gradient_amax(dout, tp, settings, False, top)
        )
        if any(want_biases):
            sums = dout.sum(
                0, dtype=torch.float64 if settings.tp_invariant else torch.float32
            ).split(ctx.weight.rows)
            dbiases = [
                s.to(b.dtype) if want else None
                for s, b, want in zip(sums, biases, want_biases, strict=True)
            ]
        del dout
        dinput = None
        if any(wanted := ctx.needs_input_grad[:3]):
            dy = summed_gemm(
                d8, ctx.weight.transposed(weights, w_scale), block_input.dtype, tp, settings
            )
            dinput = dy.then(lambda dy: block_input.backward(dy, wanted, residual)).settled()
            del dy
        del d8
        if y8_t is not None:
            dweights = ctx.weight.gradients(d8_t, y8_t.wait(), want_weights)
        if dinput is not None:
            dx, (dnorm_weight, dnorm_bias) = dinput.wait()
            dx = None if dx is None else dx.view(shape)
        return dx, dnorm_weight, dnorm_bias, *[None] * 7, *dweights, *dbiases


def _no_none(
    douts: tuple[torch.Tensor | None, ...], heads: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, zeros for those that nothing used."""
    given = next(d for d in douts if d is not None)
    shapes = [(*given.shape[:2], n, heads.size) for n in heads.counts]
    dq, dk, dv = (
        given.new_zeros(shape) if d is None else d for d, shape in zip(douts, shapes, strict=True)
    )
    return dq, dk, dv
