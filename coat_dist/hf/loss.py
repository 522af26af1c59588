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
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .. import flow
from ..config import CoatConfigError, Problem
from ..flow.core.weights import weight_changes
from ..flow.function import version_of
from ..patching.reasons import has_plain_weight, original_class, own_code
from .modules import ONE, ModePatched, fits, inlined, opaque

__all__ = ["ChunkedLM", "LossHead", "LogitsOnRead", "why_plain"]

IGNORED = -100


class _Pass:
    """A forward of a model that was given labels."""

    def __init__(self, head: Any) -> None:
        self.head = head
        """The output layer that is to return late logits, or None."""
        self.hidden: dict[torch.Tensor, torch.Tensor] = {}
        """The hidden states with their graph, by those of late logits."""
        self.work: Callable[..., Any] | None = None
        """What the output layer is to compute in its next call."""
        self.why: str | None = "logits that the forward reads, or a loss without them"
        """Why the loss was not computed in chunks; None where it was."""


class _Given(threading.local):
    """The forward under way, for each thread."""

    # torch.compile cannot guard defaults of the class that each thread then covers.
    def __init__(self) -> None:
        self.now: _Pass | None = None


_given = _Given()


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
        plain = self.coat_original.loss_function.fget(self)
        return plain if _given.now is None else functools.partial(_loss, self, plain)

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
        given = inspect.signature(plain).bind_partial(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        why = why_plain(self) if isinstance(self.lm_head, LossHead) else "another lm_head"
        labels, outer = given.get("labels"), _given.now
        now = _Pass(self.lm_head if why is None else None)
        _given.now = None if labels is None else now
        try:
            out = plain(self, *args, **kwargs)
        finally:
            _given.now = outer
        if why is None and labels is not None:
            why = now.why
        how = self.coat.settings.loss if why is None else f"plain: {why}"
        self.coat.report.loss[self.coat.name] = how
        if labels is not None and why is not None:
            self.coat_check_z_loss()
        return out


class LossHead(ModePatched):
    """An output layer that returns late logits, or computes what a loss of them needs."""

    @opaque
    def coat_forward(self: Any, plain: Callable[..., Any], x: Any) -> torch.Tensor:
        now = _given.now
        if now is None or now.head is not self or not (fits(x) and has_plain_weight(self)):
            return plain(self, x)
        if now.work is not None:
            return now.work(x, *_parameters(self, x.dtype))
        logits = _MakeLate.apply(x, self.weight, self.bias, self)
        now.hidden[logits.late.hidden] = x
        return logits


def _parameters(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)


def _in_call(now: _Pass, hidden: torch.Tensor, work: Callable[..., Any]) -> torch.Tensor:
    """``work(hidden, weight, bias)``, inside a call of the output layer."""
    now.work = work
    try:
        return now.head(hidden)
    finally:
        now.work = None


@opaque
def _loss(model: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """``ForCausalLMLoss``: of late logits in chunks, of others by ``plain``, which is that
    function.
    """
    now: Any = _given.now
    bound = inspect.signature(plain).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    logits = given["logits"]
    late: Any = getattr(logits, "late", None)
    hidden: Any = None if late is None else now.hidden.get(late.hidden)
    transform = None if hidden is None else late.transform()
    if transform is None:
        return plain(*args, **kwargs)
    ignored, labels = given["ignore_index"], given["shift_labels"]
    if labels is None:
        labels = F.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
    if labels.shape != late.shape[:-1] or given["vocab_size"] != late.shape[-1]:
        return plain(*args, **kwargs)
    if ignored != IGNORED:
        labels = labels.masked_fill(labels == ignored, IGNORED)
    labels = labels.to(hidden.device)
    settings = model.coat.settings

    def losses(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return flow.linear_cross_entropy(
            x,
            weight,
            labels,
            ONE,
            bias=bias,
            keep=settings.loss == "kept",
            z_loss=settings.z_loss if model.training else 0.0,
            scale=transform[0],
            softcap=transform[1],
        )

    # Logits that were detached have no gradient.
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        loss = _in_call(now, hidden, losses).sum()
    now.why = None
    count = given["num_items_in_batch"]
    if count is None:
        count = (labels != IGNORED).sum()
    elif isinstance(count, torch.Tensor):
        count = count.to(loss.device)
    return loss / count


class LogitsOnRead(torch.Tensor):
    """Logits whose values are made when something reads or changes them: by any operation that is
    not recorded. The module's docstring says why this is a tensor.
    """

    late: _Late

    @staticmethod
    def __new__(cls, late: _Late) -> LogitsOnRead:
        self = torch.Tensor._make_wrapper_subclass(
            cls, late.shape, dtype=late.dtype, device=late.hidden.device
        )
        self.late = late
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _OF_MEMORY:
            args, kwargs = _values((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **kwargs or {})
            if out is None and function == _T.grad.__get__ and args[0].retains_grad:
                raise RuntimeError(
                    "logits.grad: got none, since the loss was computed without the logits, "
                    "accepted: a loss that is "
                    'computed from them, or "coat": {"activation": {"loss": "plain"}}'
                )
            return out

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, late = kwargs or {}, getattr(args[0], "late", None)
        if late is not None and function is _ATEN.detach.default:
            return cls(late)
        if late is not None and late.made is None and _is_recorded(function, args[1:], kwargs):
            return cls(late.then(function, args[1:], kwargs))
        out = function(*_values(args), **_values(kwargs))
        return args[0] if late is not None and out is late.made else out  # changed in place


class _Step(NamedTuple):
    """An operation on logits: ``function(logits, *rest, **options)``."""

    function: Any
    rest: tuple
    options: dict[str, Any]


class _Late:
    """What logits are made of, and they once they are made."""

    def __init__(
        self, hidden: torch.Tensor, head: Any, seen: Any = None, steps: tuple[_Step, ...] = ()
    ) -> None:
        self.hidden, self.head, self.steps = hidden, head, steps
        self.shape, self.dtype = (*hidden.shape[:-1], head.out_features), hidden.dtype
        for step in steps:
            self.dtype = step.options.get("dtype", self.dtype)
        self.made: torch.Tensor | None = None
        self.seen = self._state() if seen is None else seen

    def then(self, function: Any, rest: tuple, options: dict[str, Any]) -> _Late:
        """The logits that an operation makes of these."""
        steps = (*self.steps, _Step(function, rest, options))
        return _Late(self.hidden, self.head, self.seen, steps)

    def transform(self) -> tuple[float, float] | None:
        """``scale`` and ``softcap`` of :func:`coat_dist.flow.linear_cross_entropy`. None where
        values were read, and may have been changed, or where the operations are others.
        """
        scale, softcap = 1.0, 0.0
        for function, rest, _ in self.steps:
            if function is _ATEN.tanh.default:
                if softcap:
                    return None
                softcap = 1.0
            elif rest:
                factor = rest[0] if function is _ATEN.mul.Tensor else 1 / rest[0]
                # softcap * tanh(scale * x / softcap) * factor
                scale, softcap = scale * factor, softcap * factor
        return (scale, abs(softcap)) if self.made is None else None

    def _state(self) -> tuple:
        parameters = [p for p in (self.head.weight, self.head.bias) if p is not None]
        return weight_changes(), version_of(self.hidden), [(id(p), p._version) for p in parameters]

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

    def tensor(self) -> torch.Tensor:
        """The logits, without gradients."""
        if self.made is None:
            now, hidden = _given.now, self.hidden
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(hidden.device.type, enabled=False),
            ):
                if now is not None and now.head is self.head:
                    made = _in_call(now, hidden, F.linear)
                else:
                    self.check()
                    made = F.linear(hidden, *_parameters(self.head, hidden.dtype))
                for function, rest, options in self.steps:
                    made = function(made, *rest, **options)
            self.made = made
        return self.made


def _is_recorded(function: Any, rest: tuple, options: dict[str, Any]) -> bool:
    """Whether late logits record an operation: a copy, a multiple by a number, or tanh."""
    if function in (_ATEN.mul.Tensor, _ATEN.div.Tensor):
        number = rest[0]
        return type(number) in (int, float) and number != 0 and math.isfinite(number)
    if function is _ATEN._to_copy.default:
        return set(options) == {"dtype"} and options["dtype"].is_floating_point
    return function in (_ATEN.clone.default, _ATEN.tanh.default)


class _MakeLate(torch.autograd.Function):
    """The output layer, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, head: Any) -> Any:
        # With its graph, for second derivatives; the late logits' own reference has none.
        ctx.hidden, ctx.late = hidden, _Late(hidden.detach(), head)
        return LogitsOnRead(ctx.late)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        ctx.late.check()
        head, rows = ctx.late.head, grads[0].flatten(0, -2)
        for_hidden = for_weight = for_bias = None
        hidden_needed, weight_needed, bias_needed, _ = ctx.needs_input_grad
        if hidden_needed:
            for_hidden = rows.mm(head.weight.to(rows.dtype)).view_as(ctx.hidden)
        if weight_needed:
            for_weight = rows.t().mm(ctx.hidden.flatten(0, -2)).to(head.weight.dtype)
        if bias_needed:
            for_bias = rows.sum(0).to(head.bias.dtype)
        return for_hidden, for_weight, for_bias, None


def _values(given: Any) -> Any:
    """``given`` with values in place of logits."""
    return torch.utils._pytree.tree_map_only(
        LogitsOnRead, lambda logits: logits.late.tensor(), given
    )


_ATEN: Any = torch.ops.aten
_T: Any = torch.Tensor
_OF_MEMORY = (
    _T.numpy,
    _T.tolist,
    _T.data_ptr,
    _T.untyped_storage,
    _T.share_memory_,
    _T.__array__,
    _T.__reduce_ex__,
    _T.__dlpack__,
)
"""What autograd and operations do not see."""
