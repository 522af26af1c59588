"""A transformers model on fake tensors: its parameters, and what it saves for backward, found by
its own code without its memory.

Two small depths of the model run on fake tensors, and their difference is one layer. So the bytes
hold for every family, tier and version of transformers, patched or not. Attention counts as a
kernel that saves queries, keys, values, output and a number a row, unless transformers chooses its
eager one for the family.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config import ActivationConfig
from ..flow.saved import saved_for_backward
from .patch import patch_model

__all__ = ["OnPaper", "Saved"]

_ATTENTION = "coat_on_paper"


_NOT_COUNTED = {
    "bf16_layers": (),
    "frozen_weights": "bf16",
    "boundaries": "bf16",
    "boundaries_device": "layer",
    "recompute": None,
}


class Saved(NamedTuple):
    """Bytes of one sequence."""

    layer: int
    """Bytes of each layer."""
    rest: int
    """Bytes of what is around the layers, without output layer and loss."""
    loss: int
    """Bytes of output layer and loss, where the loss is not chunked."""
    chunked: bool
    """Whether the loss is computed without all logits."""


class OnPaper:
    """A causal language model of transformers, trained in BF16.

    Args:
        path: a Hugging Face folder, or its ``config.json``; weights are not needed.

    Raises:
        OSError, ValueError: of transformers, where it does not know such a model.
    """

    def __init__(self, path: str | PathLike) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config: Any = AutoConfig.from_pretrained(Path(path).resolve(strict=True))
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(self.config)
        self.shapes = {name: tuple(p.shape) for name, p in built.named_parameters()}
        """Shapes of all parameters, in the order of the model; a tied one counts once."""

    @functools.cache  # noqa: B019  a program has one or two models
    def saved(self, settings: ActivationConfig | None, tokens: int) -> Saved:
        """What one sequence of ``tokens`` saves, with the flow or, where ``settings`` are None, as
        the model is.

        Raises:
            CoatConfigError: nothing of the model can be patched.
        """
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FP8 attention compares addresses
            one, two = (self._run(settings, tokens, layers) for layers in (1, 2))
        layer = two[0] - one[0]
        return Saved(layer, one[0] - layer, *one[1:])

    def _run(
        self, settings: ActivationConfig | None, tokens: int, layers: int
    ) -> tuple[int, int, bool]:
        """Bytes that a model of so many layers saves, and its loss; whether that is chunked."""
        from transformers import AttentionInterface, AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        config.num_hidden_layers, config.use_cache = layers, False
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        if model.config._attn_implementation != "eager":
            AttentionInterface.register(_ATTENTION, _attention)
            model.config._attn_implementation = _ATTENTION
        chunked = False
        if settings is not None:
            report = patch_model(model, settings.model_copy(update=_NOT_COUNTED))
            chunked = any(not how.startswith("plain") for how in report.loss.values())
        ids = torch.zeros(1, tokens, dtype=torch.long)
        body = _bytes(model, lambda: model.base_model(input_ids=ids))
        return (
            body,
            0 if chunked else _bytes(model, lambda: model(input_ids=ids, labels=ids)) - body,
            chunked,
        )


def _bytes(model: torch.nn.Module, forward: Callable[[], Any]) -> int:
    with saved_for_backward(model) as found:
        forward()
    return sum(found.values())


def _attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> Any:
    return _Attention.apply(q, k, v), None


class _Attention(torch.autograd.Function):
    """Saves what attention of ``[b, heads, s, d]`` saves."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, heads, s, _ = q.shape
        out = q.new_empty(b, s, heads, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(b, heads, s, dtype=torch.float32))
        return out
