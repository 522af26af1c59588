"""The loss of a causal language model without its logits: output layer and cross entropy in chunks
of the vocabulary.

**How the loss is computed.** A model of transformers calls ``lm_head(hidden)``, may scale or cap
the logits, calls ``loss_function(logits, labels, ...)``, and returns both loss and logits. Logits
of a long vocabulary are the largest tensor of training: with 128 k words they take as much memory
as eight layers. While a patched model (:class:`ChunkedLM`) that was given labels runs its own
forward, the output layer (:class:`LossHead`) returns late logits, which hold no values. They record
the operations that make other logits of them element by element (:func:`_is_recorded`).
``loss_function`` (:func:`_loss`) then computes the loss of transformers' ``ForCausalLMLoss`` in
chunks, with what was recorded, and with the labels and options of that call. Nothing else about the
model's forward has to be known: whatever reads or changes the logits by other operations gets
values, and a loss of values is computed by transformers' code.

**Two calls of the output layer.** ZeRO-3 has gathered the weight only while the output layer runs.
So :func:`_loss` calls the layer again, with the hidden states of the first call, and the product is
computed inside that call. Hooks of ZeRO-3 then act on this product as on the model's own, in
backward too. Logits that are read within forward are made in the same way. An output layer on which
a program has put hooks keeps its logits (:func:`why_plain`).

**Late logits.** The result still has ``logits``, since programs read them: metrics, a second loss.
They are a :class:`LogitsOnRead`, whose values are made by the first operation that needs them, and
never in a program that looks at the loss alone. It is a subclass of ``torch.Tensor`` and not an
object that becomes a tensor, because everything that handles a model's result asks for tensors:
DDP with a static graph looks for them in the output to find where backward begins, Accelerate
converts them to fp32, reentrant checkpoints and autograd functions take gradients of tensors alone,
``torch.save`` writes them.

**What is made when.** Nothing is made by the output layer, by ``detach``, by the operations that
are recorded, and by the copies that accelerate and checkpoints take (``clone``, conversions of
dtype): their results are late logits too. Any other operation, and what reads memory without an
operation (``numpy``, ``data_ptr``, pickling), is given the values (:class:`_Late` makes them once,
without gradients, by the recorded operations). Changes in place are made to these values. To
autograd, late logits are the output of :class:`_MakeLate`, whose backward is that of a linear
layer, and recorded operations are what they are of any tensor. So a loss of logits reaches hidden
states and weights, whether values were read under ``no_grad`` before or not.

**What is refused.** Values are those of the forward pass. So reading them for the first time after
an optimizer's step, or after another change of weight or hidden states, raises an error; so does
``logits.grad`` where the loss did not use the logits, which would silently be None.

**ZeRO-3** lets the output layer's weight go when its call ends. Reading logits later is an error
that names ``GatheredParameters``, and not a product with an empty weight. Backward through logits
needs the weight too, and raises the same error where ZeRO-3 has not fetched it.

**Two references to the hidden states.** ``ctx.hidden`` in :class:`_MakeLate` has its graph, so that
second derivatives pass through the product of backward. ``late.hidden`` is detached: logits that a
program keeps, for metrics over an epoch, hold the hidden states but no graph of the model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..config import CoatConfigError, Problem
from ..patching.reasons import has_plain_weight, original_class, own_code
from .late import MakeLate, Pass, forward, parameters
from .layer import is_fully_sharded
from .modules import ModePatched, fits, inlined, opaque

__all__ = ["ChunkedLM", "LossHead", "log_probs", "why_plain"]


@opaque
def why_plain(model: Any) -> str | None:
    """Why a model's loss stays its own, patched or not; None where it does not."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.lm_head
    if original_class(head) is not nn.Linear:
        return f"lm_head is {type(head).__name__}"
    if (why := own_code("lm_head", head)) is not None:
        return why
    own = getattr(original_class(model), "loss_function", None)
    if not isinstance(own, property) or own.fget(model) is not ForCausalLMLoss:  # type: ignore[misc]
        return "a loss function of its own"
    return None


class ChunkedLM(ModePatched):
    """A causal language model that computes its loss in chunks."""

    @property
    @opaque
    def loss_function(self: Any) -> Callable[..., Any]:
        return functools.partial(_loss, self.coat_original.loss_function.fget(self))

    @loss_function.setter
    def loss_function(self: Any, value: Any) -> None:
        self.coat_original.loss_function.fset(self, value)

    def coat_check_z_loss(self: Any) -> None:
        """Raises CoatConfigError where a loss that was computed by the model's own code lacks
        the z-loss.
        """
        z_loss = self.coat.settings.z_loss
        if self.training and z_loss:
            given = f"got {z_loss} and a loss that stays plain"
            accepted = f"0 with {self.coat.report.loss[self.coat.name].removeprefix('plain: ')}"
            raise CoatConfigError(Problem("coat.activation.z_loss", given, accepted))

    @inlined
    def coat_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(plain).bind_partial(self, *args, **kwargs).arguments
        named |= named.pop("kwargs", {})
        why = why_plain(self) if isinstance(self.lm_head, LossHead) else "another lm_head"
        labels, outer, instead = named.get("labels"), forward.now, forward.instead
        settings = self.coat.settings
        now = Pass(
            self.lm_head if why is None else None,
            settings.loss == "kept",
            settings.z_loss if self.training and instead is None else 0.0,
        )
        may_read_later = labels is None and instead is None
        forward.now = None if may_read_later and _is_gathered(self) else now
        forward.instead = None
        try:
            out = plain(self, *args, **kwargs)
            if instead is not None:
                out.logits = instead(out.logits)
        finally:
            forward.now = outer
        if why is None and labels is not None:
            why = now.why
        how = settings.loss if why is None else f"plain: {why}"
        self.coat.report.loss[self.coat.name] = how
        if labels is not None and why is not None:
            self.coat_check_z_loss()
        return out


def log_probs(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    **inputs: Any,
) -> Any:
    """Log-probabilities of tokens under a causal language model of transformers, without logits of
    ``[b, s, vocabulary]``.

    They are differentiable, and computed inside the model's own forward. So the model may be
    wrapped: by DeepSpeed's engine with any ZeRO stage, DDP, FSDP2, PEFT. A patched model computes
    them in chunks where it would run the flow: in training mode, or in eval mode with
    ``"evaluation": "flow"``. Then they are the same bits with ``entropy`` and without, with
    gradients and without. Any other model makes all logits.

    Args:
        model: it is called once, ``model(input_ids=input_ids, **inputs)``.
        input_ids: integers ``[b, s]``.
        labels: integers, one for each position of the logits: the token that follows it. -100 has
            log-probability and gradient zero. None = the next of ``input_ids``, ``[b, s - 1]``.
        temperature: divides the logits.
        entropy: also compute the entropy at each position. Detach it where it is a metric alone.
        inputs: such as ``attention_mask``, ``position_ids``, ``logits_to_keep`` (n + 1 for the last
            n tokens).

    Returns:
        Log-probabilities, fp32, of the shape of ``labels``; with ``entropy`` a tuple of these and
        entropies in nats, of the same shape and dtype.

    Raises:
        ValueError: labels of another shape, or (on a CPU) outside of the vocabulary.
    """

    def instead(logits: torch.Tensor) -> Any:
        wanted = labels
        if wanted is None:
            wanted = input_ids[:, input_ids.shape[1] + 1 - logits.shape[1] :]
            logits = logits[:, :-1]
        if wanted.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels: got {list(wanted.shape)}, accepted: {list(logits.shape[:-1])}, one for "
                "each position of the logits"
            )
        logits = logits.float() / temperature
        rows = logits.reshape(-1, logits.shape[-1])
        found = -F.cross_entropy(rows, wanted.reshape(-1), reduction="none").view(wanted.shape)
        if not entropy:
            return found
        logs = F.log_softmax(logits, -1)
        return found, -(logs.exp() * logs).sum(-1)

    forward.instead = instead
    try:
        out = model(input_ids=input_ids, **{"use_cache": False, **inputs}, return_dict=True).logits
    finally:
        taken, forward.instead = forward.instead is None, None
    return out if taken else instead(out)


class LossHead(ModePatched):
    """An output layer that returns late logits, or computes what a loss of them needs."""

    @opaque
    def coat_forward(self: Any, plain: Callable[..., Any], x: Any) -> torch.Tensor:
        now = forward.now
        if now is None or now.head is not self:
            return plain(self, x)
        if now.work is not None:
            return now.work(x, *parameters(self, x.dtype))
        if not (fits(x) and has_plain_weight(self)):
            return plain(self, x)
        return MakeLate.apply(x, self.weight, self.bias, self)


@opaque
def _loss(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    return plain(*args, **kwargs)


def _is_gathered(model: Any) -> bool:
    """Whether ZeRO-3 or FSDP2 gathers the output layer's weight for the forward alone."""
    if hasattr(model.lm_head.weight, "ds_id"):
        return True
    return any(is_fully_sharded(module.__class__) for module in model.modules())
