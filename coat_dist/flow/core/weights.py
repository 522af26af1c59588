"""Weights of the FP8 products: quantized for forward, transposed for dgrad, and where their
gradient goes.

Every dense function of the flow handles the weights of one product through one :class:`Weight`,
made in forward and kept in its context: ``quantized()`` for the forward product, ``transposed()``
for dgrad, ``gradients()`` for wgrad. Codes live for one product: a dense layer would gain under 1 %
if they were kept.

**Kept codes** (``weights: "cached"``) are for grouped experts (``blocks/grouped.py``), whose
weights are many and whose products are small: 1 byte a parameter. Codes are dropped

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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ...config import ActivationConfig
from ...formats import FORMATS, QuantizedTensor
from ...ops import amax, quantize_rows, quantize_tensor, transpose
from ..parallel.gathered import GatheredWeight
from ..parallel.tensor_parallel import TensorParallel
from .frozen import FrozenWeight, codes_of
from .main_grad import into_main_grad, row_blocks
from .products import Operand, check_input, gemm, quantize_input, row_operand, shared_scale

Weights = torch.Tensor | Sequence[torch.Tensor]
"""A weight, or several of one product; a bias, or one for each of these."""


class Weight:
    """The weights of one product in one call of an autograd function: one shard ``[out, in]``, or
    several ``[out_i, in]``, one below the other: queries, keys and values, or gate and up.

    Several are joined in FP8 alone: each is quantized into its rows of one buffer, and gets its
    rows of one gradient.

    Holds the parameters themselves, not what ``saved_tensors`` returns for them: under
    checkpointing and offloading those are other tensors, without the attributes of parameters.
    Values are read from the saved ones.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        tp: TensorParallel,
        settings: ActivationConfig,
        split: bool = False,
    ) -> None:
        """``split``: each rank holds a part of every row (row-parallel), and not some whole rows
        (column-parallel).
        """
        self.parameters = parameters
        self.rows = [p.shape[0] for p in parameters]
        self.tp = tp
        self.settings = settings
        self.split = split

    def quantized(self) -> Operand:
        """In FP8 for forward, codes ``[out, in]``. The operand's scale, one for all weights, is to
        be saved for :meth:`transposed`.
        """
        tp, settings, parameters = self.tp, self.settings, self.parameters
        by_rows = settings.forward_scales == "row"
        gathered = self._gathered(settings.forward_scales)
        if gathered is not None:
            return (
                row_operand(gathered, tp, settings)
                if by_rows
                else Operand(gathered, gathered.scales)
            )
        first, fmt = parameters[0], FORMATS[settings.format]
        if any(isinstance(p, FrozenWeight) for p in parameters):
            parts = []
            for p in map(codes_of, parameters):
                parts.append(p if isinstance(p, QuantizedTensor) else quantize_rows(p, fmt, True))
            return row_operand(stacked(parts), tp, settings)
        if len(parameters) == 1:
            return quantize_input(first, tp, settings, self.split)
        codes = torch.empty(sum(self.rows), first.shape[1], dtype=fmt.dtype, device=first.device)
        rows = codes.split(self.rows)
        if by_rows:
            scales = first.new_empty(len(codes), 1, dtype=torch.float32)
            top = first.new_zeros((), dtype=torch.float32)
            for p, c, s in zip(parameters, rows, scales.split(self.rows), strict=True):
                quantize_rows(p, fmt, True, QuantizedTensor(c, s, "row", top=top))
            return row_operand(QuantizedTensor(codes, scales, "row", top=top), tp, settings)
        top = torch.stack([amax(p) for p in parameters]).amax()
        scale = shared_scale(top, fmt, tp, settings.tp_invariant)
        for p, part in zip(parameters, rows, strict=True):
            quantize_tensor(p, fmt, scale, out=part)
        return Operand(QuantizedTensor(codes, scale, "tensor"), scale)

    def transposed(self, weights: Sequence[torch.Tensor], scale: torch.Tensor) -> QuantizedTensor:
        """In per-tensor FP8 for dgrad, codes ``[in, out]``: with per-tensor scales those of
        :meth:`quantized`.

        Args:
            weights, scale: the parameters and forward's scale as ``saved_tensors`` returns them.
        """
        if (gathered := self._gathered("tensor")) is not None:
            return transpose(gathered)
        fmt, first = FORMATS[self.settings.format], weights[0]
        if len(weights) == 1:
            return quantize_tensor(codes_of(first), fmt, scale, transpose=True)
        codes = torch.empty(first.shape[1], sum(self.rows), dtype=fmt.dtype, device=first.device)
        for w, part in zip(weights, codes.split(self.rows, 1), strict=True):
            quantize_tensor(codes_of(w), fmt, scale, True, part)
        return QuantizedTensor(codes, scale, "tensor")

    def _gathered(self, layout: str) -> QuantizedTensor | None:
        """The codes that stand for weights whose values this rank does not have
        (``parallel/gathered.py``), together with those of the others; None where it has all.
        """
        if torch.compiler.is_compiling():
            return None
        weights = [getattr(p, "coat_gathered", None) for p in self.parameters]
        some: GatheredWeight | None = next((w for w in weights if w is not None), None)
        if some is None:
            return None
        fmt, scales, found = FORMATS[self.settings.format], some.in_layout(layout).scales, []
        for weight, parameter in zip(weights, self.parameters, strict=True):
            if weight is not None:
                found.append(weight.in_layout(layout))
            elif layout == "row":
                found.append(quantize_rows(parameter, fmt, aligned=True))
            else:
                found.append(quantize_tensor(parameter, fmt, scales))
        return stacked(found)

    def gradients(
        self, d8_t: QuantizedTensor, x8_t: QuantizedTensor, wanted: Sequence[bool] = (True,)
    ) -> list[torch.Tensor | None]:
        """wgrad, ``[out, in]``: what autograd is to be given as each parameter's gradient; None for
        those that are not ``wanted``.

        With ``wgrad: "grad"`` that is the gradient in the parameter's dtype: views of the rows of
        one product, which autograd takes for ``.grad`` without a copy. With ``"main_grad"`` the
        gradient is added to ``parameter.main_grad``; see :func:`into_main_grad`.

        Args:
            d8_t: gradient of the product's output, ``[out, rows]``.
            x8_t: input of the product, ``[in, rows]``.

        Raises:
            ValueError: there is no ``main_grad`` that could take it.
        """
        settings, dtypes = self.settings, {p.dtype for p in self.parameters}
        if settings.wgrad == "grad" and len(dtypes) == 1 and all(wanted):
            whole = gemm(d8_t, x8_t, dtypes.pop(), settings)
            return [whole] if len(self.rows) == 1 else list(whole.split(self.rows))
        found: list[torch.Tensor | None] = []
        parts = d8_t.codes.split(self.rows)
        for parameter, codes, want in zip(self.parameters, parts, wanted, strict=True):
            d8 = QuantizedTensor(codes, d8_t.scales, d8_t.layout)
            if not want:
                found.append(None)
            elif settings.wgrad == "grad":
                found.append(gemm(d8, x8_t, parameter.dtype, settings))
            else:
                products = functools.partial(row_blocks, d8_t=d8, x8_t=x8_t, settings=settings)
                found.append(into_main_grad(parameter, products))
        return found

    def bias_gradients(
        self, sums: torch.Tensor, biases: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradient of each bias that is wanted, from the sums ``[out]`` over rows."""
        found: list[torch.Tensor | None] = []
        for part, bias, want in zip(sums.split(self.rows), biases, wanted, strict=True):
            found.append(part.to(bias.dtype) if want else None)
        return found


def stacked(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Tensors of one layout, one below the other; of layout "tensor" with one scale for all."""
    first = parts[0]
    if len(parts) == 1:
        return first
    scales = first.scales
    if first.layout != "tensor":
        scales = torch.cat([q8.scales for q8 in parts])
    codes = torch.cat([q8.codes.view(torch.uint8) for q8 in parts]).view(first.codes.dtype)
    return QuantizedTensor(codes, scales, first.layout, first.group_size)


def joined_biases(biases: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The biases of one product as one tensor; None where there are none."""
    if len(biases) < 2:
        return biases[0] if biases else None
    return torch.cat(tuple(biases))


def joined(
    x: torch.Tensor, weight: Weights, bias: Weights | None, part: str = ""
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Weights of one product with x and their biases: one bias for each weight, or none at all.

    Raises:
        ValueError: a shape or dtype that does not fit; names the argument, behind ``part``.
    """
    weights = (weight,) if isinstance(weight, torch.Tensor) else tuple(weight)
    biases: tuple[torch.Tensor, ...] = ()
    if isinstance(bias, torch.Tensor):
        biases = (bias,)
    elif bias is not None:
        biases = tuple(bias)
    if biases and len(biases) != len(weights):
        raise ValueError(
            f"{part}bias: got {len(biases)}, accepted: {len(weights)}, one for each weight, or None"
        )
    for one in weights:
        check_input(x, one, f"{part}weight")
    for one, own in zip(weights, biases, strict=False):
        if own.shape != one.shape[:1]:
            raise ValueError(
                f"{part}bias: got shape {list(own.shape)}, accepted: {list(one.shape[:1])}"
            )
    return weights, biases


class _CachedOperand(NamedTuple):
    stamp: tuple
    storage: StorageWeakRef
    """Of the parameter then. While this reference lives, no other storage is taken for it; it keeps
    no memory.
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
    """Drop all kept FP8 weights of this process; the next use quantizes again.

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
            "'on_use' there (the cache would hold whole weights on every rank)"
        )
    if torch.compiler.is_compiling() or parameter.is_inference():
        return False
    return not (parameter.is_cuda and torch.cuda.is_current_stream_capturing())


def from_cache(
    parameter: torch.Tensor,
    settings: ActivationConfig,
    kind: Any,
    quantize: Callable[[], Operand],
) -> Operand:
    """The codes of forward that are kept for ``parameter``, or those that ``quantize`` makes, which
    are kept then.

    Args:
        kind: what ``quantize`` depends on besides the parameter and ``settings``.
    """
    # The address alone says little: what `p.data = ...` brings may lie where an earlier storage
    # was, in one version.
    storage = parameter.untyped_storage()
    stamp = (
        parameter.data_ptr(),
        parameter._version,
        parameter.dtype,
        parameter.shape,
        parameter.stride(),
        settings.format,
        settings.forward_scales,
        kind,
    )
    found = _cache.get(parameter)
    if found is None or found.stamp != stamp or found.storage.cdata != storage._cdata:
        # Tensors made in inference mode could not be saved for backward later. Leaving it switches
        # gradients on.
        with torch.inference_mode(False), torch.no_grad():
            found = _cache[parameter] = _CachedOperand(stamp, StorageWeakRef(storage), quantize())
    return found.operand
