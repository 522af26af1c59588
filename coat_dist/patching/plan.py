"""What patching will change in a model: a plan, made before anything is changed.

A model has *blocks*, parts that run the flow as a whole or stay in BF16 as a whole: an attention,
an MLP, experts. Each has an :class:`Entry` in the plan, which a recognizer fills in. The report is
derived from the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..config import ActivationConfig
from .changes import RECORD, Changes
from .classes import Patched, swapped
from .report import PatchReport


class Planned:
    """Changes that are planned, in their order. Of several of one attribute the first counts: a
    module that stands in two places is patched once.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[Any, str, Any]] = []

    def set(self, module: Any, name: str, value: Any) -> None:
        """Plan ``module.name = value``."""
        self.changes.append((module, name, value))

    def swap(self, module: Any, mixin: type[Patched], coat: Any = None) -> None:
        """Plan a patched class for ``module``, and the attribute ``coat`` that the class reads."""
        self.set(module, "__class__", swapped(type(module), mixin))
        if coat is not None:
            self.set(module, "coat", coat)


class Entry(Planned):
    """One block of a model."""

    def __init__(
        self, report: PatchReport, settings: ActivationConfig, name: str, layer: Any, module: Any
    ) -> None:
        super().__init__()
        self.report = report
        self.settings = settings
        self.name = name
        """The block's name in ``model.named_modules()``."""
        self.layer = layer
        """The layer that holds the block."""
        self.module = module
        self.why: str | None = None
        """Why the block stays in BF16; None where it runs the flow."""
        self.unfused: dict[str, str] = {}
        """For the report of a block that runs the flow: passes that stay as they were, and why."""
        self.notes: list[str] = []
        """For the report of a block that runs the flow."""


Recognizer = Callable[[Entry], bool]
"""Fills in an entry whose block it knows: changes, or a reason. Returns whether it knows it."""


class Plan(Planned):
    """What to patch in a model, and what not and why.

    Its own changes are those outside of blocks, such as final norms and the loss. They are made
    after those of the blocks.
    """

    def __init__(self, settings: ActivationConfig) -> None:
        super().__init__()
        self.settings = settings
        self.entries: list[Entry] = []
        self.report = PatchReport(settings)

    def add(
        self,
        name: str,
        layer: Any,
        module: Any,
        recognizers: Iterable[Recognizer],
        why: str | None = None,
        settings: ActivationConfig | None = None,
    ) -> Entry:
        """Plan a block by the first of ``recognizers`` that knows it, or with a reason in ``why``
        leave it in BF16. ``settings`` are those of its layer, where it has its own.
        """
        entry = Entry(self.report, settings or self.settings, name, layer, module)
        entry.why = why
        if why is None and not any(recognize(entry) for recognize in recognizers):
            entry.why = "no block that is known"
        self.entries.append(entry)
        return entry

    @property
    def patched(self) -> list[Entry]:
        """Entries of blocks that will run the flow."""
        return [entry for entry in self.entries if entry.why is None]

    def fill_report(self) -> None:
        """Let the report say what becomes of each block."""
        for entry in self.entries:
            self.report.blocks[entry.name] = entry.why
            if entry.why is None:
                self.report.unfused |= entry.unfused
                for text in entry.notes:
                    self.report.note(text)

    def apply(self, *models: nn.Module) -> None:
        """Make all changes or none; ``models`` keep the report and the record that undoes them."""
        done: set[tuple[int, str]] = set()
        changes = Changes()
        try:
            for planned in (*self.entries, self):
                for module, name, value in planned.changes:
                    if (id(module), name) not in done:
                        done.add((id(module), name))
                        changes.set(module, name, value)
            self.report.fp8_share = self._share()
            for model in models:
                changes.set(model, "coat_patch_report", self.report)
                changes.set(model, RECORD, changes)
        except BaseException:
            changes.undo()
            raise

    def _share(self) -> float:
        """``fp8_share`` of the report, once the classes are changed."""
        sizes: dict[int, int] = {}
        in_fp8: set[int] = set()
        for layer in {entry.layer for entry in self.entries}:
            for p in layer.parameters():
                shape = getattr(p, "ds_shape", p.shape)
                if len(shape) > 1:
                    sizes[id(p)] = math.prod(shape)
            for module in layer.modules():
                for method in ("coat_flow_weights", "coat_expert_weights"):
                    for given in getattr(module, method, list)():
                        in_fp8 |= set(map(id, given if isinstance(given, tuple) else (given,)))
        return sum(sizes.get(p, 0) for p in in_fp8) / max(sum(sizes.values()), 1)
