"""The loss of a causal language model without its logits: output layer and cross entropy in chunks
of the vocabulary.

**How the loss is computed.** A model of transformers calls ``lm_head(hidden)``, then
``loss_function(logits, labels, ...)``, and returns both loss and logits. Logits of a long
vocabulary are the largest tensor of training: with 128 k words they take as much memory as eight
layers. A patched model (:class:`ChunkedLM`) notes its labels, shifted by one position, before its
own forward runs. The output layer (:class:`LossHead`) then returns losses per token in place of
logits, and ``loss_function`` reduces them with ``num_items_in_batch`` as transformers does. The
product is computed inside the output layer's call, because ZeRO-3 has gathered the weight only
there. An output layer on which a program has put hooks keeps its logits (:func:`why_plain`).

**Late logits.** The result still has ``logits``, since programs read them: metrics, a second loss.
They are a :class:`LogitsOnRead`, whose values are made by the first operation that needs them, and
never in a program that looks at the loss alone. It is a subclass of ``torch.Tensor`` and not an
object that becomes a tensor, because everything that handles a model's result asks for tensors:
DDP with a static graph looks for them in the output to find where backward begins, Accelerate
converts them to fp32, reentrant checkpoints and autograd functions take gradients of tensors alone,
``torch.save`` writes them.

**What is made when.** Nothing is made by the output layer, by ``detach`` and by the copies that
accelerate and checkpoints take (``clone``, conversions of dtype): they are late logits too. Any
other operation, and what reads memory without an operation (``numpy``, ``data_ptr``, pickling), is
given the values (:class:`_Late` makes them once, without gradients). Changes in place are made to
these values. To autograd, late logits are the output of :class:`_MakeLate`, whose backward is that
of a linear layer. So a loss of logits reaches hidden states and weights, whether values were read
under ``no_grad`` before or not.

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
import threading
from collections.abc import Callable
from typing import Any

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


class _Given(threading.local):
    """What is on its way from a model to its output layer and loss function, for each thread."""

    # torch.compile cannot guard defaults of the class that each thread then covers.
    def __init__(self) -> None:
        self.head: Any = None
        """The output layer that is to return losses per token."""
        self.labels: torch.Tensor | None = None
        """The label of each position: the next token, ``IGNORED`` where none follows."""
        self.logits: LogitsOnRead | None = None
        """What the output layer returned, once it has run."""


_given = _Given()


def why_plain(model: Any) -> str | None:
    """Why a model's loss stays its own, patched or not; None where it does not."""
    head = model.lm_head
    if original_class(head) is not nn.Linear:
        return f"lm_head is {type(head).__name__}"
    if (why := own_code("lm_head", head)) is not None:
        return why
    known = getattr(model, "loss_type", None) in (None, "ForCausalLM")
    if not known or "_loss_function" in vars(model):
        return "a loss function of its own"
    return None


class ChunkedLM(ModePatched):
    """A causal language model that computes its loss in chunks."""

    @property
    def loss_function(self: Any) -> Callable[..., Any]:
        plain = self.coat_original.loss_function.fget(self)
        return plain if _given.head is None else functools.partial(_reduce, plain)

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
            accepted = (
                "0 where logits_to_keep is given, or lm_head or the loss function was replaced "
                "after the patch"
            )
            raise CoatConfigError(Problem("coat.activation.z_loss", given, accepted))

    @inlined
    def coat_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind_partial(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        labels, shifted = given.get("labels"), given.get("shift_labels")
        keep = given.get("logits_to_keep", 0)
        why = why_plain(self) if isinstance(self.lm_head, LossHead) else "another lm_head"
        how = self.coat.settings.loss if why is None else f"plain: {why}"
        self.coat.report.loss[self.coat.name] = how
        if labels is None or why is not None or not (isinstance(keep, int) and keep == 0):
            if labels is not None:
                self.coat_check_z_loss()
            return plain(self, *args, **kwargs)
        ignored = given.get("ignore_index", IGNORED)
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if ignored != IGNORED:
            shifted = shifted.masked_fill(shifted == ignored, IGNORED)
        before = _given.head, _given.labels, _given.logits
        _given.head, _given.labels, _given.logits = self.lm_head, shifted.contiguous(), None
        try:
            out = plain(self, *args, **kwargs)
            logits = _given.logits
        finally:
            _given.head, _given.labels, _given.logits = before
        if logits is None:
            self.coat_check_z_loss()
            return out
        return _with_logits(out, logits)


class LossHead(ModePatched):
    """An output layer that returns losses per token where a model asks for them."""

    @opaque
    def coat_forward(self: Any, plain: Callable[..., Any], x: Any) -> torch.Tensor:
        labels = _given.labels
        if _given.head is not self or labels is None or not (fits(x) and has_plain_weight(self)):
            return plain(self, x)
        if x.shape[:-1] != labels.shape:
            return plain(self, x)
        _given.logits = _MakeLate.apply(x, self.weight, self.bias, self)
        weight, bias = _parameters(self, x.dtype)
        settings = self.coat.settings
        return flow.linear_cross_entropy(
            x,
            weight,
            labels.to(x.device),
            ONE,
            bias=bias,
            keep=settings.loss == "kept",
            z_loss=settings.z_loss if self.training else 0.0,
        )


def _parameters(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)


@opaque
def _reduce(
    plain: Callable[..., Any],
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    **kwargs: Any,
) -> torch.Tensor:
    """``ForCausalLMLoss`` of losses per token, which stand where logits are expected."""
    if _given.logits is None:
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


class LogitsOnRead(torch.Tensor):
    """Logits whose values are made when something reads or changes them: any operation on them but
    copies. The module's docstring says why this is a tensor.
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
        aten, kwargs, late = torch.ops.aten, kwargs or {}, getattr(args[0], "late", None)
        if late is not None and function is aten.detach.default:
            return cls(late)
        # Accelerate does, every output.
        converts = function is aten._to_copy.default and set(kwargs) == {"dtype"}
        if late is not None and late.made is None and (converts or function is aten.clone.default):
            return cls(_Late(late.hidden, late.head, kwargs.get("dtype", late.dtype), late.seen))
        out = function(*_values(args), **_values(kwargs))
        return args[0] if late is not None and out is late.made else out  # changed in place


class _Late:
    """What logits are made of, and they once they are made."""

    def __init__(
        self, hidden: torch.Tensor, head: Any, dtype: torch.dtype, seen: Any = None
    ) -> None:
        self.hidden, self.head, self.dtype = hidden.detach(), head, dtype
        self.shape = (*hidden.shape[:-1], head.out_features)
        self.made: torch.Tensor | None = None
        self.seen = self._state() if seen is None else seen

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
            self.check()
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(self.hidden.device.type, enabled=False),
            ):
                self.made = F.linear(self.hidden, *_parameters(self.head, self.hidden.dtype)).to(
                    self.dtype
                )
        return self.made


class _MakeLate(torch.autograd.Function):
    """The output layer, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, head: Any) -> Any:
        # With its graph, for second derivatives; the late logits' own reference has none.
        ctx.hidden, ctx.late = hidden, _Late(hidden, head, hidden.dtype)
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
