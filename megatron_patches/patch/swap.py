"""Change classes of built modules, all of them or none, and find the class that each one had before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..layers.attention import PATCHED
from ..layers.cuda_graphs import GRAPHED
from ..layers.experts import ExpertMLP, SharedExperts
from ..layers.grouped import GROUPED
from ..layers.linear import FP8RowParallelLinear, InvariantColumnParallelLinear, NormColumnParallelLinear
from ..layers.loss import ChunkedLossGPTModel, ChunkedLossLinear, InvariantChunkedLossLinear
from ..layers.mlp import NormMLP
from ..layers.norm import EXACT, FOLDED
from .attached import Patch

__all__ = ["Changes", "all_or_none", "original_classes"]

_ORIGINAL: dict[type, type] = {
    NormColumnParallelLinear: ColumnParallelLinear,
    InvariantColumnParallelLinear: ColumnParallelLinear,
    ChunkedLossLinear: ColumnParallelLinear,
    InvariantChunkedLossLinear: ColumnParallelLinear,
    ChunkedLossGPTModel: GPTModel,
    FP8RowParallelLinear: RowParallelLinear,
    NormMLP: MLP,
    ExpertMLP: MLP,
    SharedExperts: SharedExpertMLP,
    **{
        swapped: original for table in (FOLDED, EXACT, PATCHED, GROUPED, GRAPHED) for original, swapped in table.items()
    },
}
_ABSENT = object()


class Changes:
    """Attributes that were set on modules, and what they were before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, module: Any, name: str, value: Any) -> None:
        """``module.name = value``, where ``name`` is an attribute of its own or ``__class__``."""
        self._before.append((module, name, type(module) if name == "__class__" else vars(module).get(name, _ABSENT)))
        setattr(module, name, value)

    def remove(self, module: Any, name: str) -> None:
        """Take away an attribute of its own, if it has it."""
        if name in vars(module):
            self._before.append((module, name, vars(module).pop(name)))

    def swap(self, module: Any, swapped: type, patch: Patch | None = None) -> None:
        """Give ``module`` a patched class, and the attribute ``coat`` that the class reads."""
        self.set(module, "__class__", swapped)
        if patch is not None:
            self.set(module, "coat", patch)

    def undo(self) -> None:
        for module, name, before in reversed(self._before):
            if before is _ABSENT:
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


def original_classes(model: nn.Module) -> list[tuple[nn.Module, type]]:
    """Every patched module of ``model``, with the class that it is to have without its patch.

    A class that torch has put around a patched one since (``fully_shard``, parametrizations) is put around the
    original.

    Raises:
        ValueError: a class derived from a patched one by somebody else; names the module.
    """
    made: dict[type, type] = {}
    found = []
    for name, module in model.named_modules():
        if getattr(type(module), "coat_patched", False):
            found.append((module, _original(type(module), name or type(module).__name__, made)))
    return found


def _original(cls: type, name: str, made: dict[type, type]) -> type:
    if cls in _ORIGINAL:
        return _ORIGINAL[cls]
    sharded = any(issubclass(base, FSDPModule) for base in cls.__bases__)
    if not sharded and cls.__name__ != f"Parametrized{cls.__bases__[0].__name__}":
        raise ValueError(
            f"{name}: got class {cls.__name__}, derived from a patched class, accepted: a class that patch_model gave, "
            "also in fully_shard or with parametrizations; take off first what was put around it"
        )
    if cls not in made:
        bases = tuple(
            _original(base, name, made) if getattr(base, "coat_patched", False) else base for base in cls.__bases__
        )
        # A new class with the original bases. What torch adds is a few methods, none of which calls super().
        content = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        label = cls.__name__
        for before, after in zip(cls.__bases__, bases, strict=True):
            label = label.replace(before.__name__, after.__name__)
        made[cls] = type(label, bases, content)
    return made[cls]
