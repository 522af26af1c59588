"""FP8 linears: row-parallel; (norm →) column-parallel, for attention also with the split into
rotated heads. And the BF16 output layer that sums the same way on any number of ranks.

A column-parallel one saves per token x8, with a norm also its group scales and rstd; per call: one
scale of y8, one of the weight, and a reference to the table of cosines and sines, which all layers
share. Not saved: y, y8, any copy of the weight.

With ``residual`` :func:`norm_qkv` returns x once more, as an alias for the residual connection. Its
gradient arrives in the same backward as that of the product, and the pass that computes the norm's
gradient adds it, in fp32 and before the one rounding: autograd has nothing left to add. The alias
is a view of x and costs no memory. Autograd refuses to change it in place. Where x gets no
gradient, it is x itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...config import ActivationConfig
from ...formats import FORMATS, QuantizedTensor
from ...ops import (
    HeadNorms,
    Heads,
    RopeTable,
    dequantize,
    exact_mm,
    quantize_tensor,
    split_rope,
    split_rope_backward,
)
from ..core.adapters import ADAPTER, Adapters, Factors, LowRank, joined_adapters
from ..core.input_product import SAVED_OF_PRODUCT, InputProduct, input_product
from ..core.inputs import check_normed, residual_alias
from ..core.norm import Norm, parameters_of
from ..core.products import (
    check_input,
    gemm,
    gradient_amax,
    quantize_gradient,
    quantize_input,
    summed_gemm,
)
from ..core.weights import Weight, Weights, joined, joined_biases
from ..function import Function, check_settings, shaped, version_of
from ..parallel.tensor_parallel import TensorParallel

_hooks: Any = torch._C._autograd
_hooks_are_disabled: Any = _hooks._saved_tensors_hooks_get_disabled_error_message


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tp: TensorParallel,
    settings: ActivationConfig,
    compressed: QuantizedTensor | None = None,
    adapters: Adapters = (),
) -> torch.Tensor:
    """``x @ weight.T`` with an FP8 product, split over ranks by input features.

    Saves an alias of x, which its producer keeps anyway (attention keeps its output), and two
    scales.

    Args:
        x: ``[..., k / tp]``, bfloat16 or float32, the whole sequence.
        weight: this rank's ``[n, k / tp]``.
        compressed: x by groups, saved in x's place; x must be exactly what it reads back as
            (:func:`~coat_dist.flow.attention` returns both). Where its scales are powers of two and
            its format is that of the product, codes change exponents and are not rounded again,
            unless they become subnormal.
        adapters: those of the weight, a sequence of one sequence; on one rank alone.

    Returns:
        ``[..., n]`` of x's dtype, summed over ranks; with sequence parallelism this rank's share of
        dimension 0.

    Raises:
        ValueError: a shape or dtype that does not fit; names the argument.
    """
    check_settings(settings)
    check_input(x, weight)
    if tp.sharded and x.shape[0] % tp.size:
        raise ValueError(
            f"x: got a sequence of {x.shape[0]}, accepted: a multiple of {tp.size}, its ranks"
        )
    codes, scales, group_size = None, None, 0
    if compressed is not None:
        codes, scales, group_size = compressed.codes, compressed.scales, compressed.group_size
        if compressed.layout != "group" or codes.numel() != x.numel():
            got = f"layout {compressed.layout!r}, {list(codes.shape)}"
            raise ValueError(
                f"compressed: got {got}, accepted: layout 'group' with the elements of x, "
                f"{list(x.shape)}"
            )
    adapter = joined_adapters(x, (weight,), adapters, tp)
    return _Linear.apply(x, weight, codes, scales, group_size, tp, settings, *adapter)


class _Linear(Function):
    saves = "x", "weight", "x_scale", "w_scale", "codes", "scales", *ADAPTER

    @staticmethod
    def forward(
        ctx: Any,
        x,
        weight,
        codes,
        scales,
        group_size: int,
        tp: TensorParallel,
        settings: ActivationConfig,
        a,
        b,
        dropout,
    ) -> torch.Tensor:
        x8, x_scale = quantize_input(x.reshape(-1, x.shape[-1]), tp, settings, True)
        ctx.weight = Weight((weight,), tp, settings, split=True)
        w8, w_scale = ctx.weight.quantized()
        kept = x if codes is None else None
        ctx.shape, ctx.dtype, ctx.group_size = x.shape, x.dtype, group_size
        ctx.tp, ctx.settings = tp.for_backward, settings
        out = summed_gemm(x8, w8, x.dtype, tp, settings, fast_accum=True).wait()
        adapter = LowRank(a, b, dropout)
        adapter.add(out, lambda: Factors(x))
        saved = kept, weight, x_scale, w_scale, codes, scales, *adapter.save()
        ctx.save_for_backward(*_Linear.Saved(*saved))
        rows = x.shape[0] // tp.size if tp.sharded else x.shape[0]
        return shaped(out, rows, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor):
        saved, _ = _Linear.saved(ctx)
        tp, settings, weight, w8_t = ctx.tp, ctx.settings, saved.weight, None
        dx = dweight = None
        wgrad, adapter = _Linear.needs(ctx, "weight"), LowRank.restored(saved)
        dout = dout.reshape(-1, weight.shape[0])
        adapter.receive(dout)
        top = gradient_amax(dout, tp, settings, gather=True)
        if _Linear.needs(ctx, "x"):  # while ranks agree on the scale
            w8_t = ctx.weight.transposed((weight,), saved.w_scale)
        d8, d8_t = quantize_gradient(dout, tp, settings, True, top, wgrad)
        if w8_t is not None:
            dx = adapter.add_gradient(gemm(d8, w8_t, ctx.dtype, settings)).view(ctx.shape)
        del w8_t
        del d8

        def source() -> Factors:
            if saved.x is not None:
                return Factors(saved.x)
            x8 = QuantizedTensor(saved.codes, saved.scales, "group", ctx.group_size)
            return Factors(dequantize(x8, ctx.dtype).view(ctx.shape))

        if wgrad:
            x, fmt = source().values, FORMATS[settings.format]
            x8_t = quantize_tensor(x, fmt, saved.x_scale, transpose=True)
            (dweight,) = ctx.weight.gradients(d8_t, x8_t)
        return dx, dweight, *[None] * 5, *adapter.gradients(source)


def norm_linear(
    x: torch.Tensor,
    norm: Norm | None,
    weight: Weights,
    bias: Weights | None,
    tp: TensorParallel,
    settings: ActivationConfig,
    adapters: Adapters = (),
) -> torch.Tensor:
    """``norm(x) @ weight.T + bias`` with an FP8 product, split over ranks by output features.

    Args:
        x: ``[..., h]``, bfloat16 or float32; with sequence parallelism, dimension 0 is this rank's
            part of it.
        norm: None where the linear reads x itself.
        weight, bias: this rank's ``[n / tp, h]`` and ``[n / tp]``; or several of each, one below
            the other, whose n add up.
        adapters: those of each weight, on one rank alone.

    Returns:
        ``[..., n / tp]`` of x's dtype, for the whole sequence.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    check_settings(settings)
    if norm is not None:
        check_normed(x, norm, tp)
    weights, biases = joined(x, weight, bias)
    adapter = joined_adapters(x, weights, adapters, tp)
    call = norm, tp, settings, len(weights), None, None, None, False
    return _NormLinear.apply(call, None, x, *parameters_of(norm), *adapter, *weights, *biases)


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
    head_norms: HeadNorms | None = None,
    adapters: Adapters = (),
) -> tuple[torch.Tensor, ...]:
    """:func:`norm_linear` for attention: queries, keys and values, the first two with norms of
    their heads and rotary position embedding.

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
        head_norms: RMSNorms of queries and keys before the rotation. The projection's output is
            saved then, and v lies in it. Gradients of their weights are of this rank's heads.
        adapters: those of each weight, on one rank alone.

    Returns:
        q ``[s, b, groups * per_group, size]``, k and v ``[s, b, groups, size]`` of x's dtype, for
        the whole sequence, each contiguous, but for v with ``head_norms`` (``[b, s, ...]`` with
        ``heads.batch_first``); with ``residual`` also the alias.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    check_settings(settings)
    if norm is not None:
        check_normed(x, norm, tp)
    weights, biases = joined(x, weight, bias)
    if x.dim() != 3 or heads.batch_first and tp.sharded:
        raise ValueError(
            f"x: got shape {list(x.shape)}, accepted: [s, b, h], or [b, s, h] without sequence "
            "parallelism"
        )
    rows = x.shape[0] * (tp.size if tp.sharded else 1)
    heads.check((rows, x.shape[1], sum(w.shape[0] for w in weights)), table)
    alias = residual_alias(x, residual)
    adapter = joined_adapters(x, weights, adapters, tp)
    gains = None
    if head_norms is not None:
        gains = head_norms.weights
        if gains.shape != (2, heads.size):
            raise ValueError(
                f"head_norms: got weights {list(gains.shape)}, accepted: {[2, heads.size]}"
            )
    call = norm, tp, settings, len(weights), heads, table, head_norms, alias
    out = _NormLinear.apply(call, gains, x, *parameters_of(norm), *adapter, *weights, *biases)
    return out if alias or not residual else (*out, x)


class _NormLinear(Function):
    saves = *SAVED_OF_PRODUCT, "cos", "sin", "mixed", "gains"

    @staticmethod
    def forward(
        ctx: Any, call: tuple, gains, x, norm_weight, norm_bias, a, b, dropout, *parameters
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        _, tp, _, count, heads, table, head_norms, alias = call
        adapter = LowRank(a, b, dropout)
        out, saved = input_product(_NormLinear, ctx, call, x, adapter, parameters)
        if (bias := joined_biases(parameters[count:])) is not None:
            out += bias
        cos, sin = (None, None) if table is None else (table.cos, table.sin)
        ctx.heads, ctx.interleaved = heads, table is not None and table.interleaved
        ctx.set_materialize_grads(False)
        rows = x.shape[0] * tp.size if tp.sharded else x.shape[0]
        out = shaped(out, rows, *x.shape[1:-1], out.shape[1])
        outs: tuple[torch.Tensor, ...] = (out,)
        mixed = None
        if heads is not None:
            outs = split_rope(out, heads, table, head_norms)
        if head_norms is not None:
            mixed, ctx.eps = out, head_norms.eps
            # Autograd refuses to change a view in place. Backward does not read these elements.
            outs = *outs[:2], out.new_empty(0).set_(outs[2])  # type: ignore[call-overload]
        kept = _NormLinear.Saved(*saved, cos, sin, mixed, gains)
        ctx.save_for_backward(*kept, *parameters)
        if alias:
            outs = (*outs, x.view_as(x))
        return outs if len(outs) > 1 else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        saved, parameters = _NormLinear.saved(ctx)
        heads = ctx.heads
        outputs = 1 if heads is None else 3
        douts, residual = grads[:outputs], grads[outputs] if len(grads) > outputs else None
        if all(d is None for d in douts):  # the alias alone was used
            return None, None, residual, *[None] * (5 + len(parameters))
        product = InputProduct(_NormLinear, ctx, saved, parameters)
        tp, settings = product.input.tp, product.input.settings
        dgains = None
        if heads is None:
            (dout,), top = douts, None
            assert dout is not None
        else:
            table = None if saved.cos is None else RopeTable(saved.cos, saved.sin, ctx.interleaved)
            norms = None if saved.gains is None else HeadNorms(saved.gains, ctx.eps)
            rest: Any = heads, table, norms, saved.mixed
            used = next(d for d in douts if d is not None)
            dqkv: Any = []
            for d, count in zip(douts, heads.counts, strict=True):
                dqkv.append(used.new_zeros(*used.shape[:2], count, heads.size) if d is None else d)
            dout, top, dgains = split_rope_backward(*dqkv, *rest)
            del used, d, dqkv
        dout = dout.reshape(-1, dout.shape[-1])
        y8_t = product.operand()
        agreed = gradient_amax(dout, tp, settings, False, top)
        gradient = quantize_gradient(dout, tp, settings, False, agreed, product.wgrad)
        sums = None
        if product.bias_sum is not None:
            sums = dout.sum(0, dtype=product.bias_sum)
        product.adapter.receive(dout)
        del dout, douts
        dinput, dparameters = product.gradients(gradient, y8_t, residual, sums)
        return None, dgains, *dinput, *dparameters


@contextmanager
def heads_again(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Heads,
    table: RopeTable | None,
    head_norms: HeadNorms,
) -> Iterator[None]:
    """While this is open, autograd keeps neither q nor k that :func:`norm_qkv` returned with these
    arguments. Backward makes them again, to the bit, from the projection's output, which is saved
    anyway. What was changed in place is kept, as is all else.

    Nothing happens inside of other hooks of saved tensors, but those that count: of checkpoints,
    and what moves tensors to the host, which expect each tensor once.
    """
    outer = _hooks._top_saved_tensors_default_hooks(True)
    if outer is not None and not hasattr(outer[0], "counts") or _hooks_are_disabled():
        yield
        return
    mixed = v.detach().as_strided((*v.shape[:2], heads.width), (v.stride(0), v.stride(1), 1), 0)
    assert mixed.nbytes == v.untyped_storage().nbytes()
    norms = HeadNorms(head_norms.weights.detach(), head_norms.eps)
    again = _HeadsAgain(
        (q, k), lambda: split_rope(mixed, heads, table, norms)[:2], outer and outer[0]
    )
    with saved_tensors_hooks(again.pack, again.unpack):
        yield


class _HeadsAgain:
    def __init__(
        self,
        known: Sequence[torch.Tensor],
        make: Callable[[], Sequence[torch.Tensor]],
        count: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        self._known = [self._key(t) for t in known]
        self._make, self._count = make, count
        self._made: dict[int, torch.Tensor] = {}

    def _key(self, t: torch.Tensor) -> tuple[Any, ...]:
        return t.untyped_storage()._cdata, t.dtype, version_of(t)

    def pack(self, t: torch.Tensor) -> tuple[int | None, Any]:
        key = self._key(t)
        if key not in self._known:
            if self._count is not None:
                self._count(t)
            # Not t itself: an output would keep its node, which keeps it.
            return None, (t.detach(), version_of(t))
        return self._known.index(key), (t.shape, t.stride(), t.storage_offset())

    def unpack(self, kept: tuple[int | None, Any]) -> torch.Tensor:
        place, rest = kept
        if place is None:
            t, version = rest
            if version_of(t) != version:  # autograd does not look where there are hooks
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {list(t.shape)}, saved by attention"
                )
            return t
        if place not in self._made:
            self._made = dict(enumerate(self._make()))
        return self._made.pop(place).as_strided(*rest)


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """``x @ weight.T`` without FP8, split over ranks by output features, with sums in fp64.

    For the output layer where losses must not depend on the tensor-parallel size: every product and
    the sum of dgrad over ranks are rounded once (fp32, then the dtype of x or weight). Slow on
    GPUs; meant for verification.

    Args:
        x: ``[..., h]``, bfloat16 or float32; with sequence parallelism, dimension 0 is this rank's
            part of it.
        weight: this rank's ``[n / tp, h]``.

    Returns:
        ``[..., n / tp]`` of x's dtype, for the whole sequence.

    Raises:
        ValueError: a shape or dtype that does not fit; names the argument.
    """
    check_input(x, weight)
    return _InvariantLinear.apply(x, weight, tp)


class _InvariantLinear(Function):
    saves = "x", "weight"

    @staticmethod
    def forward(ctx: Any, x, weight, tp: TensorParallel) -> torch.Tensor:
        ctx.save_for_backward(*_InvariantLinear.Saved(x, weight))
        ctx.tp = tp
        out = exact_mm(tp.all_rows(x), weight)
        rows = x.shape[0] * tp.size if tp.sharded else x.shape[0]
        return shaped(out.float().to(x.dtype), rows, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor):
        (x, weight), _ = _InvariantLinear.saved(ctx)
        tp = ctx.tp
        dx = dweight = None
        dout = dout.reshape(-1, weight.shape[0])
        if _InvariantLinear.needs(ctx, "x"):
            partial = exact_mm(dout, weight.t())
            total = tp.reduce_scatter_rows(partial) if tp.sharded else tp.sum(partial)
            dx = total.float().to(x.dtype).view(x.shape)
        if _InvariantLinear.needs(ctx, "weight"):
            dweight = exact_mm(dout.t(), tp.all_rows(x).t()).float().to(weight.dtype)
        return dx, dweight, None
