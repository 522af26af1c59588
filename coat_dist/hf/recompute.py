"""Layers that gradient checkpointing recomputes: which of them, and from what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from .. import flow
from .layer import DecoderLayer
from .modules import fits, opaque, runs_flow


class RecomputedLayer(DecoderLayer):
    """A layer where the block says which layers gradient checkpointing recomputes, or what it keeps
    of them. transformers sets two attributes on every layer, before the patch or after it, and
    reads them in every call: here they are properties.
    """

    @property
    def gradient_checkpointing(self: Any) -> bool:
        if not self.coat.recompute:
            return False
        by_number = self.coat.settings.recompute is not None and torch.is_grad_enabled()
        # A layer that is recomputed drops its cache, so calls with one recompute nothing.
        return self.__dict__.get("gradient_checkpointing", by_number and runs_flow(self))

    @gradient_checkpointing.setter
    def gradient_checkpointing(self: Any, on: bool) -> None:
        self.__dict__["gradient_checkpointing"] = on

    @property
    def _gradient_checkpointing_func(self: Any) -> Callable[..., Any]:
        return self.coat_checkpoint

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self: Any, function: Callable[..., Any]) -> None:
        self.__dict__["_gradient_checkpointing_func"] = function

    @opaque
    def coat_checkpoint(self: Any, function: Callable[..., Any], *args: Any) -> Any:
        checkpoint = self.__dict__.get("_gradient_checkpointing_func", _recomputed)
        if self.coat.compress and args and fits(args[0]):
            return flow.checkpoint_codes(checkpoint, self.coat.settings, function, *args)
        return checkpoint(function, *args)


_recomputed = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
"""The checkpoint of layers for which the program has not chosen one."""
