"""What a step takes over from the last one: that its tensors fit one another, and what kernels keep
of them.

To check and gather the tensors of one parameter takes some 10 us of Python. A model of hundreds of
small tensors would wait for that, as their kernel takes less. So what a step finds of a parameter
group is compared, as lists of numbers and by functions written in C (``map``), with what was found
in a step that checked everything: which tensors there are, where they lie and how large they are.
Where only gradients lie elsewhere, the checks hold, and columns of tensors go to the kernel as they
are; everything else takes the long way.

A plan holds numbers and no tensors, so that it keeps no state in memory that somebody moved or
replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any

import torch

from ..ops import Batch
from .host import on_host
from .seeds import noise_seed
from .state import CODE_KEYS, FP32_KEYS, has_remainder, stochastic

_PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Exactly: of other subclasses, DTensor among them, addresses and sizes may not be what they
seem.
"""
_shape, _dtype, _bytes = map(attrgetter, ("shape", "dtype", "nbytes"))
_address, _device = torch.Tensor.data_ptr, torch.Tensor.get_device
_is_contiguous = torch.Tensor.is_contiguous
_step, _seed, _low = map(itemgetter, ("step", "coat_seed", "coat_p_low"))
_moments = {"fp8": itemgetter(*CODE_KEYS), "fp32": itemgetter(*FP32_KEYS.values())}
_options = itemgetter("moments", "group_size", "capturable", "state_device")


class Columns:
    """The tensors of a step over those parameters of a group that have a gradient, column by
    column.

    Parameters and gradients are contiguous.
    """

    def __init__(
        self,
        group: Mapping[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: Mapping[torch.Tensor, Any],
        copies: Mapping[torch.Tensor, torch.Tensor],
        grad_factor: torch.Tensor | None,
    ) -> None:
        """Raises TypeError, KeyError, AttributeError or RuntimeError where some of this is not
        there.
        """
        self.params, self.grads = params, grads
        self.states: list[Any] = list(map(states.get, params))
        self.moments = list(chain.from_iterable(map(_moments[group["moments"]], self.states)))
        self.lows = list(map(_low, self.states)) if has_remainder(group) else None
        self.copies = [copies[p] for p in params] if copies else None
        self.counts = list(map(_step, self.states))
        counted = self.counts if group["capturable"] else ()
        self.seeds = (
            list(map(_seed, self.states))
            if group["moments"] == "fp8" and any(stochastic(group))
            else None
        )
        self.held = [*self.moments, *(self.lows or ()), *(self.copies or ()), *counted]
        placed = [*params, *self.held]
        self.addresses = list(map(_address, grads))
        # With equal addresses and sizes in bytes, memory is what it was, on the device where it
        # was: nothing is written beyond. Types and shapes of what steps read and write are apart,
        # as memory may have been freed and used again.
        seen = [*params, *(self.copies or ()), *grads]
        self.facts = (
            _options(group),
            self.seeds,
            list(map(id, params)),
            list(map(len, self.states)),
            list(map(_address, placed)),
            list(map(_bytes, self.held)),
            list(map(_shape, seen)),
            list(map(_dtype, seen)),
            list(map(_device, grads)),
            None if grad_factor is None else grad_factor.device,
        )


class Plan:
    """A group's parameters as they were stepped, and how to do it again."""

    def __init__(self, columns: Columns, capturable: bool) -> None:
        """From what a step has found, after that step."""
        self._facts, self._capturable = columns.facts, capturable
        self._seeds = None if columns.seeds is None else list(map(noise_seed, columns.seeds))
        self._ages = [] if capturable else list(columns.counts)
        # stepped together: parameters of one device and, where the host counts, of one age
        together: dict[tuple[int, torch.device], list[int]] = {}
        for i, p in enumerate(columns.params):
            together.setdefault((0 if capturable else columns.counts[i], p.device), []).append(i)
        self._together: list[tuple[list[int], torch.device, dict]] = [
            (x, key[1], {}) for key, x in together.items()
        ]

    def fits(self, columns: Columns) -> bool:
        """Whether what was checked holds of these tensors, too."""
        if self._facts != columns.facts:
            return False
        return self._capturable or (
            self._ages == columns.counts and set(map(type, columns.counts)) == {int}
        )

    def batches(self, columns: Columns) -> Iterator[tuple[int, torch.device, Batch]]:
        """Count the step, and give what is stepped together: the step's number, the device and the
        tensors.

        ``columns`` are those that fit. With ``capturable`` the number is 1 and the counts are on
        the device.
        """
        if self._capturable:
            torch._foreach_add_(columns.counts, 1)
        for positions, device, kept in self._together:
            step = 1
            if not self._capturable:
                step = self._ages[positions[0]] + 1
                for i in positions:
                    self._ages[i] = step
                    columns.states[i]["step"] = step
            yield step, device, self._batch(columns, positions, kept)

    def _batch(self, columns: Columns, positions: list[int], kept: dict) -> Batch:
        whole = len(positions) == len(columns.params)

        def chosen(column: Any, wide: int = 1) -> Any:
            if whole or column is None:
                return column
            return [column[wide * i + j] for i in positions for j in range(wide)]

        return Batch(
            chosen(columns.params),
            chosen(columns.grads),
            chosen(columns.moments, len(columns.moments) // len(columns.params)),
            chosen(self._seeds),
            chosen(columns.lows),
            chosen(columns.copies),
            chosen(columns.counts) if self._capturable else None,
            chosen(columns.addresses),
            kept,
        )


@dataclass
class Found:
    """What a step finds of a group: parameters with a gradient, their gradients, and what is
    stepped together where a plan holds of them. The step is counted as that is read.
    """

    key: tuple[int, int, int]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    batches: Iterator[tuple[int, torch.device, Batch]] | None = None


class Plans:
    """The plans of an optimizer. A group may have several: ZeRO-3 steps its sub-groups one by one,
    each as the group's only parameter.
    """

    LIMIT = 1 << 16
    """Parameters in all plans together, each of which takes up to a kilobyte. Where other
    parameters have a gradient in each step there would be no end of plans; thousands of groups of
    one parameter should find theirs.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._held = 0

    def find(self, i: int, group: Mapping[str, Any], *rest: Any) -> Found:
        """For group number ``i``; ``rest`` as :class:`Columns` takes it: states, copies,
        gradient factor.
        """
        params: list[torch.Tensor] = group["params"]
        grads: list[Any] = [p.grad for p in params]
        if not all(map(is_not, grads, repeat(None))):
            params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        found = Found((i, id(params[0]) if params else 0, len(params)), params, grads)
        plan = self._plans.get(found.key)
        columns = None if plan is None else _columns(found, group, *rest)
        if plan is not None and columns is not None and plan.fits(columns):
            found.batches = plan.batches(columns)
        return found

    def learn(self, found: Found, group: Mapping[str, Any], *rest: Any) -> None:
        """Make a plan of what has been found, checked and stepped."""
        if any(on_host(p, group) for p in found.params):  # each of its chunks is a step of its own
            return
        columns = _columns(found, group, *rest)
        once = len(set(map(id, found.params))) == len(found.params)
        # Else later steps have to look at every tensor again.
        if columns is None or not once or not _plain(columns.held):
            return
        if found.key not in self._plans:
            self._held += len(found.params)
        if self._held > self.LIMIT:
            self._plans.clear()
            self._held = len(found.params)
        self._plans[found.key] = Plan(columns, group["capturable"])


def _columns(found: Found, group: Mapping[str, Any], *rest: Any) -> Columns | None:
    try:
        if _plain(found.params) and _plain(found.grads):
            return Columns(group, found.params, found.grads, *rest)
    # A tensor or a number that is not there.
    except (TypeError, KeyError, AttributeError, RuntimeError):
        pass
    return None


def _plain(tensors: list[Any]) -> bool:
    """Whether a tensor's address and size say where its elements lie."""
    return _PLAIN.issuperset(map(type, tensors)) and all(map(_is_contiguous, tensors))
