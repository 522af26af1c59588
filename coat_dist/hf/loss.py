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
from .layer import is_fully_sharded
from .modules import ONE, ModePatched, fits, inlined, opaque

__all__ = ["ChunkedLM", "LossHead", "LogitsOnRead", "why_plain"]

IGNORED = -100


class _Pass:
    """A forward of a model whose output layer is to return late logits."""

    def __init__(self, head: Any, keep: bool, z_loss: float) -> None:
        self.head = head
        """The output layer, or None where it returns values."""
        self.keep, self.z_loss = keep, z_loss
        """Options of :func:`coat_dist.flow.linear_cross_entropy`."""
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
        given = inspect.signature(plain).bind_partial(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        why = why_plain(self) if isinstance(self.lm_head, LossHead) else "another lm_head"
        labels, outer = given.get("labels"), _given.now
        settings = self.coat.settings
        now = _Pass(
            self.lm_head if why is None else None,
            settings.loss == "kept",
            settings.z_loss if self.training else 0.0,
        )
        _given.now = None if labels is None and _is_gathered(self) else now
        try:
            out = plain(self, *args, **kwargs)
        finally:
            _given.now = outer
        if why is None and labels is not None:
            why = now.why
        how = settings.loss if why is None else f"plain: {why}"
        self.coat.report.loss[self.coat.name] = how
        if labels is not None and why is not None:
            self.coat_check_z_loss()
        return out


class LossHead(ModePatched):
    """An output layer that returns late logits, or computes what a loss of them needs."""

    @opaque
    def coat_forward(self: Any, plain: Callable[..., Any], x: Any) -> torch.Tensor:
        now = _given.now
        if now is None or now.head is not self:
            return plain(self, x)
        if now.work is not None:
            return now.work(x, *_parameters(self, x.dtype))
        if not (fits(x) and has_plain_weight(self)):
            return plain(self, x)
        return _MakeLate.apply(x, self.weight, self.bias, self)


def _parameters(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)


def _is_gathered(model: Any) -> bool:
    """Whether ZeRO-3 or FSDP2 gathers the output layer's weight for the forward alone."""
    if hasattr(model.lm_head.weight, "ds_id"):
        return True
    return any(is_fully_sharded(type(module)) for module in model.modules())


@opaque
def _loss(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    return plain(*args, **kwargs)


class LogitsOnRead(torch.Tensor):
    """Logits whose values are made when something reads or changes them: by any operation that is
    not recorded. The module's docstring says why this is a tensor.
    """

    late: _Late

    @staticmethod
    def __new__(cls, late: _Late) -> LogitsOnRead:
        self = torch.Tensor._make_wrapper_subclass(
            cls, late.shape, dtype=late.source.dtype, device=late.rows.device
        )
        self.late = late
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _OF_MEMORY:
            args, kwargs = _values((args, kwargs))
        elif function in _REDUCE:
            out = _REDUCE[function](function, *args, **kwargs or {})
            if out is not None:
                return out
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
        if late is not None and late.source.made is None:
            if late.changed(function, args[1:]):
                return args[0]
            if (out := late.recorded(function, args[1:], kwargs)) is not None:
                return cls(out) if isinstance(out, _Late) else [cls(part) for part in out]
        values = _values(args)
        out = function(*values, **_values(kwargs))
        return args[0] if out is values[0] else out  # changed in place


class _Step(NamedTuple):
    """An operation on logits: ``function(logits, *rest, **options)``."""

    function: Any
    rest: tuple
    options: dict[str, Any]
    part: int | None = None
    """Which of several results."""


class _Steps(tuple[_Step, ...]):
    """Operations in their order. Among the arguments of one may be other steps: what they make of
    the same tensor.
    """

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        out: Any = tensor
        for function, rest, options, part in self:
            if function is _ATEN.view.default:  # logits, or hidden states in their place
                out = out.reshape(*rest[0][:-1], out.shape[-1])
                continue
            given = [each(tensor) if isinstance(each, _Steps) else each for each in rest]
            out = function(out, *given, **options)
            if part is not None:
                out = out[part]
        return out

    def then(self, *steps: _Step) -> _Steps:
        return _Steps((*self, *steps))


_NONE = _Steps()


class _Product:
    """A call of the output layer."""

    def __init__(self, hidden: torch.Tensor, head: Any) -> None:
        self.hidden, self.head = hidden, head
        self.seen = self._state()

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

    def compute(self, hidden: torch.Tensor, work: Callable[..., Any]) -> torch.Tensor:
        """``work(hidden, weight, bias)``: during the model's forward, inside a call of the output
        layer.
        """
        now = _given.now
        if now is None or now.head is not self.head:
            self.check()
            return work(hidden, *_parameters(self.head, hidden.dtype))
        now.work = work
        try:
            return self.head(hidden)
        finally:
            now.work = None


class _Source:
    """Logits of some positions, and their values once these are made. Views share it."""

    def __init__(
        self,
        product: _Product,
        hidden: torch.Tensor,
        path: _Steps = _NONE,
        steps: _Steps = _NONE,
    ) -> None:
        self.product, self.hidden, self.path, self.steps = product, hidden, path, steps
        """``hidden`` is what ``path`` makes of the product's hidden states."""
        self.dtype = steps(torch.empty(1, 1, dtype=hidden.dtype, device="meta")).dtype
        self.made: torch.Tensor | None = None


class _Late:
    """Logits, or what was made of them row by row, without values."""

    def __init__(self, source: _Source, views: _Steps = _NONE) -> None:
        self.source, self.views = source, views
        self.rows = views(source.hidden)
        self.shape = (*self.rows.shape[:-1], source.product.head.out_features)

    def recorded(self, function: Any, rest: tuple, options: dict[str, Any]) -> Any:
        """The late logits that an operation makes of these, or several; None where it needs
        values.
        """
        source, last = self.source, len(self.shape) - 1
        step, path = _Step(function, rest, options), source.path.then(*self.views)
        if function in _VIEWS:
            place = _VIEWS[function]
            dim = rest[place] if len(rest) > place else 0
            if function is _ATEN.view.default:
                dim = 0 if dim[-1] == self.shape[-1] else last
            if dim % len(self.shape) == last:
                return None
            if function not in (_ATEN.split.Tensor, _ATEN.unbind.int):
                return _Late(source, self.views.then(step))
            parts = range(len(function(self.rows, *rest)))
            return [_Late(source, self.views.then(step._replace(part=i))) for i in parts]
        if function is _ATEN.index.Tensor:
            (mask, *others) = rest[0]
            if others or mask.dtype != torch.bool or mask.dim() > last:
                return None
            chosen = function(self.rows, *rest)
            return _Late(_Source(source.product, chosen, path.then(step), source.steps))
        if function in (_ATEN._log_softmax.default, _ATEN._softmax.default):
            if rest[0] % len(self.shape) != last:
                return None
            step = step._replace(rest=(-1, *rest[1:]))
        elif function in _SCALING:
            other = getattr(rest[0], "late", None)
            if other is not None and other.rows is self.rows and other.source.made is None:
                step = step._replace(rest=(other.source.steps,))
            elif not _is_factor(rest[0]):
                return None
        elif function is _ATEN._to_copy.default:
            if set(options) != {"dtype"} or not options["dtype"].is_floating_point:
                return None
        elif function not in _ELEMENTWISE:
            return None
        return _Late(_Source(source.product, self.rows, path, source.steps.then(step)))

    def changed(self, function: Any, rest: tuple) -> bool:
        """Whether an operation was recorded that changes all of these logits in place."""
        source = self.source
        if function not in _IN_PLACE or not _is_factor(rest[0]):
            return False
        if self.rows.numel() != source.hidden.numel():
            return False
        source.steps = source.steps.then(_Step(_IN_PLACE[function], rest, {}))
        return True

    def transform(self) -> tuple[float, float] | None:
        """``scale`` and ``softcap`` of :func:`coat_dist.flow.linear_cross_entropy`. None where the
        operations are others.
        """
        scale, softcap = 1.0, 0.0
        for function, rest, _, _ in self.source.steps:
            if function is _ATEN.tanh.default and not softcap:
                softcap = 1.0
            elif function in _SCALING and _is_factor(rest[0]):
                factor = rest[0] if function is _ATEN.mul.Tensor else 1 / rest[0]
                # softcap * tanh(scale * x / softcap) * factor
                scale, softcap = scale * factor, softcap * factor
            elif function not in (_ATEN._to_copy.default, _ATEN.clone.default):
                return None
        return scale, abs(softcap)

    def tensor(self) -> torch.Tensor:
        """The values, without gradients."""
        source = self.source
        if source.made is None:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(source.hidden.device.type, enabled=False),
            ):
                source.made = source.steps(source.product.compute(source.hidden, F.linear))
        return self.views(source.made)


def _is_factor(number: Any) -> bool:
    return type(number) in (int, float) and number != 0 and math.isfinite(number)


def _hidden(logits: Any) -> torch.Tensor | None:
    """The hidden states of late logits, ``[..., h]``, with the graph that the logits have. None
    where there are values, or where the graph has more in it than recorded operations.
    """
    late = getattr(logits, "late", None)
    if late is None or late.source.made is not None:
        return None
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return late.rows
    made = _made_by(logits.grad_fn)
    return None if made is None else late.views(late.source.path(made.hidden))


def _made_by(node: Any) -> Any:
    """The :class:`_MakeLate` with which a graph of recorded operations begins."""
    if isinstance(node, _MakeLate._backward_cls):
        return node
    # A function in Python is not recorded, such as that by which DDP sees backward begin.
    if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
        return None
    found = {_made_by(before) for before, _ in node.next_functions if before is not None}
    return found.pop() if len(found) == 1 else None


def _cross_entropy(
    function: Any,
    input: Any,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``F.cross_entropy`` of late logits; None where it needs values."""
    hidden = _hidden(input)
    unknown = weight, size_average, reduce, label_smoothing or None
    if hidden is None or any(each is not None for each in unknown) or hidden.dim() != 2:
        return None
    transform = input.late.transform()
    if transform is None or target.shape != hidden.shape[:1] or target.is_floating_point():
        return None
    labels, product, now = target, input.late.source.product, _given.now
    if ignore_index != IGNORED:
        labels = labels.masked_fill(labels == ignore_index, IGNORED)
    options = {}
    if now is not None and now.head is product.head:
        now.why = None
        options = {"keep": now.keep, "z_loss": now.z_loss}

    def losses(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale, softcap = transform
        return flow.linear_cross_entropy(
            x, weight, labels, ONE, bias=bias, scale=scale, softcap=softcap, **options
        )

    # Logits that were detached have no gradient.
    with torch.set_grad_enabled(torch.is_grad_enabled() and input.requires_grad):
        loss = product.compute(hidden, losses).to(input.dtype)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (labels != IGNORED).sum()


def _reduce(function: Any, input: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """``function(input, dim=-1, ...)`` of late logits, for some positions at a time; None where it
    needs values.
    """
    hidden = _hidden(input)
    if hidden is None:
        return None
    if "dim" in kwargs:
        args = (kwargs.pop("dim"), *args)
    if not (args and isinstance(args[0], int) and args[0] % input.dim() == input.dim() - 1):
        return None
    dim, *rest = -1, *args[1:]
    aligned = []
    if function in _GATHERS:
        index = kwargs.pop("index") if "index" in kwargs else rest.pop(0)
        if index.shape[:-1] != input.shape[:-1]:
            return None
        aligned.append(index.reshape(-1, index.shape[-1]))
    steps, device = input.late.source.steps, hidden.device.type
    autocast = {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
    }

    def some(logits: torch.Tensor, *aligned: torch.Tensor) -> torch.Tensor:
        logits = steps(logits)
        with torch.autocast(**autocast):
            return function(logits, dim, *aligned, *rest, **kwargs)

    def all_rows(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return flow.map_logits(x, weight, bias, some, *aligned)

    with torch.set_grad_enabled(torch.is_grad_enabled() and input.requires_grad):
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = input.late.source.product.compute(rows, all_rows)
    return out.view(*input.shape[:-1], *out.shape[1:])


class _MakeLate(torch.autograd.Function):
    """The output layer, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, head: Any) -> Any:
        # With its graph, for second derivatives; the late logits' own reference has none.
        ctx.hidden, ctx.product = hidden, _Product(hidden.detach(), head)
        return LogitsOnRead(_Late(_Source(ctx.product, ctx.product.hidden)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        ctx.product.check()
        head, rows = ctx.product.head, grads[0].flatten(0, -2)
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

_VIEWS = {
    _ATEN.view.default: 0,
    _ATEN.slice.Tensor: 0,
    _ATEN.select.int: 0,
    _ATEN.squeeze.dim: 0,
    _ATEN.unbind.int: 0,
    _ATEN.split.Tensor: 1,
}
"""Operations whose results share memory, and which of their arguments names dimensions."""
_IN_PLACE = {_ATEN.mul_.Tensor: _ATEN.mul.Tensor, _ATEN.div_.Tensor: _ATEN.div.Tensor}
_SCALING = _ATEN.mul.Tensor, _ATEN.div.Tensor
_ELEMENTWISE = _ATEN.clone.default, _ATEN.tanh.default, _ATEN.exp.default, _ATEN.neg.default
_GATHERS = torch.gather, _T.gather
_REDUCE: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(
        (
            *_GATHERS,
            torch.logsumexp,
            torch.sum,
            torch.mean,
            torch.argmax,
            torch.amax,
            _T.logsumexp,
            _T.sum,
            _T.mean,
            _T.argmax,
            _T.amax,
        ),
        _reduce,
    ),
}
"""Functions of late logits whose results are small."""
