"""The product with which a block begins: (norm →) FP8 linear of one or several weights, with
adapters.

An autograd function that begins so takes x, the norm's parameters and the adapter's under the names
of :data:`ARGUMENTS`, last ``*parameters``: the weights, then their biases. It saves what
:func:`input_product` returns under the names of :data:`SAVED_OF_PRODUCT`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...formats import QuantizedTensor
from ...ops import NormStats
from ..parallel.overlap import rows_of
from ..parallel.tensor_parallel import Pending
from .adapters import ADAPTER, LowRank
from .inputs import SAVED, NormedInput, PlainInput
from .products import gemm, summed_gemm
from .weights import Weight

SAVED_OF_PRODUCT = *SAVED, "w_scale", *ADAPTER


def input_product(
    function: Any,
    ctx: Any,
    call: tuple,
    x: torch.Tensor,
    adapter: LowRank,
    parameters: tuple,
    pieces: Any = (),
) -> tuple[Any, tuple[torch.Tensor | None, ...]]:
    """In forward of ``function``: the product without biases, ``[all rows, out]``, and what is to
    be saved.

    Args:
        call: norm (or None), tp, settings, the number of weights, and more.
        pieces: the first row and the number of rows of each piece; where there are any, on one
            rank and without an adapter, the product is an iterator that makes them one by one.
    """
    norm, tp, settings, count, *_ = call
    block_input: Any
    y8: Any
    if norm is None:
        kept = function.needs(ctx, "a") or any(function.needs(ctx, "parameters")[:count])
        block_input, y8 = PlainInput.forward(x, tp, settings, kept)
    else:
        block_input, y8 = NormedInput.forward(x.reshape(-1, x.shape[-1]), norm, tp, settings)
    ctx.weight = Weight(parameters[:count], tp, settings)
    w8, scale = ctx.weight.quantized()
    out: Any
    if pieces:
        out = (gemm(rows_of(y8, *at), w8, x.dtype, settings, fast_accum=True) for at in pieces)
    else:
        out = gemm(y8, w8, x.dtype, settings, fast_accum=True)
    block_input.received(y8)
    adapter.add(out, lambda: block_input.factors(x))
    ctx.input, ctx.shape, ctx.count = block_input.options(), x.shape, count
    return out, (*block_input.save(), scale, *adapter.save())


class InputProduct:
    """The same product in backward."""

    def __init__(self, function: Any, ctx: Any, saved: Any, parameters: tuple) -> None:
        self.input: Any
        tp, settings, *_ = ctx.input
        if saved.rstd is None:
            by_rows = settings.forward_scales == "row" and not tp.sharded
            x8 = QuantizedTensor(saved.x_codes, saved.x_scales, "row" if by_rows else "tensor")
            self.input = PlainInput(x8, saved.y_scale, *ctx.input)
        else:
            x8 = QuantizedTensor(saved.x_codes, saved.x_scales, "group", settings.group_size)
            norm = NormStats(saved.rstd, None), saved.y_scale, saved.norm_weight, saved.norm_bias
            self.input = NormedInput(x8, *norm, *ctx.input)
        self.adapter = LowRank.restored(saved)
        self.weight = ctx.weight
        self._weights, self._biases = parameters[: ctx.count], parameters[ctx.count :]
        self._scale, self._shape = saved.w_scale, ctx.shape
        wanted = function.needs(ctx, "parameters")
        self._want_weights, self._want_biases = wanted[: ctx.count], wanted[ctx.count :]
        self._want = [function.needs(ctx, name) for name in ("x", "norm_weight", "norm_bias")]
        self.dgrad, self.wgrad = any(self._want), any(self._want_weights)
        self.bias_sum = None
        """The dtype in which the biases' gradients are summed; None where none is wanted."""
        if any(self._want_biases):
            self.bias_sum = torch.float64 if self.input.settings.tp_invariant else torch.float32

    def operand(self) -> Pending[QuantizedTensor] | None:
        """wgrad's operand, other ranks' rows of which are under way."""
        return self.input.y8(self.input.x8, transpose=True) if self.wgrad else None

    def gradients(
        self,
        gradient: list[Any],
        operand: Pending[QuantizedTensor] | None,
        residual: torch.Tensor | None,
        sums: torch.Tensor | None,
    ) -> tuple[Any, Any]:
        """dgrad, the norm's backward and wgrad. dgrad's sum over ranks is made while wgrad is.

        Args:
            gradient: of the output, as :func:`quantize_gradient` returns it; emptied, since the
                peak of a step is here.
            operand: of wgrad.
            residual: what x's alias received.
            sums: of the output's gradient over rows, in ``bias_sum``.

        Returns:
            Gradients of x, the norm's parameters and the adapter; and of weights and biases.
        """
        d8, d8_t = gradient
        gradient.clear()
        block_input, adapter, weight = self.input, self.adapter, self.weight
        dinput, dx, dnorm = None, None, (None, None)
        dweights, dbiases = [None] * len(self._weights), [None] * len(self._biases)
        if sums is not None:
            dbiases = weight.bias_gradients(sums, self._biases, self._want_biases)
        if self.dgrad:
            w8_t = weight.transposed(self._weights, self._scale)
            tp, settings = block_input.tp, block_input.settings
            dy = summed_gemm(d8, w8_t, block_input.dtype, tp, settings)
            del w8_t, d8
            dinput = dy.then(
                lambda dy: block_input.backward(adapter.add_gradient(dy), self._want, residual)
            ).settled()
            del dy
        if operand is not None:
            dweights = weight.gradients(d8_t, operand.wait(), self._want_weights)
        if dinput is not None:
            dx, dnorm = dinput.wait()
            dx = None if dx is None else dx.view(self._shape)
        return (dx, *dnorm, *adapter.gradients(block_input.factors)), (*dweights, *dbiases)
