"""The chunked loss of a patched model: output layer and cross entropy in one, without logits of the
whole vocabulary.

``GPTModel`` calls ``output_layer(hidden)`` and then ``compute_language_model_loss(labels,
logits)``. Where labels are given, the model hands them to its output layer beforehand, which
returns losses instead of logits, and ``compute_language_model_loss`` passes them on. So whatever
surrounds the output layer's call (ZeRO-3 gathers its weight there) still does. Without labels
logits are returned.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from coat_dist import flow
from coat_dist.flow.function import outside_of_graphs
from coat_dist.patching.classes import Patched

from .attached import Patch
from .linear import InvariantColumnParallelLinear


class _Given(threading.local):
    to: Any = None
    labels: torch.Tensor | None = None


_given = _Given()
"""Labels ``[s, b]`` on their way to an output layer. Each thread has its own, since several threads
may call one model at a time. The functions below stay outside of compiled graphs, which would keep
the labels of their first call.
"""


@outside_of_graphs
def give(layer: Any, labels: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    """Hand labels to an output layer. Returns what was handed over before, which an outer call
    needs back where one of its hooks calls the model again.
    """
    before = _given.to, _given.labels
    _given.to, _given.labels = layer, labels
    return before


@outside_of_graphs
def given_to(layer: Any) -> torch.Tensor | None:
    """The labels that were handed to an output layer."""
    return _given.labels if _given.to is layer else None


class ChunkedLossLinear(Patched):
    """An output layer that returns losses while it is given labels."""

    coat: Patch

    def forward(
        self: Any,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (s/TP under sequence parallelism) → losses ``[s, b]`` fp32, or logits
        ``[s, b, out/TP]``.
        """
        if (labels := given_to(self)) is None:
            return super().forward(input_, weight, runtime_gather_output, **rest)  # type: ignore[misc]
        weight = self.weight if weight is None else weight
        settings = self.coat.settings
        z_loss = settings.z_loss if self.training else 0.0  # type: ignore[attr-defined]
        options = {
            "exact": settings.tp_invariant,
            "z_loss": z_loss,
            "keep": settings.loss == "kept",
        }
        tp = self.coat.tp_now(self)
        return flow.linear_cross_entropy(input_, weight, labels, tp, **options), None


class InvariantChunkedLossLinear(ChunkedLossLinear, InvariantColumnParallelLinear):
    """``output_layer`` with ``loss: "chunked"`` and ``tp_invariant``."""


class ChunkedLossGPTModel(Patched):
    """A ``GPTModel`` whose loss never holds all logits."""

    def _postprocess(
        self, hidden_states: Any, input_ids: Any, position_ids: Any, labels: Any, *args, **kwargs
    ) -> Any:
        z_loss = self.output_layer.coat.settings.z_loss if self.training else 0.0
        if labels is None and z_loss:
            raise ValueError(
                f"activation.z_loss: got {z_loss} and a training model called without labels, "
                "accepted: labels (a loss of the caller's own would lack it), or 0, or model.eval()"
            )
        handed = None if labels is None else labels.transpose(0, 1).contiguous()
        before = give(self.output_layer, handed)
        try:
            return super()._postprocess(  # type: ignore[misc]
                hidden_states, input_ids, position_ids, labels, *args, **kwargs
            )
        finally:
            give(*before)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Losses ``[b, s]`` from what the output layer returned: losses ``[s, b]``, or logits
        ``[s, b, out/TP]``.
        """
        if logits.dim() == labels.dim():
            return logits.transpose(0, 1).contiguous()
        return super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
