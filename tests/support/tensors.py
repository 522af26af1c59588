"""How tensors are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def equal(got: Any, wanted: Any) -> bool:
    """Whether tensors have the same bits, or whatever holds as many of them in the same order or
    under the same keys; all else is compared as Python does.
    """
    tensors = [isinstance(one, torch.Tensor) for one in (got, wanted)]
    if any(tensors):
        return all(tensors) and torch.equal(got, wanted)
    if isinstance(wanted, Mapping):
        return got.keys() == wanted.keys() and all(equal(got[k], wanted[k]) for k in wanted)
    if isinstance(wanted, Iterable) and not isinstance(wanted, str):
        return all(equal(a, b) for a, b in zip(got, wanted, strict=True))
    return bool(got == wanted)
