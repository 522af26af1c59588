"""The input of a block's column-parallel FP8 linear, what is saved of it, and its backward.

A block begins with a norm (:class:`NormedInput`) or without (:class:`PlainInput`): an expert, whose
tokens come from the router, or a block with the norm behind it. Both have the same methods:
``forward`` makes the FP8 tensor that the linear reads, called y8; ``save`` gives the tensors that
backward needs, in the order of :data:`SAVED`, and ``options`` the rest; ``y8(x8, transpose=True)``
makes wgrad's operand again; ``backward`` turns the gradient of the linear's input into that of x.
:mod:`.input_product` chooses.

**With a norm** the linear reads y = norm(x). Backward needs y8 again for wgrad, and x for the
gradient of the norm. Both come from what is saved: x in per-group FP8 (x8; of LayerNorm x less its
mean), rstd and the per-tensor scale of y8. ``y8()`` is the one function that makes per-tensor y8
out of a source, so in "quantized" mode, where forward's source is x8 too, backward gets the same
bytes. In "exact" mode forward's source is x itself and backward's differs by x8's rounding; the
scale is forward's, so what the rounding carries beyond it saturates. With row scales forward's y8
comes out of the pass that reads x, with other bytes; the scale for backward is the same.

**Without a norm** y is x, and its codes by rows are what the linear reads and what is saved, one
byte an element: in both forward modes backward rounds them again, to one scale. Linears that read
one tensor share its codes (:func:`row_codes`): queries, keys and values, a router's experts and the
shared one. In backward they share wgrad's operand as well, from the first that asks for it to the
last. Where sequence-parallel ranks gather x, or scales are per tensor, x is saved with one scale,
and nothing is shared. Where every weight is frozen and none has an adapter, nothing is saved of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...config import ActivationConfig
from ...formats import FORMATS, QuantizedTensor
from ...ops import (
    NormStats,
    amax,
    dequantize,
    norm_apply,
    norm_backward,
    norm_compress,
    norm_compress_rows,
    norm_quantize,
    quantize_rows,
    quantize_tensor,
)
from ...ops import transpose as transposed
from ..parallel.overlap import Rows
from ..parallel.tensor_parallel import Pending, TensorParallel
from .adapters import Factors
from .norm import Norm, ParameterGrads, finish_grads
from .products import (
    gather_operand,
    reserve_rows,
    row_operand,
    saved_format,
    shared_scale,
    whole,
)
from .weights import weight_changes

SAVED = "x_codes", "x_scales", "rstd", "y_scale", "norm_weight", "norm_bias"
"""The first names that a function saves whose input this is (:class:`~..function.Function`)."""


@dataclass
class NormedInput:
    """The input side of a column-parallel linear: what is saved of it, and y8 from that. x is
    seen as ``[rows, h]``.
    """

    x8: QuantizedTensor
    stats: NormStats
    scale: torch.Tensor
    """Per-tensor scale of y8, fp32 scalar: the same in forward and backward. With row scales the
    largest of them.
    """
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    tp: TensorParallel
    settings: ActivationConfig
    dtype: torch.dtype
    """Of x: what y is gathered in where FP8 gathers are off, and the dtype of dx."""
    kind: str
    reduce_grad: bool

    @classmethod
    def forward(
        cls, x: torch.Tensor, norm: Norm, tp: TensorParallel, settings: ActivationConfig
    ) -> tuple[NormedInput, QuantizedTensor | Rows]:
        """From x ``[rows, h]``: what to save, and y8 ``[all rows, h]``; sequence parallelism
        gathers the rows.

        Give y8 to :meth:`received` after the product.
        """
        fmt, exact = FORMATS[settings.format], settings.forward == "exact"
        given = (
            x,
            norm.kind,
            norm.eps,
            norm.weight,
            norm.bias,
            fmt,
            settings.group_size,
            settings.scale,
            exact,
            saved_format(settings),
        )
        rest = norm.weight, norm.bias, tp, settings, x.dtype, norm.kind, norm.reduce_grad
        if settings.forward_scales != "row":
            found = norm_compress(*given)
            scale = shared_scale(found.amax, fmt, tp, tp.sharded)
            this = cls(found.x8, found.stats, scale, *rest)
            return this, this.y8(x if exact else found.x8).wait()
        rows: QuantizedTensor | Rows
        if tp.sharded and not settings.fp8_gather:
            x8, stats, _ = norm_compress(*given)
            y = norm_apply(x if exact else x8, stats, norm.weight, norm.bias).to(x.dtype)
            rows = quantize_rows(tp.gather_rows(y), fmt, aligned=True)
        else:
            x8, stats, rows = norm_compress_rows(*given, reserve_rows(x, fmt, tp, settings))
            if tp.sharded:
                rows = gather_operand(rows, tp, settings)
        return cls(x8, stats, rows.scales, *rest), rows

    def received(self, y8: QuantizedTensor | Rows) -> None:
        """All rows of y8 are here: with row scales the largest is backward's."""
        if self.settings.forward_scales == "row":
            self.scale = row_operand(whole(y8), self.tp, self.settings).scale

    def y8(
        self, source: torch.Tensor | QuantizedTensor, transpose: bool = False
    ) -> Pending[QuantizedTensor]:
        """y in per-tensor FP8 from x or x8: codes ``[all rows, h]``, or ``[h, all rows]`` if
        ``transpose``.

        A gather is under way; where there is none, nothing is computed before the result is asked
        for.
        """
        fmt, scale = FORMATS[self.settings.format], self.scale
        parameters = self.weight, self.bias
        if not self.tp.sharded:
            return Pending(
                lambda: norm_quantize(source, self.stats, *parameters, fmt, scale, transpose)
            )
        if not self.settings.fp8_gather:
            y = norm_apply(source, self.stats, *parameters).to(self.dtype)
            return _gathered_values(self.tp, y, self.settings, scale, transpose)
        x = source if isinstance(source, torch.Tensor) else source.codes
        room = reserve_rows(x, fmt, self.tp, self.settings, scales=False)
        out = None if room is None else room.codes
        local = norm_quantize(source, self.stats, *parameters, fmt, scale, out=out)
        return _gathered(self.tp, local.codes, scale, transpose)

    def backward(
        self, dy: torch.Tensor, wanted: Sequence[bool], residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ParameterGrads]:
        """Gradients of x (``[rows, h]``) and of the norm's parameters; ``wanted`` says for x,
        weight, bias which.

        ``residual`` is what x's alias received (:func:`residual_alias`), in any shape; x's gradient
        includes it.
        """
        dx, dweight, dbias = norm_backward(
            dy,
            self.x8,
            self.kind,
            self.stats,
            self.weight,
            torch.float64 if self.settings.tp_invariant else torch.float32,
            self.dtype,
            self.bias is not None,
            None if residual is None else residual.reshape(dy.shape),
        )
        grads = finish_grads(
            dweight, dbias, self.weight, self.bias, wanted[1:], self.reduce_grad, self.tp
        )
        return dx if wanted[0] else None, grads

    def factors(self, x: torch.Tensor | None = None) -> Factors:
        """y, the linear's input, for an adapter; in forward from x.

        Raises:
            ValueError: not an RMSNorm.
        """
        if self.kind != "rmsnorm":
            raise ValueError(f"adapters: got a {self.kind} before them, accepted: an rmsnorm")
        if x is None or self.settings.forward != "exact":
            x = dequantize(self.x8, self.dtype)
        return Factors(x, self.stats.rstd, self.weight)

    def save(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors for ``save_for_backward``, parameters included. x8 needs no mean."""
        return (
            self.x8.codes,
            self.x8.scales,
            self.stats.rstd,
            self.scale,
            self.weight,
            self.bias,
        )

    def options(self) -> tuple[Any, ...]:
        """Everything but tensors, for the autograd context."""
        return self.tp.for_backward, self.settings, self.dtype, self.kind, self.reduce_grad


class Readers:
    """Functions that share an input, until their backward has passed. It holds no saved tensor:
    those belong to autograd, which may free them.
    """

    def __init__(self) -> None:
        self.waiting = 0
        """Functions that have not yet asked for wgrad's operand, and may do so."""
        self.operand: QuantizedTensor | None = None


class _Kept(NamedTuple):
    stamp: tuple[int, int]
    """When it was quantized: the tensor's count of changes in place, and ``weight_changes``, since
    steps change parameters through other tensors.
    """
    codes: QuantizedTensor
    readers: Readers


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Storage -> what is kept of the tensors in it, while it lives; or a tensor."""


def row_codes(
    x: torch.Tensor, settings: ActivationConfig
) -> tuple[QuantizedTensor, Readers | None]:
    """x ``[..., h]`` by rows, ``[rows, h]``: quantized once for all that read this tensor, as long
    as it is not changed in place.

    Views of all of x, and what ``detach`` makes of it, are the same tensor if they have a
    ``grad_fn``: ZeRO-3 of DeepSpeed gives each module such an alias. They share the count of
    changes in place. ``.data``, which does not, has no ``grad_fn``.

    Graphs quantize for each reader, and return no :class:`Readers`: a replay runs no Python, which
    would look for earlier codes. So does inference mode, whose tensors do not count changes in
    place.
    """
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or torch.compiler.is_compiling() or x.is_inference():
        return _quantize(x, settings), None
    storage = x.untyped_storage()
    of_owner = _kept.setdefault(x if x.grad_fn is None else storage, {})
    place = storage._cdata, x.storage_offset(), x.is_contiguous() or (x.shape, x.stride())
    key = settings.format, x.dtype, x.numel(), x.shape[-1], place
    found, stamp = of_owner.get(key), (x._version, weight_changes())
    if found is None or found.stamp != stamp:
        found = of_owner[key] = _Kept(stamp, _quantize(x, settings), Readers())
    return found.codes, found.readers


def _quantize(x: torch.Tensor, settings: ActivationConfig) -> QuantizedTensor:
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return quantize_rows(rows, FORMATS[settings.format], aligned=True)


@dataclass
class PlainInput:
    """What is saved of x, seen as ``[rows, h]``, and the linear's input from it."""

    x8: QuantizedTensor
    """This rank's rows. Layout "row", or "tensor" with one scale on all ranks."""
    scale: torch.Tensor
    """Per-tensor scale for backward, fp32 scalar."""
    tp: TensorParallel
    settings: ActivationConfig
    dtype: torch.dtype
    """Of x: what it is gathered in where FP8 gathers are off."""
    readers: Readers | None
    kept: bool
    """Whether backward will ask for x."""

    @classmethod
    def forward(
        cls,
        x: torch.Tensor,
        tp: TensorParallel,
        settings: ActivationConfig,
        kept: bool,
    ) -> tuple[PlainInput, QuantizedTensor]:
        """From x ``[..., h]``: what to save, and the linear's input ``[all rows, h]``, gathered
        if they are split.
        """
        fmt = FORMATS[settings.format]
        if settings.forward_scales == "row" and not tp.sharded:
            y8, readers = row_codes(x, settings)
            if readers is not None:
                readers.waiting += kept
            y8, scale = row_operand(y8, tp, settings)
            return cls(y8, scale, tp, settings, x.dtype, readers, kept), y8
        x = x.reshape(-1, x.shape[-1])
        rest = tp, settings, x.dtype, None, kept
        if settings.forward_scales != "row":
            scale = shared_scale(amax(x), fmt, tp, tp.sharded)
            this = cls(quantize_tensor(x, fmt, scale), scale, *rest)
            return this, this.y8(this.x8).wait()
        rows = quantize_rows(x, fmt, aligned=True)
        if settings.fp8_gather:
            y8 = whole(gather_operand(rows, tp, settings))
        else:
            y8 = quantize_rows(tp.gather_rows(x), fmt, aligned=True)
        y8, scale = row_operand(y8, tp, settings)
        # Rounded twice, as backward of one rank does, so that wgrad has the same bits.
        return cls(quantize_tensor(rows, fmt, scale), scale, *rest), y8

    def received(self, y8: QuantizedTensor | Rows) -> None:
        """As :meth:`NormedInput.received`; all rows were waited for."""

    def y8(self, source: QuantizedTensor, transpose: bool = False) -> Pending[QuantizedTensor]:
        """As :meth:`NormedInput.y8`: codes ``[all rows, h]``, or ``[h, all rows]`` if
        ``transpose``.
        """
        if source.layout == "row":
            return Pending(lambda: self._operand(source))
        if not self.tp.sharded:
            return Pending(lambda: transposed(source) if transpose else source)
        if not self.settings.fp8_gather:  # rounding to BF16 and back gives the same codes
            x = dequantize(source, self.dtype)
            return _gathered_values(self.tp, x, self.settings, source.scales, transpose)
        return _gathered(self.tp, source.codes, source.scales, transpose)

    def _operand(self, rows: QuantizedTensor) -> QuantizedTensor:
        """wgrad's, made by the first function that asks, and let go by the last."""
        readers, operand = self.readers, None
        if readers is not None:
            operand = readers.operand
        if operand is None:
            fmt = FORMATS[self.settings.format]
            operand = quantize_tensor(rows, fmt, self.scale, transpose=True)
        if readers is not None:
            readers.waiting -= 1
            readers.operand = operand if readers.waiting > 0 else None
        return operand

    def backward(
        self, dy: torch.Tensor, wanted: Sequence[bool], residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ParameterGrads]:
        # An alias needs a norm, whose backward adds the residual's gradient.
        assert residual is None
        return dy if wanted[0] else None, ParameterGrads(None, None)

    def factors(self, x: torch.Tensor | None = None) -> Factors:
        """As :meth:`NormedInput.factors`."""
        return Factors(dequantize(self.x8, self.dtype) if x is None else x)

    def save(self) -> tuple[torch.Tensor | None, ...]:
        """As :meth:`NormedInput.save`."""
        if not self.kept:
            return None, None, None, self.scale, None, None
        return self.x8.codes, self.x8.scales, None, self.scale, None, None

    def options(self) -> tuple[Any, ...]:
        """Everything but tensors, for the autograd context."""
        return self.tp.for_backward, self.settings, self.dtype, self.readers, self.kept


def _gathered(
    tp: TensorParallel, codes: torch.Tensor, scale: torch.Tensor, transpose: bool
) -> Pending[QuantizedTensor]:
    """All ranks' rows of codes with one scale, under way; transposed when they have come."""

    def finish(tensors: tuple[torch.Tensor, ...]) -> QuantizedTensor:
        q8 = QuantizedTensor(tensors[0], scale, "tensor")
        return transposed(q8) if transpose else q8

    return tp.start_gather(codes).then(finish)


def _gathered_values(
    tp: TensorParallel,
    values: torch.Tensor,
    settings: ActivationConfig,
    scale: torch.Tensor,
    transpose: bool,
) -> Pending[QuantizedTensor]:
    """The same of rows that travel as they are, and are quantized when they have come."""
    fmt = FORMATS[settings.format]
    return tp.start_gather(values).then(lambda t: quantize_tensor(t[0], fmt, scale, transpose))


def check_normed(x: torch.Tensor, norm: Norm, tp: TensorParallel) -> None:
    """Raises ValueError where a norm cannot feed a column-parallel linear."""
    norm.check(x.shape[-1])
    if norm.reduce_grad and tp.size > 1 and not tp.sequence_parallel:
        raise ValueError(
            "norm.reduce_grad: got true without sequence parallelism, accepted: false there, "
            "because every rank already has the complete gradient after the linear's dgrad is "
            "summed"
        )


def residual_alias(x: torch.Tensor, residual: bool) -> bool:
    """Whether a function of x is to return an alias of x that takes part in its backward: where
    x gets a gradient.
    """
    return residual and torch.is_grad_enabled() and x.requires_grad
