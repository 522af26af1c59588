"""What autograd keeps for backward: the storages behind the tensors that a forward pass saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def saved_for_backward(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Collect the storages that autograd keeps for backward while this context is open, without
    ``model``'s own.

    A view counts with its whole storage, which it keeps alive; a storage counts once. Fake tensors
    count like others.

    Yields:
        Bytes by storage, filled as the forward pass runs.
    """
    found: dict[int, int] = {}
    modules = list(model.modules())
    kept = []  # alive until the end of the forward pass, so that no two storages have one address

    def pack(t: torch.Tensor) -> torch.Tensor:
        # Looked up each time: ZeRO-3 gives a parameter a new storage for every use.
        own = set()
        for module in modules:
            for p in (*module._parameters.values(), *module._buffers.values()):
                if p is not None:
                    own.add(p.untyped_storage()._cdata)
                    # What a frozen weight in FP8 consists of.
                    own.add(getattr(p, "packed", p).untyped_storage()._cdata)
        storage = t.untyped_storage()
        if storage._cdata not in own and storage.nbytes():
            kept.append(storage)
            found[storage._cdata] = storage.nbytes()
        return t

    pack.counts = True  # type: ignore[attr-defined]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            yield found
    finally:
        kept.clear()  # autograd keeps the hook, and backward frees storages one after the other
