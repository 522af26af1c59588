"""The loss and the log-probabilities of a causal language model without its logits.

**How the loss is computed.** A model of transformers calls ``lm_head(hidden)``, may scale or cap
the logits, calls ``loss_function(logits, labels, ...)``, and returns both loss and logits. Logits
of a long vocabulary are the largest tensor of training: with 128 k words they take as much memory
as eight layers. While a patched model (:class:`ChunkedLM`) runs its own forward, the output layer
(:class:`LossHead`) returns late logits (``late.py``), which hold no values. transformers' own loss
function calls ``F.cross_entropy``, which late logits answer in chunks of the vocabulary, with what
the model did to them. Nothing else about the model's forward has to be known: an operation that
late logits cannot answer gets values, and a loss of values is computed by transformers' code.

**With labels and without.** A program that gives no labels computes something from the logits after
forward, such as log-probabilities. It gets late logits where the output layer's weight is still
there then, and values otherwise (:func:`_needs_values`). :func:`log_probs` needs no weight after
forward: it has what it wants computed at the end of the model's own forward, beside the logits, so
that every wrapper of the model sees it as a result. It counts only if the logits come back as they
were then.

An output layer on which a program has put hooks keeps its logits (:func:`why_plain`).
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
from .late import MakeLate, identity
from .late_steps import Pass, forward, parameters
from .layer import gathers_itself
from .modules import ModePatched, fits, inlined, is_cached, opaque


@opaque
def why_plain(model: Any) -> str | None:
    """Why a model's loss stays its own, patched or not; None where it does not."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.lm_head
    if original_class(head) is not nn.Linear:
        return f"lm_head is {type(head).__name__}"
    if (why := own_code("lm_head", head)) is not None:
        return why
    if torch.nn.modules.module._has_any_global_hook():
        return "a hook on all modules"
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
        labels, outer, request = named.get("labels"), forward.now, forward.request
        settings = self.coat.settings
        now = Pass(
            self.lm_head if why is None else None,
            {"keep": settings.loss == "kept", "z_loss": settings.z_loss * self.training},
        )
        of_values = labels is None and request is None and _needs_values(self, args, kwargs)
        forward.now = None if of_values else now
        forward.request = None
        try:
            out = plain(self, *args, **kwargs)
            if request is not None:
                request(out)
        finally:
            forward.now = outer
        if why is None and labels is not None:
            why = now.why
        self.coat.report.loss[self.coat.name] = settings.loss if why is None else f"plain: {why}"
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

    def compute(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
            return (found,)
        logs = F.log_softmax(logits, -1)
        return found, -(logs.exp() * logs).sum(-1)

    answered = []

    def request(out: Any) -> None:
        if one := identity(out.logits):
            answered.append(one)
            # Every wrapper knows the field and takes its tensors for results.
            out["hidden_states"] = compute(out.logits)

    if labels is None and isinstance(inputs.get("logits_to_keep"), torch.Tensor):
        raise ValueError("labels: got None with positions to keep, accepted: one for each of them")
    forward.request = request
    try:
        out = model(input_ids=input_ids, **{"use_cache": False, **inputs}, return_dict=True)
    finally:
        forward.request = None
    found = getattr(out, "hidden_states", None)
    if found is None or answered != [identity(out.logits)]:  # they were changed since
        found = compute(out.logits)
    return found if entropy else found[0]


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
    if forward.now is not None:
        forward.options = forward.now.options
    try:
        return plain(*args, **kwargs)
    finally:
        forward.options = {}


@opaque
def _needs_values(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether logits are made in forward, though nothing says what for: in generation, which reads
    them at once, and where ZeRO-3 or FSDP2 gathers the weight for the forward alone.
    """
    return (
        is_cached(model, args, kwargs)
        or hasattr(model.lm_head.weight, "ds_id")
        or any(gathers_itself(module.__class__) for module in model.modules())
    )
