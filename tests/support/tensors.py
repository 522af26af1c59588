"""How tensors are compared."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["equal"]


def equal(got: Any, wanted: Any) -> bool:
    """Whether tensors, or as many of them in the same order, have the same bits; None is equal to
    None alone.
    """
    if wanted is None or isinstance(wanted, torch.Tensor):
        return got is wanted or got is not None and wanted is not None and torch.equal(got, wanted)
    return all(equal(a, b) for a, b in zip(got, wanted, strict=True))
