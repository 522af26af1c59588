"""The loss of a causal language model without its logits: output layer and cross entropy in chunks of the vocabulary.

With labels, in training, the output layer returns losses per token from inside its own call, where ZeRO-3 has gathered
its weight, and the model's loss function reduces them as transformers does. ``logits`` of the result are made when
somebody reads them.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import flow
from ..flow.weights import weight_changes
from .modules import ONE, Patched, fits

__all__ = ["ChunkedLM", "LossHead", "LogitsOnRead", "why_plain"]

IGNORED = -100


class _Given(threading.local):
    head: Any = None
    """The output layer that is to return losses per token."""
    labels: torch.Tensor | None = None
    """Of each position's next token, ``IGNORED`` where there is none."""
    hidden: torch.Tensor | None = None
    """What the output layer was given."""


_given = _Given()


def why_plain(model: Any) -> str | None:
    """Why a model's loss stays its own; None where it does not."""
    if type(model.lm_head) is not nn.Linear:
        return f"lm_head is {type(model.lm_head).__name__}"
    if getattr(model, "loss_type", "ForCausalLM") not in (None, "ForCausalLM") or "_loss_function" in vars(model):
        return "a loss function of its own"
    return None


class ChunkedLM(Patched):
    """A causal language model that computes its loss in chunks."""

    @property
    def loss_function(self: Any) -> Callable[..., Any]:
        plain = self.coat_original.loss_function.fget(self)
        return plain if _given.head is None else functools.partial(_reduce, plain)

    @loss_function.setter
    def loss_function(self: Any, value: Any) -> None:
        self.coat_original.loss_function.fset(self, value)

    def coat_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind_partial(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        labels, shifted = given.get("labels"), given.get("shift_labels")
        keep = given.get("logits_to_keep", 0)
        changed = not isinstance(self.lm_head, LossHead) or "_loss_function" in vars(self)  # since it was patched
        if labels is None or changed or not (isinstance(keep, int) and keep == 0):
            return plain(self, *args, **kwargs)
        ignored = given.get("ignore_index", IGNORED)
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if ignored != IGNORED:
            shifted = shifted.masked_fill(shifted == ignored, IGNORED)
        before = _given.head, _given.labels, _given.hidden
        _given.head, _given.labels, _given.hidden = self.lm_head, shifted.contiguous(), None
        try:
            out = plain(self, *args, **kwargs)
            hidden = _given.hidden
        finally:
            _given.head, _given.labels, _given.hidden = before
        return out if hidden is None else _with_logits(out, LogitsOnRead(hidden, self.lm_head))


class LossHead(Patched):
    """An output layer that returns losses per token where a model asks for them."""

    def coat_forward(self: Any, plain: Callable[..., Any], x: Any) -> torch.Tensor:
        labels = _given.labels
        if _given.head is not self or labels is None or not fits(x) or x.shape[:-1] != labels.shape:
            return plain(self, x)
        _given.hidden = x
        weight = self.weight if self.weight.dtype == x.dtype else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        keep = self.coat.settings.loss == "kept"
        return flow.linear_cross_entropy(x, weight, labels.to(x.device), ONE, bias=bias, keep=keep)


def _reduce(
    plain: Callable[..., Any], logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any
) -> torch.Tensor:
    """``ForCausalLMLoss`` of losses per token, which stand where logits are expected."""
    if _given.hidden is None:
        return plain(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
    count = kwargs.get("num_items_in_batch")
    if count is None:
        assert _given.labels is not None
        count = (_given.labels != IGNORED).sum().to(logits.device)
    elif isinstance(count, torch.Tensor):
        count = count.to(logits.device)
    return logits.sum() / count


def _with_logits(out: Any, logits: LogitsOnRead) -> Any:
    """The model's result with ``logits`` in place of losses per token."""
    if isinstance(out, tuple):
        return (out[0], logits, *out[2:])
    out.logits = logits
    return out


class LogitsOnRead:
    """Stands for logits, and is them from the first read on: any attribute, item or operation of torch.

    A tensor is not made before, and never kept by a program that looks at the loss alone.
    """

    def __init__(
        self, hidden: torch.Tensor, head: Any, dtype: torch.dtype | None = None, changes: int | None = None
    ) -> None:
        self._parts, self._dtype = (hidden, head), dtype
        self._made: torch.Tensor | None = None
        self._changes = weight_changes() if changes is None else changes

    def tensor(self) -> torch.Tensor:
        """The logits.

        Raises:
            RuntimeError: ZeRO-3 has let the output layer's weight go, or it may have changed since forward.
        """
        # Made anew where it was read without gradients first, for a metric, and now belongs to a loss.
        if self._made is None or (torch.is_grad_enabled() and not self._made.requires_grad):
            hidden, head = self._parts
            if self._changes != weight_changes():
                raise RuntimeError(
                    "logits: read after an optimizer's step, or another change of weights, accepted: before it, "
                    'or "coat": {"activation": {"loss": "plain"}}'
                )
            weight: Any = head.weight
            if hasattr(weight, "ds_shape") and weight.shape != weight.ds_shape:
                raise RuntimeError(
                    "logits: read after forward under ZeRO-3, accepted: inside deepspeed.zero.GatheredParameters of "
                    'lm_head, or "coat": {"activation": {"loss": "plain"}}'
                )
            self._made = F.linear(hidden, weight.to(hidden.dtype), head.bias).to(self.dtype)
        return self._made

    @property
    def dtype(self) -> torch.dtype:
        """Known before they are made: Accelerate asks every output."""
        return self._parts[0].dtype if self._dtype is None else self._dtype

    def float(self) -> LogitsOnRead:
        """In fp32, still not made: what Accelerate does to every output."""
        return LogitsOnRead(*self._parts, torch.float32, self._changes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __len__(self) -> int:
        return len(self.tensor())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def made(value: Any) -> Any:
            if isinstance(value, LogitsOnRead):
                return value.tensor()
            return type(value)(map(made, value)) if type(value) in (list, tuple) else value

        return function(*made(tuple(args)), **{k: made(v) for k, v in (kwargs or {}).items()})


# What finds tensors in a result, to know where backward begins, finds these: DDP with a static graph, and FSDP2.
torch.utils._pytree.register_pytree_node(
    LogitsOnRead,
    lambda logits: ([logits._parts[0]], (logits._parts[1], logits._dtype, logits._changes)),
    lambda hidden, rest: LogitsOnRead(*hidden, *rest),
)


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(torch.Tensor, name)(self.tensor(), *args)


_BOTH_SIDES = ["add", "sub", "mul", "truediv", "pow", "matmul"]
for _name in [*_BOTH_SIDES, *(f"r{n}" for n in _BOTH_SIDES), *["neg", "eq", "ne", "lt", "le", "gt", "ge", "setitem"]]:
    setattr(LogitsOnRead, f"__{_name}__", _operator(f"__{_name}__"))  # Python looks operators up in the class alone
