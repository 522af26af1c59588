"""Patched modules in a compiled model under ZeRO-3 run as they are; what is around them is compiled.

ZeRO-3 fetches the parameters of a module before it is called, and those that another module uses when Python reads
them: folded norms, fc1 and fc2 are read and not called. Compiled code reads past that, and would find empty tensors.
With ``fp8_weight_gather`` it would find the values that stand for a weight that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["eager_under_zero3"]

Forward = TypeVar("Forward", bound=Callable[..., Any])


def eager_under_zero3(forward: Forward) -> Forward:
    """A ``forward`` that is not compiled where ZeRO-3 divides the module's parameters."""
    eager = torch.compiler.disable(forward, reason="ZeRO-3 fetches parameters of a patched module as Python reads them")

    @functools.wraps(forward)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and any(hasattr(p, "ds_id") for p in self.parameters()):
            return eager(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return either  # type: ignore[return-value]
