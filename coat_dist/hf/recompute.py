"""Layers that gradient checkpointing recomputes: which of them, and from what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from .. import flow
from ..flow.core.weights import weight_changes
from .layer import DecoderLayer
from .modules import fits, opaque, runs_flow

_RESERVE = 0.05
"""Share of the GPU's memory that ``"auto"`` leaves free: for batches that are a little longer, and
for what the allocator loses between tensors. Not tuned.
"""


class Dial:
    """``"recompute": "auto"`` in a list of layers: how many of the first ones recompute.

    In the first step all but the last two do. What the first of these two keeps is measured, and
    the step's peak. After an optimizer's step the number is settled once, by the rank with the
    least memory: ranks that gather weights for each layer have to do the same.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.first = layers, max(layers - 2, 0)
        self.kept, self.before = 0, 0
        """Bytes that a layer keeps, and all bytes when it began."""
        self.began: int | None = None
        self.settled = False

    def turn(self, i: int) -> bool:
        """Whether layer ``i`` recomputes, which begins now."""
        if not self.settled:
            if i == 0:
                self._begin()
            allocated = torch.cuda.memory_allocated()  # 0 without a GPU
            if i == self.layers - 1:
                self.kept = allocated - self.before
            self.before = allocated
        return i < self.first

    def _begin(self) -> None:
        if self.began is None:
            self.began = weight_changes()
        elif self.began != weight_changes():
            if self.kept > 0:
                free, total = torch.cuda.mem_get_info()
                usable = free + torch.cuda.memory_reserved() - int(_RESERVE * total)
                self.first -= (usable - torch.cuda.max_memory_allocated()) // self.kept
            if dist.is_initialized():
                found = [0] * dist.get_world_size()
                dist.all_gather_object(found, self.first)
                self.first = max(found)
            self.settled = True


class RecomputedLayer(DecoderLayer):
    """A layer where the block says which layers gradient checkpointing recomputes, or what it keeps
    of them. transformers sets two attributes on every layer, before the patch or after it, and
    reads them in every call: here they are properties.
    """

    @property
    def gradient_checkpointing(self: Any) -> bool:
        flows = torch.is_grad_enabled() and runs_flow(self)
        recompute = self.coat.recompute
        if not isinstance(recompute, bool):
            recompute = flows and self.coat_turn()
        if not recompute:
            return False
        by_number = self.coat.settings.recompute is not None
        # A layer that is recomputed drops its cache, so calls with one recompute nothing.
        return self.__dict__.get("gradient_checkpointing", by_number and flows)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self: Any, on: bool) -> None:
        self.__dict__["gradient_checkpointing"] = on

    @opaque
    def coat_turn(self: Any) -> bool:
        dial, i = self.coat.recompute
        return dial.turn(i)

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
