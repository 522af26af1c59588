"""Values computed once from tensors that every layer of a pass is given, such as tables of
cosines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

__all__ = ["once_per_tensor", "version_of"]

T = TypeVar("T")


class _Made(NamedTuple):
    value: Any
    others: list[TensorWeakRef]
    """The tensors behind the first one."""
    versions: list[int | None]


def version_of(tensor: torch.Tensor) -> int | None:
    """A tensor's count of changes in place; None for a tensor of inference mode, which has no
    count.
    """
    return None if tensor.is_inference() else tensor._version


def once_per_tensor(make: Callable[..., T]) -> Callable[..., T]:
    """``make(*tensors, **options)``, whose result is kept while the first tensor lives.

    It is made again where another tensor is a different one, or any of them was changed in place.
    """
    kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @functools.wraps(make)
    def call(*tensors: torch.Tensor, **options: Hashable) -> T:
        by_options = kept.setdefault(tensors[0], {})
        key, versions = tuple(options.items()), [version_of(t) for t in tensors]
        found = by_options.get(key)
        if (
            found is None
            or found.versions != versions
            or any(ref() is not t for ref, t in zip(found.others, tensors[1:], strict=True))
        ):
            found = by_options[key] = _Made(
                make(*tensors, **options), [TensorWeakRef(t) for t in tensors[1:]], versions
            )
        return found.value

    return call
