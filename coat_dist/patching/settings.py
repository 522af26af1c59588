"""The ``"coat"`` block in every form in which a program may have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..config import CoatConfig, CoatConfigError

__all__ = ["Config", "coat_block"]

Config: TypeAlias = str | os.PathLike | Mapping[str, Any] | CoatConfig
"""What DeepSpeed takes (path of a JSON file, dict, base64 of JSON), with a ``"coat"`` block; or the parsed block."""


def coat_block(config: Config, name: str = "config") -> CoatConfig:
    """The parsed block of ``config``.

    The content of a block alone, ``{"optimizer": ..., "activation": ...}``, is refused: ``"optimizer"`` means something
    else at the top of a DeepSpeed configuration.

    Raises:
        CoatConfigError: nothing there, no block in it, or a wrong one.
    """
    block = config if isinstance(config, CoatConfig) else CoatConfig.from_deepspeed(config)
    if block is None:
        raise CoatConfigError(f'{name}: got one without a "coat" block, accepted: a DeepSpeed configuration with it')
    return block
