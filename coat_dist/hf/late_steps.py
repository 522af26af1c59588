"""What late logits are made of: a call of the output layer, and operations on its rows.

**Calls of the output layer.** ZeRO-3 has gathered the weight only while the output layer runs. So
what is computed during the model's forward is computed inside another call of the output layer
(:meth:`Product.compute`). Hooks of ZeRO-3 then act on this product as on the model's own, in
backward too.

**Two references to the hidden states.** ``ctx.hidden`` in :class:`MakeLate` has its graph, for
answers in pieces and second derivatives. ``Product.hidden`` is detached: logits that a program
detaches and keeps, for metrics over an epoch, hold the hidden states but no graph of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..flow.core.weights import weight_changes
from ..flow.function import version_of

ATEN: Any = torch.ops.aten
REGROUP = ATEN.view.default, ATEN._unsafe_view.default
"""Views that regroup whole rows."""
SCALING = ATEN.mul.Tensor, ATEN.div.Tensor


@dataclass
class Pass:
    """A forward of a model whose output layer is to return late logits."""

    head: Any
    """The output layer, or None where it returns values."""
    options: dict[str, Any]
    """What :func:`coat_dist.flow.linear_cross_entropy` is given in the model's loss function."""
    work: Callable[..., Any] | None = None
    """What the output layer is to compute in its next call."""
    why: str | None = "logits that the forward reads, or a loss without them"
    """Why the loss was not computed in chunks; None where it was."""


class _Given(threading.local):
    """The forward under way, for each thread."""

    # torch.compile cannot guard defaults of the class that each thread then covers.
    def __init__(self) -> None:
        self.now: Pass | None = None
        self.request: Callable[[Any], None] | None = None
        """What the next model is to do with its result."""
        self.options: dict[str, Any] = {}
        """Those of ``now`` while it computes its loss."""


forward = _Given()


def parameters(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)


class Product:
    """A call of the output layer, and the step that makes logits of its rows."""

    attached = True
    path = ()
    wide: Any = None
    """Refers to the weight in fp32, one copy for all that is answered in pieces, while the graph of
    an answer has it: autograd then sums in fp32 what each piece adds to the gradient.
    """
    hooked = False
    """Whether a program looks at gradients of these logits."""
    answered = False
    """Whether gradients of an answer pass by these logits."""

    def __init__(self, hidden: torch.Tensor, head: Any) -> None:
        self.hidden, self.head = hidden, head
        self.seen = self._state()

    def __call__(self, logits):
        return logits

    def transform(self) -> tuple[float, float]:
        return 1.0, 0.0

    def _state(self) -> tuple:
        parameters = [p for p in (self.head.weight, self.head.bias) if p is not None]
        return (
            weight_changes(),
            version_of(self.hidden),
            [(id(p), version_of(p)) for p in parameters],
        )

    def check(self) -> None:
        """Raises RuntimeError: ZeRO-3 has let the output layer's weight go, or it may have
        changed since forward.
        """
        if self.seen != self._state():
            raise RuntimeError(
                "logits: read after an optimizer's step, or another change of weights, accepted: "
                "before it, "
                'or "coat": {"activation": {"loss": "plain"}}'
            )
        weight: Any = self.head.weight
        if hasattr(weight, "ds_shape") and weight.shape != weight.ds_shape:
            raise RuntimeError(
                "logits: read after forward under ZeRO-3, accepted: inside "
                "deepspeed.zero.GatheredParameters of "
                'lm_head, or "coat": {"activation": {"loss": "plain"}}'
            )

    def compute(self, hidden: Any, work: Callable[..., Any], has_graph: bool) -> Any:
        """``work(hidden, weight, bias)``: during the model's forward, inside a call of the output
        layer.
        """
        now = forward.now
        with (
            torch.set_grad_enabled(has_graph),
            torch.autocast(hidden.device.type, enabled=False),
        ):
            if now is None or now.head is not self.head:
                self.check()
                return work(hidden, *parameters(self.head, hidden.dtype))
            now.work = work
            try:
                return self.head(hidden)
            finally:
                now.work = None


def viewed(tensor, path):
    """Views of logits, or of hidden states in their place, one after the other: functions, their
    arguments, which of several results.
    """
    for view, rest, part in path:
        if view in REGROUP:
            tensor = tensor.reshape(*rest[0][:-1], tensor.shape[-1])
        else:
            out = view(tensor, *rest)
            tensor = out if part is None else out[part]
    return tensor


class Step(NamedTuple):
    """An operation on rows of logits, after those that made its arguments."""

    name: str
    """Of its node in autograd's graph, without a number."""
    parents: tuple
    """Steps that make its first arguments, or the product itself."""
    attached: bool
    """Whether autograd has the operation in its graph."""
    path: tuple
    """What takes these rows out of the product's."""
    function: Any = None
    """None where it changes no row: a copy, a view."""
    rest: tuple = ()
    options: Any = {}

    def __call__(self, logits):
        """What the steps make of some rows."""
        out, *others = (step(logits) for step in self.parents)
        if self.function is not None:
            out = self.function(out, *others, *self.rest, **self.options)
        return out if self.attached else out.detach()

    def transform(self) -> tuple[float, float] | None:
        """``scale`` and ``softcap`` of :func:`coat_dist.flow.linear_cross_entropy`. None where the
        operations are others.
        """
        before = self.parents[0].transform()
        if before is None or self.function in (None, ATEN._to_copy.default):
            return before
        scale, softcap = before
        if self.function is ATEN.tanh.default and not softcap:
            return scale, 1.0
        if self.function not in SCALING or not self.rest:
            return None
        # softcap * tanh(scale * x / softcap) * factor
        factor = self.rest[0] if self.function is ATEN.mul.Tensor else 1 / self.rest[0]
        return scale * factor, abs(softcap * factor)
