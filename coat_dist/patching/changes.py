"""Changes of built modules, all of them or none: classes and attributes, with what they were
before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Changes", "all_or_none", "restored"]


class _Absent:
    """Stands for an attribute that a module did not have. A class, since copies of a model copy
    its changes.
    """


class Changes:
    """Attributes and classes that were set on modules, and what they were before."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def set(self, module: Any, name: str, value: Any) -> None:
        """``module.name = value``, where ``name`` is an attribute of its own or ``__class__``."""
        before = type(module) if name == "__class__" else vars(module).get(name, _Absent)
        self._made.append((module, name, before, value))
        setattr(module, name, value)

    def swap(self, module: Any, swapped: type, patch: Any = None) -> None:
        """Give ``module`` a patched class, and the attribute ``coat`` that the class reads."""
        self.set(module, "__class__", swapped)
        if patch is not None:
            self.set(module, "coat", patch)

    def undo(self) -> None:
        while self._made:
            module, name, before, value = self._made.pop()
            if name == "__class__":
                module.__class__ = restored(type(module), value, before)  # type: ignore[arg-type]
            elif before is _Absent:
                vars(module).pop(name, None)
            else:
                setattr(module, name, before)


@contextmanager
def all_or_none() -> Iterator[Changes]:
    """Changes to modules, undone where the body raises."""
    changes = Changes()
    try:
        yield changes
    except BaseException:
        changes.undo()
        raise


@functools.cache
def restored(cls: type, patched: type, original: type) -> type:
    """``original``, inside what torch has put around ``patched`` since then: ``fully_shard``,
    parametrizations.
    """
    if cls is patched or not issubclass(cls, patched):
        return original
    bases = tuple(
        restored(base, patched, original) if issubclass(base, patched) else base  # type: ignore[arg-type]
        for base in cls.__bases__
    )
    # What torch adds is a few methods, none of which calls super().
    content = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(patched.__name__, original.__name__), bases, content)
