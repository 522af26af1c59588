"""Patched classes: the class of a built module, with the methods of a mixin before its own.

A module is patched by its ``__class__``: parameters, names and keys of state dicts stay. A patched
class has the original's name, since FSDP policies and saved configurations go by names, and it can
be pickled and copied.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any


class Patched:
    """Base of all mixins."""

    coat_patched = True
    coat_original: Any
    """The class that the module had before."""
    coat: Any
    """All that the patched forward needs to know, found when the model was patched."""

    if TYPE_CHECKING:  # what the original class has

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def coat_content(cls, plain: Any) -> dict[str, Any]:
        """Further attributes of a class that is patched with this mixin; ``plain`` is the
        ``forward`` of the original class.
        """
        return {}


def swapped(original: Any, mixin: Any) -> Any:
    """``original`` but for what ``mixin`` computes in the flow."""
    return _swapped(original, mixin, getattr(original, "forward", None))


@functools.cache
def _swapped(original: Any, mixin: type[Patched], plain: Any) -> type:
    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return _new, (original, mixin), *rest

    content = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    content |= {"coat_original": original, "__reduce_ex__": reduce}
    content |= mixin.coat_content(plain)
    return type(original.__name__, (mixin, original), content)


def _new(original: type, mixin: type[Patched]) -> Any:
    cls = swapped(original, mixin)
    return cls.__new__(cls)
