"""Frozen weights as FP8 codes: 1 byte a parameter, and no other copy.

:class:`FrozenWeight` stands where a BF16 parameter stood: as ``linear.weight``, with its shape and
its dtype in name. It holds codes and row scales, as forward multiplies them
(``Weight.quantized``); dgrad transposes the same codes.

* Moves and copies (``.to``, ``clone``, ``deepcopy``, ``to_empty``) move codes. Another dtype
  changes the dtype that the weight reads back as.
* ``copy_``, and so ``load_state_dict``, quantizes what it is given. Every other change in place is
  refused.
* Every other operation decodes the weight for as long as it runs. So evaluation and generation
  read the codes, and ``save_pretrained`` writes decoded values.
* A pickle, and so every checkpoint of ``torch.save``, holds a checksum in place of the codes.
  Loading it compares checksums: a run that resumes on another base is refused.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from ...config import CoatConfigError
from ...formats import FORMATS, QuantizedTensor
from ...ops import dequantize, quantize_rows

__all__ = ["FrozenWeight", "codes_of", "digest_of", "replace"]

aten = torch.ops.aten
_MOVES = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
}
"""Operations whose result is a FrozenWeight as well."""
_WORDS = 1 << 22
"""Words of 4 bytes that a checksum reads at a time."""
_RECIPE = (
    "adapters alone, or in another process the base in BF16 "
    "(base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16); "
    "PeftModel.from_pretrained(base, adapters).merge_and_unload())"
)


class FrozenWeight(torch.Tensor):
    """A weight ``[out, in]`` that never trains, quantized by rows with scales that are powers of
    two.
    """

    packed: torch.Tensor
    """Bytes of the codes, of the fp32 scales of rows, and of the largest scale. One tensor, so that
    whoever broadcasts bytes, as DeepSpeed does, sends all of it.
    """
    format: str
    checksum: int | None
    """Of a weight that was unpickled, which has no codes."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: Any,
        packed: torch.Tensor,
        format: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        checksum: int | None = None,
    ) -> FrozenWeight:
        weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=packed.device, requires_grad=False
        )
        weight.packed, weight.format, weight.checksum = packed, format, checksum
        return weight

    @classmethod
    @torch.no_grad()
    def of(cls, values: torch.Tensor, format: str) -> FrozenWeight:
        """Values ``[out, in]``, quantized.

        Twice: a row whose largest value was rounded down to half of the format's largest gets a
        smaller scale then, with the same values. So decoded values have the same codes again, and
        the same checksum, wherever they were loaded from.
        """
        rows, columns = values.shape
        fmt = FORMATS[format]
        size = rows * columns + 4 * rows + 4
        packed = torch.empty(size, dtype=torch.uint8, device=values.device)
        weight = cls(packed, format, values.shape, values.dtype)
        q8 = weight.q8
        q8.top.zero_()
        once = quantize_rows(values.detach(), fmt, aligned=True)
        quantize_rows(dequantize(once, values.dtype), fmt, True, q8)
        return weight

    def thaw(self) -> None:
        """Be a parameter with these values again."""
        values = torch.nn.Parameter(self.decoded(), requires_grad=False)
        del self.packed, self.format, self.checksum
        replace(self, values)

    @property
    def q8(self) -> Any:
        """The codes, and their scales of rows."""
        if self.checksum is not None:
            _refuse("a pickle, which has a checksum of weights and no weights", _RECIPE)
        rows, columns = self.shape
        parts = self.packed.split([rows * columns, 4 * rows, 4])
        codes = parts[0].view(FORMATS[self.format].dtype).view(rows, columns)
        scales, top = (part.view(torch.float32) for part in parts[1:])
        return QuantizedTensor(codes, scales.view(rows, 1), "row", top=top.view(()))

    def decoded(self) -> torch.Tensor:
        """The values, in a new tensor."""
        return dequantize(self.q8, self.dtype)

    def digest(self) -> int:
        """A checksum of codes and scales, in which every byte counts by its place."""
        if self.checksum is not None:
            return self.checksum
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for i, words in enumerate(self.packed.view(torch.int32).split(_WORDS)):
            places = torch.arange(1, len(words) + 1, device=self.device)
            total += (words * (places + i * _WORDS)).sum()
        return int(total)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, first = dict(kwargs or {}), args[0]
        if isinstance(first, FrozenWeight):
            dtype = given.get("dtype") or first.dtype
            if func in _MOVES and dtype.is_floating_point:
                given.pop("dtype", None), given.pop("memory_format", None)
                packed = func(first.packed, *args[1:], **given)
                return FrozenWeight(packed, first.format, first.shape, dtype, first.checksum)
            if func is aten.copy_.default:
                return first._load(args[1])
            if func is aten.view.dtype and args[1] == torch.uint8:
                return first.packed
            if func._schema.is_mutable:
                _refuse(f"{func._schema.name.removeprefix('aten::')} on a frozen weight", _RECIPE)
        _say_once(
            "code outside of the FP8 flow (evaluation, generation, DoRA) reads frozen weights as "
            "their FP8 codes have them; each is decoded while it is read"
        )
        args, given = tree_map_only(FrozenWeight, FrozenWeight.decoded, (args, given))
        return func(*args, **given)

    def _load(self, source: torch.Tensor) -> FrozenWeight:
        if not isinstance(source, FrozenWeight):
            source = FrozenWeight.of(source.expand(self.shape).to(self.device), self.format)
        if source.checksum is None and source.format == self.format:
            self.packed.copy_(source.packed)
        elif source.digest() != self.digest():
            _refuse(
                "a checkpoint of a run with other frozen weights", "one that began with the same"
            )
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed"], (self.format, self.dtype, self.checksum)

    @staticmethod
    def __tensor_unflatten__(inner: Any, options: Any, shape: Any, stride: Any) -> FrozenWeight:
        format, dtype, checksum = options
        return FrozenWeight(inner["packed"], format, shape, dtype, checksum)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        return memo.setdefault(id(self), torch.nn.Parameter(self.clone(), requires_grad=False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _say_once("torch.save writes checksums of frozen weights, not the weights")
        return _without_codes, (self.format, tuple(self.shape), self.dtype, self.digest())

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FrozenWeight({self.format}, {list(self.shape)}, {self.dtype}, {self.device})"

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenWeight:
        if requires_grad:
            _refuse("a weight that is to train after all", "weights that train before patch_model")
        return self

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        _refuse("other memory for a frozen weight (ZeRO-3, or merged adapters)", _RECIPE)

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The values: ``save_pretrained`` and Accelerate call it for each tensor that they save."""
        _say_once("frozen weights are saved with the values of their FP8 codes")
        return self.decoded()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """Refuses FSDP2, and safetensors for what it did not copy: both ask it, without arguments,
        before they read memory.
        """
        if not (args or kwargs):
            _refuse(
                "code that reads the memory of weights", '"bf16" with FSDP2; weight.contiguous()'
            )
        return super().is_contiguous(*args, **kwargs)

    def data_ptr(self) -> int:
        """Tells weights apart, for DeepSpeed and others."""
        return self.packed.data_ptr()

    def storage(self) -> Any:
        """What accelerate and safetensors ask where ``untyped_storage`` has no address."""
        return _Storage(self)


class _Storage:
    """Identity of a weight, for those who look for tensors that share memory."""

    def __init__(self, weight: FrozenWeight) -> None:
        self.data_ptr = weight.data_ptr
        self.size = weight.numel


def _refuse(what: str, accepted: str) -> NoReturn:
    raise CoatConfigError(
        f'coat.activation.frozen_weights: got "fp8" and {what}, accepted: {accepted}'
    )


def _without_codes(format: str, shape: Any, dtype: torch.dtype, checksum: int) -> FrozenWeight:
    packed = torch.empty(0, dtype=torch.uint8, device="meta")
    return FrozenWeight(packed, format, shape, dtype, checksum)


torch.serialization.add_safe_globals([_without_codes])


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(f"coat_dist: {text}", stacklevel=3)


def replace(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """Let a parameter, which its holders go on holding, be ``other``, which nobody else holds.

    ``torch.utils.swap_tensors`` refuses parameters with weak references, and DeepSpeed has one to
    each.
    """
    parameter.__class__ = type(other)
    vars(parameter).update(vars(other))
    torch._C._swap_tensor_impl(parameter, other)


def digest_of(model: torch.nn.Module) -> str | None:
    """A checksum of all frozen weights of a model, their names and shapes; None where there are
    none.
    """
    lines = []
    for name, p in model.named_parameters():
        if isinstance(p, FrozenWeight):
            lines.append(f"{name} {list(p.shape)} {p.digest()}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else None


def codes_of(weight: torch.Tensor) -> Any:
    """What quantizing reads: the codes of a frozen weight, or another weight itself."""
    return weight.q8 if isinstance(weight, FrozenWeight) else weight
