"""Weights of the FP8 products: quantized for forward, transposed for dgrad, and where their
gradient goes.

Every autograd function of the flow handles a weight through one :class:`Weight`, made in forward
and kept in its context: ``quantized()`` for the forward product, ``transposed()`` for dgrad,
``gradient()`` for wgrad.

**Cached codes** (``weights: "cached"``). The codes of forward are kept until the weights change: 1
byte a parameter. Backward transposes them, a quarter of the bytes that quantizing moves. With row
scales codes cannot be transposed, since dgrad sums over these rows: backward quantizes the weight
again. Bits are the same. Codes are dropped

* after every step of any ``torch.optim.Optimizer`` in the process, by a hook that torch offers.
  DeepSpeed and Megatron write their flat buffers through such an optimizer and into the parameters
  after it, without a trace in the parameter: but no forward runs in between, so codes made later
  are made of the new weights;
* where the parameter itself has changed: other storage, other dtype or shape, another version
  counter. So ``load_state_dict`` and plain loops are noticed. This alone would not do: flat buffers
  change none of these;
* by :func:`invalidate_weights`, which ``coat_dist.initialize`` calls, since DeepSpeed broadcasts
  weights there, and ties to the engine's steps and loads.

What is not noticed (docs/flow.md, Weights) does not raise the version counter; who writes so calls
that function.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..config import ActivationConfig
from ..formats import QuantizedTensor, fp8_format
from ..ops import amax, quantize_rows, quantize_tensor, transpose
from .main_grad import into_main_grad, row_blocks
from .parallel.gathered import GatheredWeight
from .parallel.tensor_parallel import TensorParallel
from .products import gemm
from .scaling import Operand, quantize_input, row_operand, shared_scale

__all__ = [
    "JoinedWeight",
    "Weight",
    "Weights",
    "cacheable",
    "from_cache",
    "invalidate_after",
    "invalidate_weights",
    "joined",
    "weight_changes",
]

Weights = torch.Tensor | Sequence[torch.Tensor]
"""A weight, or several of one product; a bias, or one for each of these."""


class Weight:
    """One weight shard ``[out, in]`` in one call of an autograd function.

    Holds the parameter itself, not what ``saved_tensors`` returns for it: under checkpointing and
    offloading that is another tensor, without the attributes of the parameter. Its values are read
    from the saved one.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        tp: TensorParallel,
        settings: ActivationConfig,
        split: bool = False,
    ) -> None:
        """``split``: each rank holds a part of every row (row-parallel), and not some whole rows
        (column-parallel).
        """
        self.parameter = parameter
        self.tp = tp
        self.settings = settings
        self.split = split
        # Weak: a graph that outlives the step keeps no stale codes alive.
        self._cached: weakref.ref[QuantizedTensor] | None = None

    def quantized(self) -> Operand:
        """In FP8 for forward, codes ``[out, in]``. The operand's scale is to be saved for
        :meth:`transposed`.

        Raises:
            ValueError: codes of a parameter that ZeRO-3 partitions were to be cached.
        """
        if (gathered := _gathered(self.parameter)) is not None:
            return _operand(
                gathered.in_layout(self.settings.forward_scales), self.tp, self.settings
            )
        if self.settings.weights == "cached" and cacheable(self.parameter):
            given = self.parameter, self.tp, self.settings, self.split
            shared_by = self.tp.group if self.settings.tp_invariant else None
            operand = from_cache(
                self.parameter,
                self.settings,
                (shared_by, self.split),
                lambda: quantize_input(*given),
            )
            if operand.q8.layout == "tensor":
                self._cached = weakref.ref(operand.q8)
            return operand
        return quantize_input(self.parameter, self.tp, self.settings, self.split)

    def transposed(self, weight: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
        """In per-tensor FP8 for dgrad, codes ``[in, out]``: with per-tensor scales those of
        :meth:`quantized`.

        Args:
            weight, scale: the parameter and forward's scale as ``saved_tensors`` returns them.
        """
        if (gathered := _gathered(self.parameter)) is not None:
            return transpose(gathered.in_layout("tensor"))
        w8 = None if self._cached is None else self._cached()
        if w8 is not None:
            return transpose(w8)
        return quantize_tensor(weight, fp8_format(self.settings.format), scale, transpose=True)

    def gradient(self, d8_t: QuantizedTensor, x8_t: QuantizedTensor) -> torch.Tensor | None:
        """wgrad, ``[out, in]``: what autograd is to be given as the parameter's gradient.

        With ``wgrad: "grad"`` that is the gradient in the parameter's dtype. With ``"main_grad"``
        the gradient is added to ``parameter.main_grad``; see :func:`into_main_grad`.

        Args:
            d8_t: gradient of the product's output, ``[out, rows]``.
            x8_t: input of the product, ``[in, rows]``.

        Raises:
            ValueError: there is no ``main_grad`` that could take it.
        """
        if self.settings.wgrad == "main_grad":
            return into_main_grad(
                self.parameter, lambda out, whole: row_blocks(out, whole, d8_t, x8_t, self.settings)
            )
        return gemm(d8_t, x8_t, self.parameter.dtype, self.settings)


class JoinedWeight:
    """Several weights ``[out_i, in]`` of one product, one below the other: queries, keys and
    values, or gate and up.

    They are joined in FP8 alone: each is quantized into its rows of one buffer, and gets its rows
    of one gradient.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], tp: TensorParallel, settings: ActivationConfig
    ) -> None:
        self.parts = [Weight(p, tp, settings) for p in parameters]
        self.rows = [p.shape[0] for p in parameters]
        self.tp, self.settings = tp, settings
        self._cached: weakref.ref[QuantizedTensor] | None = None

    def quantized(self) -> Operand:
        """As :meth:`Weight.quantized`, ``[sum of out_i, in]``, with one scale for backward."""
        first, *others = (part.parameter for part in self.parts)
        if not others:
            return self.parts[0].quantized()
        if (q8 := self._gathered(self.settings.forward_scales)) is not None:
            return _operand(q8, self.tp, self.settings)
        if self.settings.weights == "cached" and all(cacheable(p) for p in (first, *others)):
            shared_by = self.tp.group if self.settings.tp_invariant else None
            operand = from_cache(first, self.settings, (shared_by, False), self._quantize, others)
            if operand.q8.layout == "tensor":
                self._cached = weakref.ref(operand.q8)
            return operand
        return self._quantize()

    def _quantize(self) -> Operand:
        fmt, parameters = fp8_format(self.settings.format), [part.parameter for part in self.parts]
        first = parameters[0]
        codes = torch.empty(sum(self.rows), first.shape[1], dtype=fmt.dtype, device=first.device)
        if self.settings.forward_scales == "row":
            scales, top = (
                first.new_empty(len(codes), 1, dtype=torch.float32),
                first.new_zeros((), dtype=torch.float32),
            )
            for p, c, s in zip(
                parameters, codes.split(self.rows), scales.split(self.rows), strict=True
            ):
                quantize_rows(p, fmt, True, QuantizedTensor(c, s, "row", top=top))
            return row_operand(
                QuantizedTensor(codes, scales, "row", top=top), self.tp, self.settings
            )
        top = torch.stack([amax(p) for p in parameters]).amax()
        scale = shared_scale(top, fmt, self.tp, self.settings.tp_invariant)
        for p, part in zip(parameters, codes.split(self.rows), strict=True):
            quantize_tensor(p, fmt, scale, out=part)
        return Operand(QuantizedTensor(codes, scale, "tensor"), scale)

    def transposed(self, weights: Sequence[torch.Tensor], scale: torch.Tensor) -> QuantizedTensor:
        """As :meth:`Weight.transposed`, ``[in, sum of out_i]``."""
        if len(weights) == 1:
            return self.parts[0].transposed(weights[0], scale)
        if (q8 := self._gathered("tensor")) is not None:
            return transpose(q8)
        if (w8 := None if self._cached is None else self._cached()) is not None:
            return transpose(w8)
        fmt, first = fp8_format(self.settings.format), weights[0]
        codes = torch.empty(first.shape[1], sum(self.rows), dtype=fmt.dtype, device=first.device)
        for w, part in zip(weights, codes.split(self.rows, 1), strict=True):
            quantize_tensor(w, fmt, scale, True, part)
        return QuantizedTensor(codes, scale, "tensor")

    def _gathered(self, layout: str) -> QuantizedTensor | None:
        """All weights, where ZeRO-3 has gathered some as codes: those of a "tensor" have the
        scale of all.
        """
        gathered = [_gathered(part.parameter) for part in self.parts]
        if not any(gathered):
            return None
        if layout == "row":
            found = [part.quantized().q8 for part in self.parts]
            scales = torch.cat([q8.scales for q8 in found])
        else:
            scales, fmt = (
                next(g for g in gathered if g).in_layout(layout).scales,
                fp8_format(self.settings.format),
            )
            found = [
                g.in_layout(layout) if g else quantize_tensor(part.parameter, fmt, scales)
                for g, part in zip(gathered, self.parts, strict=True)
            ]
        codes = torch.cat([q8.codes.view(torch.uint8) for q8 in found]).view(found[0].codes.dtype)
        return QuantizedTensor(codes, scales, layout)

    def gradients(
        self, d8_t: QuantizedTensor, x8_t: QuantizedTensor, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """As :meth:`Weight.gradient`, of each weight; None for those that are not ``wanted``.

        They are views of the rows of one product, which autograd takes for ``.grad`` without a
        copy.
        """
        dtypes = {part.parameter.dtype for part in self.parts}
        if len(self.parts) == 1:
            return [self.parts[0].gradient(d8_t, x8_t)]
        if all(wanted) and self.settings.wgrad == "grad" and len(dtypes) == 1:
            return list(gemm(d8_t, x8_t, dtypes.pop(), self.settings).split(self.rows))
        rows = [
            QuantizedTensor(codes, d8_t.scales, d8_t.layout)
            for codes in d8_t.codes.split(self.rows)
        ]
        return [
            part.gradient(d8, x8_t) if want else None
            for part, d8, want in zip(self.parts, rows, wanted, strict=True)
        ]


def joined(
    weight: Weights, bias: Weights | None
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Weights of one product and their biases: one bias for each weight, or none at all."""
    weights, biases = (
        () if t is None else (t,) if isinstance(t, torch.Tensor) else tuple(t)
        for t in (weight, bias)
    )
    if biases and len(biases) != len(weights):
        raise ValueError(
            f"bias: got {len(biases)}, accepted: {len(weights)}, one for each weight, or None"
        )
    return weights, biases


def _gathered(parameter: torch.Tensor) -> GatheredWeight | None:
    """The codes that stand for a parameter whose values this rank does not have
    (``flow/parallel/gathered.py``).
    """
    return None if torch.compiler.is_compiling() else getattr(parameter, "coat_gathered", None)


def _operand(q8: QuantizedTensor, tp: TensorParallel, settings: ActivationConfig) -> Operand:
    return row_operand(q8, tp, settings) if q8.layout == "row" else Operand(q8, q8.scales)


class _CachedOperand(NamedTuple):
    stamp: tuple
    storages: list[StorageWeakRef]
    """Of the parameters then. While these references live, no others are taken for them; they
    keep no memory.
    """
    operand: Operand


_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> :class:`_CachedOperand`. Weak and outside of the parameter: copies and pickles of
a model have none.
"""
_changes = 0


def weight_changes() -> int:
    """How often weights of this process may have changed: steps of optimizers, and whatever else
    calls :func:`invalidate_weights`.
    """
    return _changes


def invalidate_weights() -> None:
    """Drop all cached FP8 weights of this process; the next use quantizes again.

    To be called after weights were changed in a way that the cache cannot see, which docs/flow.md
    lists.
    """
    global _changes
    _changes += 1
    _cache.clear()


def invalidate_after(owner: Any, *methods: str) -> None:
    """Call :func:`invalidate_weights` after each call of these methods of one object, those that
    it has.
    """
    for name in methods:
        method = getattr(owner, name, None)
        if callable(method):
            setattr(owner, name, _then_invalidate(method))


def _then_invalidate(method: Any) -> Any:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            invalidate_weights()

    return wrapped


register_optimizer_step_post_hook(lambda *_: invalidate_weights())


def cacheable(parameter: torch.Tensor) -> bool:
    """Whether codes may be kept. Not for tensors without a version counter; nor in CUDA graphs and
    compiled code, where each replay has to quantize the weights as they are at that replay.
    """
    if hasattr(parameter, "ds_id"):
        raise ValueError(
            "activation.weights: got 'cached' with a parameter that ZeRO-3 partitions, accepted: "
            "'on_use' there (the "
            "cache would hold whole weights on every rank)"
        )
    if torch.compiler.is_compiling() or parameter.is_inference():
        return False
    return not (parameter.is_cuda and torch.cuda.is_current_stream_capturing())


def from_cache(
    parameter: torch.Tensor,
    settings: ActivationConfig,
    kind: Any,
    quantize: Callable[[], Operand],
    others: Sequence[torch.Tensor] = (),
) -> Operand:
    """The codes of forward that are kept for ``parameter``, or those that ``quantize`` makes, which
    are kept then.

    Args:
        kind: what ``quantize`` depends on besides the parameters and ``settings``.
        others: further parameters of which the codes are made.
    """
    # The address alone says little: what `p.data = ...` brings may lie where an earlier storage
    # was, in one version.
    parameters = parameter, *others
    storages = [p.untyped_storage() for p in parameters]
    states = [(p.data_ptr(), p._version, p.dtype, p.shape, p.stride()) for p in parameters]
    stamp = (*states, settings.format, settings.forward_scales, kind)
    found = _cache.get(parameter)
    known = [] if found is None else [storage.cdata for storage in found.storages]
    if found is None or found.stamp != stamp or known != [storage._cdata for storage in storages]:
        # Tensors made in inference mode could not be saved for backward later. Leaving it switches
        # gradients on.
        with torch.inference_mode(False), torch.no_grad():
            found = _cache[parameter] = _CachedOperand(
                stamp, [StorageWeakRef(s) for s in storages], quantize()
            )
    return found.operand
