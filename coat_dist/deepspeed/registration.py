"""How DeepSpeed finds CoatAdamW by its name, in any program that imports ``coat_dist``. Does not import DeepSpeed."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["declare_to_zero", "register_optimizer"]


def register_optimizer(cls: Any) -> None:
    """Make ``"optimizer": {"type": cls.__name__}`` work in a DeepSpeed configuration.

    DeepSpeed looks up in ``torch.optim`` a type that it does not know.
    """
    setattr(torch.optim, cls.__name__, cls)
    cls.when_built = declare_to_zero


def declare_to_zero(cls: type) -> None:
    """Put an optimizer class on DeepSpeed's list of those that ZeRO may drive: programs that name it in their JSON then
    need no ``zero_allow_untested_optimizer``. Called by every new CoatAdamW, because DeepSpeed may be loaded late."""
    zero = sys.modules.get("deepspeed.runtime.zero.utils")
    tested = getattr(zero, "ZERO_SUPPORTED_OPTIMIZERS", None)
    if isinstance(tested, list) and cls not in tested:
        tested.append(cls)
