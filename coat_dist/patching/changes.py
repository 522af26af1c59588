"""Changes of built modules, all of them or none: classes and attributes, with what they were
before.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..config import CoatConfigError
from ..flow.core.frozen import FrozenWeight, replace
from .reasons import drop_own_forward

RECORD = "coat_changes"
"""The attribute of a model that keeps its record."""


class _Absent:
    """Stands for an attribute that a module did not have. A class, since copies of a model copy
    its changes.
    """


class Changes:
    """Attributes and classes that were set on modules, and what they were before.

    The record is kept on the model, so copies and pickles of the model have their own. It holds no
    patched class, which could not be pickled: a patched class knows the original.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any]] = []

    def set(self, module: Any, name: str, value: Any) -> None:
        """``module.name = value``, where ``name`` is an attribute of its own or ``__class__``."""
        if name == "__class__":
            drop_own_forward(module)
        self._made.append((module, name, vars(module).get(name, _Absent)))
        setattr(module, name, value)

    def undo(self) -> None:
        while self._made:
            module, name, before = self._made.pop()
            if name == "__class__":
                _restore_class(module)
            elif before is _Absent:
                vars(module).pop(name, None)
            else:
                setattr(module, name, before)


def unpatch_model(model: nn.Module) -> None:
    """Undo ``patch_model`` on the model that it was given: every class is what it was, and outputs
    to the bit. With ``frozen_weights: "fp8"`` weights are what their codes read back as, in BF16.

    Modules may have been wrapped by ``fully_shard``, or parametrized, since.

    Raises:
        CoatConfigError: the model is not patched.
    """
    made = [vars(m)[RECORD] for m in model.modules() if RECORD in vars(m)]
    if not made:
        raise CoatConfigError(
            "model: got one that is not patched, accepted: what patch_model has patched"
        )
    for changes in made:  # chunks share one record, and the second time there is nothing to undo
        changes.undo()
    for parameter in model.parameters():
        if isinstance(parameter, FrozenWeight):
            replace(parameter, parameter.decoded())


def _restore_class(module: Any) -> None:
    """Give ``module`` the class that it had before it was patched."""
    cls: Any
    for cls in type(module).__mro__:
        if "coat_original" in vars(cls):
            drop_own_forward(module)
            module.__class__ = _restored(type(module), cls, cls.coat_original)  # type: ignore[arg-type]
            return


@functools.cache
def _restored(cls: type, patched: type, original: type) -> type:
    """``original``, inside what torch has put around ``patched`` since then: ``fully_shard``,
    parametrizations.
    """
    if cls is patched or not issubclass(cls, patched):
        return original
    bases = tuple(
        _restored(base, patched, original) if issubclass(base, patched) else base  # type: ignore[arg-type]
        for base in cls.__bases__
    )
    # What torch adds is a few methods, none of which calls super().
    content = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(patched.__name__, original.__name__), bases, content)
