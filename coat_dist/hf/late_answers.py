"""Answers of late logits in pieces: functions that make little of each row (``ANSWERS``).

**What is answered in pieces.** Functions that make little of each row (``ANSWERS``): cross entropy,
``gather``, ``logsumexp``, ``argmax``, sums over the vocabulary. So ``log_softmax(-1).gather(-1,
ids)`` and entropies need no tensor of tokens times vocabulary. :func:`_cross_entropy` cuts the
vocabulary, with the flow's kernels. :func:`_reduce` cuts the tokens: it makes the logits of some,
applies what was recorded and the function, and makes them again in backward, as a checkpoint does.

**When gradients may pass by the logits.** Gradients of an answer go straight to hidden states and
weight. That is right only where autograd's graph from the logits to the output layer consists of
the recorded steps, node for node (:func:`_origin`). Then nothing was detached, changed under
``no_grad``, or put between by a wrapper. Hooks do not show there, so logits on which somebody puts
a hook get values from then on, and a hook after an answer is an error. DeepSpeed's engine may put
its hooks, which it puts on all that a model returns, for the gradients that come there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .. import flow
from .late_steps import ATEN, Product, forward, viewed
from .modules import ONE

IGNORED = -100
_PART = 2**26
"""Most logits that :func:`_reduce` makes at a time: 128 MiB in BF16. Not tuned."""


def _compute(logits: Any, work: Callable[..., Any]) -> Any:
    """``work(x, weight, bias)`` for the rows of late logits, with the graph that the logits have.
    None where that is not the graph of the recorded operations.
    """
    product, steps = logits.late.product, logits.steps()
    hidden, has_graph = product.hidden, torch.is_grad_enabled() and logits.requires_grad
    if has_graph:
        with torch._C.DisableTorchFunctionSubclass():
            origin = _origin(steps, logits.grad_fn)
        if origin is None or product.hooked:
            return None
        if origin.needs_input_grad[1] is not product.head.weight.requires_grad:
            return None
        hidden = origin.hidden
        product.answered |= forward.now is None
    rows = viewed(hidden, steps.path)
    return product.compute(rows.flatten(0, -2), work, has_graph)


def _origin(step, node):
    """The output layer's node, where ``node`` has the graph of these steps, node for node."""
    if isinstance(step, Product):
        # During forward, ZeRO-3 puts functions between. They act on the call that computes, too.
        while (
            forward.now is not None
            and "deepspeed" in getattr(node, "_forward_cls", Product).__module__
        ):
            node = node.next_functions[0][0]
        return node if getattr(node, "product", None) is step else None
    if not step.attached or node is None or node.name().rstrip("0123456789") != step.name:
        return None
    origin = None
    for parent, (before, _) in zip(step.parents, node.next_functions, strict=False):
        if parent.attached:
            origin = _origin(parent, before)
            if origin is None:
                return None
        elif before is not None:
            return None
    return origin


def _cross_entropy(
    _,
    input,
    target,
    *,
    ignore_index=IGNORED,
    reduction="mean",
    label_smoothing=0.0,
    **options,
):
    """``F.cross_entropy`` of late logits; None where it needs values."""
    if input.dim() != 2 or target.shape != input.shape[:1] or target.dtype != torch.long:
        return None
    transform = input.steps().transform()
    if label_smoothing or transform is None or reduction not in ("none", "sum", "mean"):
        return None
    if any(value is not None for value in options.values()):
        return None
    # -1 is an error, as -100 is where another label is ignored.
    labels = target.masked_fill(target == IGNORED, -1)
    labels = labels.masked_fill(target == ignore_index, IGNORED)
    scale, softcap = transform
    loss = _compute(
        input,
        lambda x, weight, bias: flow.linear_cross_entropy(
            x, weight, labels, ONE, bias=bias, scale=scale, softcap=softcap, **forward.options
        ),
    )
    if loss is None:
        return None
    if forward.now is not None and forward.options:
        forward.now.why = None
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / (labels != IGNORED).sum()
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(input.dtype)


def _reduce(function, input, dim=None, index=None, **options):
    """``function(input, dim=-1, ...)`` of late logits, for some rows at a time; None where it needs
    values.
    """
    rows, aligned = input.shape[:-1], []
    if dim not in (-1, len(rows)) or "out" in options:
        return None
    if index is not None:
        if not isinstance(index, torch.Tensor) or index.shape[:-1] != rows:
            return None
        aligned.append(index.flatten(0, -2).clone())
    steps, product, device = input.steps(), input.late.product, input.device.type
    caller = torch.autocast(
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    )

    def some(x, weight, bias, *others):
        product.check()
        made = steps(F.linear(x, weight.to(x.dtype), bias))
        with caller:
            return function(made, -1, *others, **options)

    def all_rows(x, weight, bias):
        if torch.is_grad_enabled():
            wide = product.wide and product.wide()
            weight = weight.float() if wide is None else wide
            product.wide = weakref.ref(weight)
        size = max(1, _PART // len(weight))
        parts = zip(*(t.split(size) for t in (x, *aligned)), strict=True)
        outs = [
            checkpoint(
                some, x, weight, bias, *others, use_reentrant=False, preserve_rng_state=False
            )
            for x, *others in parts
        ]
        return torch.cat(outs)

    out = _compute(input, all_rows)
    return None if out is None else ATEN._unsafe_view(out, (*rows, *out.shape[1:]))


ANSWERS: dict[Any, Any] = {F.cross_entropy: _cross_entropy}
"""Functions whose results are small."""
for _small in ("gather", "logsumexp", "sum", "argmax"):
    ANSWERS |= {getattr(torch, _small): _reduce, getattr(torch.Tensor, _small): _reduce}
