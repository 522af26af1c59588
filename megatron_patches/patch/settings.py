"""The ``"coat"`` block in every form in which a program may have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from coat_dist.config import ActivationConfig, CoatConfig, CoatConfigError, load_json

__all__ = ["Config", "activation_settings", "coat_block"]

Config: TypeAlias = str | os.PathLike | Mapping[str, Any] | CoatConfig
"""What DeepSpeed takes (path of a JSON file, dict, base64 of JSON), with a ``"coat"`` block; or the parsed block."""


def coat_block(config: Config, name: str = "config") -> CoatConfig:
    """The parsed block of ``config``.

    The content of a block alone, ``{"optimizer": ..., "activation": ...}``, is refused: ``"optimizer"`` means something
    else at the top of a DeepSpeed configuration.

    Raises:
        CoatConfigError: nothing there, no block in it, or a wrong one.
    """
    if isinstance(config, CoatConfig):
        return config
    accepted = (
        'a DeepSpeed configuration with a "coat" block (path, dict or base64 of JSON), or the parsed block: '
        "CoatConfig.from_deepspeed(configuration), CoatConfig.parse(content of the block)"
    )
    if not isinstance(config, str | os.PathLike | Mapping):
        raise CoatConfigError(f"{name}: got {type(config).__name__}, accepted: {accepted}")
    whole = load_json(config)
    block = CoatConfig.from_deepspeed(whole)
    if block is None:
        given = os.fspath(config)[:80] if isinstance(config, str | os.PathLike) else "a dict"
        keys = ", ".join(map(str, whole)) or "none"
        raise CoatConfigError(f'{name}: got {given} without a "coat" block (its keys: {keys}), accepted: {accepted}')
    return block


def activation_settings(config: Config | ActivationConfig) -> ActivationConfig:
    """The block's ``"activation"``; an :class:`ActivationConfig` is returned as it is.

    Raises:
        CoatConfigError: as :func:`coat_block`.
    """
    return config if isinstance(config, ActivationConfig) else coat_block(config).activation
