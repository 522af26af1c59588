"""The ``"coat"`` block in every form in which a program may have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..config import ActivationConfig, CoatConfig, CoatConfigError

__all__ = ["Config", "bf16_layers", "check_bf16_layers", "coat_block"]

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


def bf16_layers(settings: ActivationConfig, layers: int) -> set[int]:
    """Indices from 0 of the layers that stay BF16, out of ``layers`` (over all pipeline stages)."""
    return {i % layers for i in settings.bf16_layers if -layers <= i < layers}


def check_bf16_layers(settings: ActivationConfig, layers: int) -> None:
    """Raises CoatConfigError for an index that is out of range, or names a layer again;
    ``layers``: of the highest stack in the model."""
    wrong = [i for i in settings.bf16_layers if not -layers <= i < layers]
    if wrong and layers:
        accepted = f"0 to {layers - 1}, or {-layers} to -1 from the last, for {layers} layers"
        raise CoatConfigError(f"activation.bf16_layers: got {wrong[0]}, accepted: {accepted}")
    if layers and len(bf16_layers(settings, layers)) < len(settings.bf16_layers):
        given, accepted = list(settings.bf16_layers), f"each of {layers} layers once"
        raise CoatConfigError(f"activation.bf16_layers: got {given}, accepted: {accepted}")
