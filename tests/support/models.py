"""Watch and change what a model does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Adds(TorchDispatchMode):
    """Counts, while it is active, the sums that are BF16 tensors of ``elements`` elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.count += out.dtype == torch.bfloat16 and out.numel() == self.elements
        return out


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes, while this is active."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            # Of subclasses, late logits have no memory.
            if type(t) is torch.Tensor and not (func.is_view or t.is_meta):
                self.elements = max(self.elements, t.numel())
        return out


@contextmanager
def residuals_apart() -> Iterator[None]:
    """Models that are patched inside leave the residual's gradient to autograd, as ZeRO-3's
    hooks make all of them.
    """
    from megatron_patches.patch import recognize

    with mock.patch.object(recognize, "_alias_residual", lambda *_: False):
        yield
