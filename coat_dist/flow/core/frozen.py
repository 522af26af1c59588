"""Frozen weights as FP8 codes: 1 byte a parameter, and no other copy.

:class:`FrozenWeight` stands where a BF16 parameter stood: as ``linear.weight``, with its shape and
its dtype in name; or of all experts of a layer. It holds codes and row scales, as forward
multiplies them (``Weight.quantized``); dgrad transposes the same codes.

* Moves and copies (``.to``, ``clone``, ``deepcopy``, ``to_empty``) move codes. Another dtype
  changes the dtype that the weight reads back as.
* ``copy_``, and so ``load_state_dict``, quantizes what it is given. Every other change in place is
  refused, but for writes into a view, which is decoded: they are lost.
* Every other operation decodes the weight for as long as it runs; a choice of one expert decodes
  that expert. So evaluation and generation read the codes, and ``save_pretrained`` writes decoded
  values.
* A pickle, and so every checkpoint of ``torch.save``, holds a checksum in place of the codes.
  Loading it compares checksums: a run that resumes on another base is refused.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import warnings
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ...config import CoatConfigError
from ...formats import FORMATS, QuantizedTensor
from ...ops import dequantize, quantize_rows

aten = torch.ops.aten
_MOVES = (
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
)
"""Operations whose result is a FrozenWeight as well."""
_CHECKSUM = 8
"""Bytes of a checksum."""
_RECIPE = (
    "adapters alone, or in another process the base in BF16 "
    "(base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16); "
    "PeftModel.from_pretrained(base, adapters).merge_and_unload())"
)


class FrozenWeight(torch.Tensor):
    """A weight ``[out, in]`` or ``[experts, out, in]`` that never trains, quantized by rows with
    scales that are powers of two.
    """

    packed: torch.Tensor
    """Bytes of the codes, of the fp32 scales of rows, and of the largest scale. One tensor, so that
    whoever broadcasts bytes, as DeepSpeed does, sends all of it. Of an unpickled weight: bytes of
    its checksum.
    """
    format: str
    transposed: bool
    """Whether it stands for ``[experts, in, out]``. Codes are ``[experts, out, in]`` then, too."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: Any,
        packed: Any,
        format: str,
        shape: Any,
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> FrozenWeight:
        weight = cls._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        weight.packed, weight.format, weight.transposed = packed, format, transposed
        return weight

    @staticmethod
    @torch.no_grad()
    def of(values: torch.Tensor, format: str, transposed: bool = False) -> FrozenWeight:
        """Values, quantized, those of one expert after the other.

        Twice: a row whose largest value was rounded down to half of the format's largest gets a
        smaller scale then, with the same values. So decoded values have the same codes again, and
        the same checksum, wherever they were loaded from.
        """
        values, fmt = values.detach(), FORMATS[format]
        rows = values.numel() // values.shape[-2 if transposed else -1]
        size = values.numel() + 4 * rows + 4
        packed = torch.zeros(size, dtype=torch.uint8, device=values.device)
        weight = FrozenWeight(packed, format, values.shape, values.dtype, transposed)
        q8 = weight.q8
        if transposed:
            values = values.mT
        experts = (t.view(-1, *t.shape[-2:]) for t in (values, q8.codes, q8.scales))
        for matrix, codes, scales in zip(*experts, strict=True):
            once = dequantize(quantize_rows(matrix, fmt, aligned=True), values.dtype)
            quantize_rows(once, fmt, True, QuantizedTensor(codes, scales, "row", top=q8.top))
        return weight

    @property
    def q8(self) -> QuantizedTensor:
        """The codes ``[out, in]`` or ``[experts, out, in]``, and their scales of rows."""
        if self.packed.numel() == _CHECKSUM:
            _refuse("a pickle, which has a checksum of weights and no weights", _RECIPE)
        if self.requires_grad:
            _refuse("a weight that is to train after all", "weights that train before patch_model")
        size, (*outer, inputs) = self.numel(), self.shape
        if self.transposed:
            outer[-1], inputs = inputs, outer[-1]
        codes, scales, top = self.packed.split([size, 4 * (size // inputs), 4])
        return QuantizedTensor(
            codes.view(FORMATS[self.format].dtype).view(*outer, inputs),
            scales.view(torch.float32).view(*outer, 1),
            "row",
            top=top.view(torch.float32).view(()),
        )

    def decoded(self, at: Any = ...) -> torch.Tensor:
        """The values, or those ``at`` an index of the first dimension, in a new tensor."""
        _say_once(
            "evaluation, generation, saving and all code outside of the FP8 flow read frozen "
            "weights as their FP8 codes have them; each is decoded while it is read"
        )
        q8 = self.q8
        part = QuantizedTensor(q8.codes[at], q8.scales[at], "row")
        values = dequantize(part, self.dtype)
        return values.mT.contiguous() if self.transposed else values

    def digest(self) -> torch.Tensor:
        """A checksum of codes and scales, in which every byte counts by its place; on the CPU."""
        if self.packed.numel() == _CHECKSUM:
            return self.packed
        places = torch.arange(1, 1 << 22, device=self.device)
        total = places.new_zeros(1)
        for words in self.packed.view(torch.int32).split(len(places)):
            total = 3 * total + (words * places[: len(words)]).sum()
        return total.view(torch.uint8).cpu()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0]
        if isinstance(first, FrozenWeight):
            if func in _MOVES:
                return first._moved(func, *args[1:], **kwargs)
            if func is aten.copy_.default:
                return first._load(args[1])
            if func is aten.view.dtype and args[1] == torch.uint8:
                return first.packed
            if func is aten.select.int and args[1] == 0:
                return first.decoded(args[2])
        given, _ = tree_flatten((args, kwargs))
        name = func._schema.name
        read: Any = FrozenWeight.decoded
        # Collectives change tensors, which their schemas do not say.
        mutable = func._schema.is_mutable or func.namespace == "c10d"
        if name == "c10d::broadcast_":
            read = operator.attrgetter("packed")
        elif mutable and any(isinstance(t, FrozenWeight) for t in given):
            _refuse(f"{name} with a frozen weight", _RECIPE)
        args, kwargs = tree_map_only(FrozenWeight, read, (args, kwargs))
        return func(*args, **kwargs)

    def _moved(
        self, func: Any, *args: Any, dtype: Any = None, memory_format: Any = None, **kwargs: Any
    ) -> FrozenWeight:
        packed = func(self.packed, *args, **kwargs)
        return FrozenWeight(packed, self.format, self.shape, dtype or self.dtype, self.transposed)

    def _load(self, source: torch.Tensor) -> FrozenWeight:
        if isinstance(source, FrozenWeight):
            if source.packed.numel() == _CHECKSUM:
                if not torch.equal(source.packed, self.digest()):
                    _refuse("a checkpoint of a run with other frozen weights", "one with the same")
                return self
            source = source.decoded()
        other = FrozenWeight.of(source.to(self.device), self.format, self.transposed)
        self.packed.copy_(other.packed)
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed"], (self.format, self.shape, self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(inner: Any, options: Any, shape: Any, stride: Any) -> FrozenWeight:
        return FrozenWeight(inner["packed"], *options)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        return memo.setdefault(id(self), torch.nn.Parameter(self.clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _say_once("torch.save writes checksums of frozen weights, not the weights")
        shape = tuple(self.shape)
        return FrozenWeight, (self.digest(), self.format, shape, self.dtype, self.transposed)

    def __setitem__(self, at: Any, value: Any) -> None:
        """Refuses it: torch would copy into the decoded values of this part, and drop them."""
        _refuse("an assignment to a part of a frozen weight", "weight.copy_(values)")

    def contiguous(self, memory_format: Any = None) -> torch.Tensor:
        """The values: ``save_pretrained`` and Accelerate call it for each tensor that they save. A
        checksum stays one: conversion to a universal checkpoint calls it, too.
        """
        return self if self.packed.numel() == _CHECKSUM else self.decoded()

    def is_contiguous(self, memory_format: Any = None) -> bool:
        """Refuses FSDP2, and safetensors for what it did not copy: both ask it, without arguments,
        before they read memory.
        """
        if memory_format is None:
            _refuse("code that reads memory of weights", '"bf16" with FSDP2; weight.contiguous()')
        return super().is_contiguous(memory_format=memory_format)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, FrozenWeight):
            _refuse("other data for a frozen weight", _RECIPE)
        replace(self, value)  # moved or cast, as DeepSpeed casts an fp32 model

    def data_ptr(self) -> int:
        """Tells weights apart, for DeepSpeed and others."""
        return self.packed.data_ptr()

    def storage(self) -> Any:
        """What accelerate and safetensors ask where ``untyped_storage`` has no address."""
        return self.packed.untyped_storage()


torch.serialization.add_safe_globals([FrozenWeight])


def _refuse(what: str, accepted: str) -> NoReturn:
    raise CoatConfigError(
        f'coat.activation.frozen_weights: got "fp8" and {what}, accepted: {accepted}'
    )


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(f"coat_dist: {text}", stacklevel=3)


def replace(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Let a frozen parameter, which its holders go on holding, have other values: of another type
    or device. One that is to train after all stays so, and :attr:`FrozenWeight.q8` refuses it.

    ``torch.utils.swap_tensors`` refuses parameters with weak references, and DeepSpeed has one to
    each.
    """
    other = torch.nn.Parameter(values, parameter.requires_grad)
    parameter.__class__, parameter.__dict__ = type(other), vars(other)
    torch._C._swap_tensor_impl(parameter, other)


def digest_of(model: torch.nn.Module) -> str | None:
    """A checksum of all frozen weights of a model, their names and shapes; None where there are
    none.
    """
    lines = []
    for name, p in model.named_parameters():
        if isinstance(p, FrozenWeight):
            lines.append(f"{name} {list(p.shape)} {p.digest().tolist()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16] if lines else None


def codes_of(weight: torch.Tensor) -> Any:
    """What quantizing reads: the codes of a frozen weight, or another weight itself."""
    return weight.q8 if isinstance(weight, FrozenWeight) else weight
