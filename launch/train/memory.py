"""What a step holds, measured on the engine: parameters, gradients, master weights, moments, activations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["MemoryReport", "saved_for_backward"]


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Every tensor in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner, depth - 1)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage by its address."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().nbytes()
    }


@contextlib.contextmanager
def saved_for_backward(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Collect the storages that autograd keeps for backward while this context is open, without ``model``'s parameters.

    A view counts with its whole storage, for it keeps all of it alive; a storage counts once.

    Yields:
        Bytes by storage address, filled as the forward pass runs.
    """
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Looked up anew each time: ZeRO-3 gives a parameter a new storage for every use.
        known = _storages(p.data for p in model.parameters())
        found.update({k: v for k, v in _storages([tensor]).items() if k not in known})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class MemoryReport:
    """Watches the first step that changes the weights and makes a table of it.

    Call order: ``with forward()`` around the first forward pass, :meth:`backward_done` before the engine's step,
    :meth:`step_done` after it.
    """

    def __init__(self, engine: Any, tokens_per_micro_batch: int) -> None:
        self._engine, self._tokens = engine, tokens_per_micro_batch
        self._rows: dict[str, tuple[int, int]] = {}
        """Bytes and elements by name."""

    @contextlib.contextmanager
    def forward(self, tokens: int | None = None) -> Iterator[None]:
        """Measure what this forward pass saves for backward.

        Args:
            tokens: that it has, padding included; None = ``tokens_per_micro_batch``.
        """
        with saved_for_backward(self._engine.module) as found:
            yield
        self._rows["activations"] = sum(found.values()), self._tokens if tokens is None else tokens

    def backward_done(self) -> None:
        """Measure the gradients that wait for the step."""
        optimizer = self._engine.optimizer
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        for name, value in vars(optimizer).items():
            # Each ZeRO stage has its own name for them: averaged_gradients, grad_partitions_flat_buffer, ...
            if "grad" in name:
                gradients += [
                    t for t in _tensors(value) if t.is_floating_point() and not isinstance(t, torch.nn.Parameter)
                ]
        self._rows["gradients"] = _measure(gradients)

    def step_done(self) -> None:
        """Measure what stays between steps. Of master weights that share memory with parameters, the remainders."""
        optimizer = self._engine.optimizer
        self._rows["parameters"] = _measure(self._parameters())
        master = next(
            getattr(optimizer, name)
            for name in (
                "single_partition_of_fp32_groups",
                "fp32_partitioned_groups_flat",
                "fp32_groups_flat_partition",
            )
            if hasattr(optimizer, name)
        )
        states = optimizer.optimizer.state.values()
        low = [s["coat_p_low"] for s in states if "coat_p_low" in s]
        weights = _storages(self._parameters())
        own = [t for t in (*_tensors(master), *low) if t.untyped_storage().data_ptr() not in weights]
        count = sum(t.numel() for t in _tensors(master))
        self._rows["master weights"] = sum(_storages(own).values()), count
        state = [t for s in states for k, t in s.items() if k != "coat_p_low" and isinstance(t, torch.Tensor)]
        self._rows["optimizer moments"] = sum(_storages(t for t in state if t.numel() > 1).values()), count

    def table(self) -> str:
        """The table: bytes of this rank, elements they belong to, bytes an element (a token for activations)."""
        lines = [f"{'memory of this rank':<34}{'MiB':>12}{'elements':>16}{'bytes/element':>15}"]
        for name, unit in (
            ("parameters", ""),
            ("gradients", ""),
            ("master weights", ""),
            ("optimizer moments", ""),
            ("activations", " (saved for backward)"),
        ):
            if name in self._rows:
                size, count = self._rows[name]
                what = f"{count:>9,} tokens" if unit else f"{count:,}"
                lines.append(f"  {name + unit:<32}{size / 2**20:>12,.1f}{what:>16}{size / max(count, 1):>15,.3f}")
        if torch.cuda.is_available():
            lines.append(f"  {'peak allocated by torch':<32}{torch.cuda.max_memory_allocated() / 2**20:>12,.1f}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """The table's numbers: ``{"parameters": {"bytes": ..., "elements": ...}, ...}``; elements of activations are
        tokens."""
        return {name: {"bytes": size, "elements": count} for name, (size, count) in self._rows.items()}

    def _parameters(self) -> list[torch.Tensor]:
        """What holds the 16-bit weights: ZeRO-3 keeps a shard of each beside the (usually empty) parameter."""
        return [
            t
            for p in self._engine.module.parameters()
            for t in ((p.ds_tensor,) if hasattr(p, "ds_tensor") else (p.data,))
        ]


def _measure(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Bytes and elements of distinct storages."""
    kept = {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().nbytes()}
    return (
        sum(t.untyped_storage().nbytes() for t in kept.values()),
        sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values()),
    )
