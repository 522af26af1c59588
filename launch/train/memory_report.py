"""What a step holds, measured on the engine: parameters, gradients, master weights, moments,
activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from coat_dist.flow.saved import saved_for_backward


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _measure(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Bytes and elements of distinct storages."""
    kept = {t.untyped_storage().data_ptr(): t for t in tensors}.values()
    sizes = [(t.untyped_storage().nbytes(), t.element_size()) for t in kept]
    return sum(size for size, _ in sizes), sum(size // element for size, element in sizes)


class MemoryReport:
    """Watches the first step that changes the weights and makes a table of it.

    Call order: ``with forward()`` around the first forward pass, :meth:`backward_done` before the
    engine's step, :meth:`step_done` after it.
    """

    def __init__(self, engine: Any, tokens_per_micro_batch: int) -> None:
        self._engine, self._tokens = engine, tokens_per_micro_batch
        self._rows: dict[str, tuple[int, int]] = {}
        """Bytes and elements by name."""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Measure what this forward pass saves for backward."""
        with saved_for_backward(self._engine.module) as found:
            yield
        self._rows["activations"] = sum(found.values()), self._tokens

    def backward_done(self) -> None:
        """Measure the gradients that wait for the step."""
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        # Each ZeRO stage has its own name for them: averaged_gradients,
        # grad_partitions_flat_buffer, ...
        named = [value for name, value in vars(self._engine.optimizer).items() if "grad" in name]
        others = [
            t
            for t in _tensors(named)
            if t.is_floating_point() and not isinstance(t, torch.nn.Parameter)
        ]
        self._rows["gradients"] = _measure([*gradients, *others])

    def step_done(self) -> None:
        """Measure what stays between steps. Of master weights that share memory with parameters,
        the remainders.
        """
        optimizer = self._engine.optimizer
        # ZeRO-3 keeps a shard of each parameter beside the (usually empty) parameter.
        parameters = [getattr(p, "ds_tensor", p.data) for p in self._engine.module.parameters()]
        names = (
            "single_partition_of_fp32_groups",
            "fp32_partitioned_groups_flat",
            "fp32_groups_flat_partition",
        )
        master = list(
            _tensors(next(getattr(optimizer, name) for name in names if hasattr(optimizer, name)))
        )
        states = [item for state in optimizer.optimizer.state.values() for item in state.items()]
        weights, count = (
            {t.untyped_storage().data_ptr() for t in parameters},
            sum(t.numel() for t in master),
        )
        kept = [*master, *(t for name, t in states if name == "coat_p_low")]
        own, _ = _measure(t for t in kept if t.untyped_storage().data_ptr() not in weights)
        numbers = (t for name, t in states if name != "coat_p_low" and isinstance(t, torch.Tensor))
        moments, _ = _measure(t for t in numbers if t.numel() > 1)
        self._rows["parameters"] = _measure(parameters)
        self._rows["master weights"] = own, count
        self._rows["optimizer moments"] = moments, count

    def table(self) -> str:
        """The table: bytes of this rank, elements they belong to, bytes an element (a token for
        activations).
        """
        lines = [f"{'memory of this rank':<34}{'MiB':>12}{'elements':>16}{'bytes/element':>15}"]
        for name in (
            "parameters",
            "gradients",
            "master weights",
            "optimizer moments",
            "activations",
        ):
            if name in self._rows:
                size, count = self._rows[name]
                of_pass = name == "activations"
                title = f"{name} (saved for backward)" if of_pass else name
                counted = f"{count:,}{' tokens' if of_pass else ''}"
                lines.append(
                    "  "
                    f"{title:<32}{size / 2**20:>12,.1f}{counted:>16}{size / max(count, 1):>15,.3f}"
                )
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() / 2**20
            lines.append(f"  {'peak allocated by torch':<32}{peak:>12,.1f}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """The table's numbers: ``{"parameters": {"bytes": ..., "elements": ...}, ...}``; elements
        of activations are tokens.
        """
        return {
            name: {"bytes": size, "elements": count} for name, (size, count) in self._rows.items()
        }
