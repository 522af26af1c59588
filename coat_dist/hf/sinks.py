"""Attention with sinks (gpt-oss), which transformers computes by plain operations: here by the
kernels of PyTorch, without tensors of all pairs of tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import flow
from ..patching.reasons import original_class
from .modules import ModePatched, opaque
from .recognize import fingerprint

EAGER = {"70032906336b", "58a0713d2842"}
"""``eager_attention_forward`` of gpt-oss and DeepSeek-V4, and of Granite's two, since transformers
5.24 and 5.17.
"""
NAME = "coat_sinks"


def has_sinks(module: Any) -> bool:
    """Whether it is an attention whose plain form :func:`_attend` replaces.

    Code that reads the name of the implementation a second time, as HY-V4's does for its sparse
    mask, would compute something else under another name.
    """
    return (
        isinstance(getattr(module, "sinks", None), nn.Parameter)
        and hasattr(module, "config")
        and fingerprint(_eager(module)) in EAGER
        and inspect.getsource(_forward(module)).count("_attn_implementation") == 1
    )


def _forward(attention: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(original_class(attention).forward)


def _eager(attention: nn.Module) -> Callable[..., Any]:
    return _forward(attention).__globals__.get("eager_attention_forward", _eager)


class SinkAttention(ModePatched):
    """An attention that finds :func:`_attend` where its configuration says "eager"."""

    @opaque
    def coat_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = self.config
        # A program may have registered an "eager" of its own.
        if config._attn_implementation != "eager" or "eager" in ALL_ATTENTION_FUNCTIONS:
            return plain(self, *args, **kwargs)
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
        self.config = copy.copy(config)
        self.config._attn_implementation = NAME
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.config = config


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers' attention functions. Weights have values only where plain operations make
    them: with dropout, and for a program that asks for them.
    """
    if dropout or kwargs.get("output_attentions", module.config.output_attentions):
        given = query, key, value, attention_mask, scaling
        return _eager(module)(module, *given, dropout=dropout, **kwargs)
    out = flow.sink_attention(query, key, value, kwargs["s_aux"], attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None
