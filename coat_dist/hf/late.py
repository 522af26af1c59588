"""Late logits: a tensor of logits whose values are made when something needs them.

**What is recorded.** Late logits hold the hidden states, the output layer, and the operations that
act on each row of logits by itself (:meth:`LogitsOnRead.record`): copies, conversions of dtype,
multiples by a number, tanh, exp, softmax, log-softmax, products of two of them, and views that take
or regroup whole rows. The results are late logits too.

**They are like any tensor.** Shape, strides and offset are those that the operation gives a tensor
without memory (``meta``), so ``contiguous`` or ``reshape`` copies where it would copy. Views share
the storage (:class:`_Late`) of the logits that they are views of, copies have one of their own.
A storage holds one step (:class:`_Step`) with all before it. Steps never change, so a copy keeps
what was there when it was made. A whole storage that is multiplied by a number in place gets
another step; all its views see it. Every other change in place makes the values of the storage, and
acts on the same view of them.

**What is answered in pieces.** Functions that make little of each row (``_REDUCE``): cross entropy,
``gather``, ``logsumexp``, ``argmax``, sums over the vocabulary. So ``log_softmax(-1).gather(-1,
ids)`` and entropies need no tensor of tokens times vocabulary. :func:`_cross_entropy` cuts the
vocabulary, with the flow's kernels. :func:`_reduce` cuts the tokens: it makes the logits of some,
applies what was recorded and the function, and makes them again in backward, as a checkpoint does.

**When gradients may pass by the logits.** Gradients of an answer go straight to hidden states and
weight. That is right only where autograd's graph from the logits to the output layer consists of
the recorded steps, node for node (:func:`_origin`). Then nothing was detached, changed under
``no_grad``, or put between by a wrapper. Hooks do not show there, so logits on which somebody puts
a hook get values from then on, and a hook after an answer is an error. DeepSpeed's engine puts
hooks on all that a model returns, so its logits get values (:func:`coat_dist.log_probs` does not
return any).

**What gets values.** Any other operation, and what reads memory without an operation (``numpy``,
``data_ptr``, pickling). :meth:`_Late.tensor` makes the values once, without gradients. To
autograd, late logits are the output of :class:`MakeLate`, whose backward is that of a linear layer,
and recorded operations are what they are of any tensor. So a loss of values reaches hidden states
and weights, whether values were read under ``no_grad`` before or not.

**Why a tensor.** Late logits are a subclass of ``torch.Tensor`` and not an object that becomes a
tensor, because everything that handles a model's result asks for tensors: DDP with a static graph
looks for them in the output to find where backward begins, Accelerate converts them to fp32,
reentrant checkpoints and autograd functions take gradients of tensors alone, ``torch.save`` writes
them.

**Calls of the output layer.** ZeRO-3 has gathered the weight only while the output layer runs. So
what is computed during the model's forward is computed inside another call of the output layer
(:meth:`_Product.compute`). Hooks of ZeRO-3 then act on this product as on the model's own, in
backward too.

**What is refused.** Values are those of the forward pass. So reading them for the first time after
an optimizer's step, or after another change of weight or hidden states, raises an error; so does
``logits.grad`` where the loss did not use the logits, which would silently be None. ZeRO-3 lets the
output layer's weight go when its call ends. Reading logits later is an error that names
``GatheredParameters``, and not a product with an empty weight. Backward through logits needs the
weight too, and raises the same error where ZeRO-3 has not fetched it. Changes of shape in place
(``squeeze_``) are errors, and so are second derivatives of cross entropy.

**Two references to the hidden states.** ``ctx.hidden`` in :class:`MakeLate` has its graph, for
answers in pieces and second derivatives. ``_Product.hidden`` is detached: logits that a program
detaches and keeps, for metrics over an epoch, hold the hidden states but no graph of the model.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from .. import flow
from ..flow.core.weights import weight_changes
from ..flow.function import version_of
from .modules import ONE, opaque

IGNORED = -100
_PART = 2**26
"""Most logits that :func:`_reduce` makes at a time: 128 MiB in BF16. Not tuned."""


class Pass:
    """A forward of a model whose output layer is to return late logits."""

    def __init__(self, head: Any, options: dict[str, Any]) -> None:
        self.head, self.options = head, options
        """The output layer, or None where it returns values, and what
        :func:`coat_dist.flow.linear_cross_entropy` is given in the model's loss function.
        """
        self.work: Callable[..., Any] | None = None
        """What the output layer is to compute in its next call."""
        self.why: str | None = "logits that the forward reads, or a loss without them"
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


class _Product:
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


def _viewed(tensor, path):
    """Views of logits, or of hidden states in their place, one after the other: functions, their
    arguments, which of several results.
    """
    for view, rest, part in path:
        if view in _REGROUP:
            tensor = tensor.reshape(*rest[0][:-1], tensor.shape[-1])
        else:
            out = view(tensor, *rest)
            tensor = out if part is None else out[part]
    return tensor


class _Step(NamedTuple):
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
        if before is None or self.function in (None, _ATEN._to_copy.default):
            return before
        scale, softcap = before
        if self.function is _ATEN.tanh.default and not softcap:
            return scale, 1.0
        if self.function not in _SCALING or not self.rest:
            return None
        # softcap * tanh(scale * x / softcap) * factor
        factor = self.rest[0] if self.function is _ATEN.mul.Tensor else 1 / self.rest[0]
        return scale * factor, abs(softcap * factor)


class _Late:
    """A storage of late logits: what they share with their views."""

    def __init__(self, product: _Product, step: Any) -> None:
        self.product, self.step = product, step
        self.made: Any = None

    def tensor(self) -> Any:
        """The values, without gradients."""
        if self.made is None:
            rows = _viewed(self.product.hidden, self.step.path)
            with torch.inference_mode(False):
                self.made = self.product.compute(
                    rows, lambda *given: self.step(F.linear(*given)), False
                )
        return self.made


class LogitsOnRead(torch.Tensor):
    """Logits whose values are made when something needs them. The module's docstring says why this
    is a tensor.
    """

    late: _Late
    views: tuple
    """What makes these of the whole storage: the name of a view's node in autograd's graph, whether
    it has one, the view.
    """
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, late: _Late, views: tuple, meta: Any) -> LogitsOnRead:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            meta.stride(),
            meta.storage_offset(),
            dtype=meta.dtype,
            device=late.product.hidden.device,
        )
        self.late, self.views, self.meta = late, views, meta
        return self

    @classmethod
    @opaque
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _OF_MEMORY:
            args, kwargs = _values((args, kwargs))
        elif (
            function in _REDUCE and args and isinstance(args[0], cls) and args[0].late.made is None
        ):
            out = _REDUCE[function](function, *args, **kwargs)
            if out is not None:
                return out
        elif function in _LOOK:
            # Engines put hooks on all that a model returns, for the gradients that come there.
            of_engine = str(getattr(args[-1], "__module__", "")).startswith("deepspeed.")
            for logits in args[1] if function is torch.autograd.grad else args[:1]:
                if isinstance(logits, cls):
                    logits.late.product.hooked = True
                    silent = of_engine or function == _LOOK[-1]
                    if logits.late.product.answered and not silent:
                        raise RuntimeError(
                            "logits: got a look at their gradient after an answer without it, "
                            'accepted: before, or "coat": {"activation": {"loss": "plain"}}'
                        )
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **kwargs)
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
        kwargs = kwargs or {}
        if isinstance(args[0], cls):
            out = args[0].record(function, args[1:], kwargs)
            if out is not None:
                return out
        if torch.Tag.inplace_view in function.tags:
            raise RuntimeError(f"logits: got {function}, accepted: changes of values in place")
        values = _values(args)
        out = function(*values, **_values(kwargs))
        return args[0] if out is values[0] else out  # changed in place

    def record(self, function: Any, rest: tuple, options: dict[str, Any]) -> Any:
        """The late logits that an operation makes of these: this object where it changes them in
        place, a list where it makes several. None where it needs values.
        """
        late = self.late
        if function is _ATEN.detach.default:
            return LogitsOnRead(late, self.views, self.meta)
        if late.made is not None or function not in _RECORDED:
            return None
        parents, on_rows, given = [self.steps()], _RECORDED[function], rest
        path = parents[0].path
        if function in _SOFTMAX:
            if rest[0] not in (-1, self.dim() - 1):
                return None
            rest = -1, rest[1]
        elif function is _ATEN._to_copy.default:
            if set(options) != {"dtype"} or not options["dtype"].is_floating_point:
                return None
        elif on_rows in _SCALING:
            other = rest[0]
            if isinstance(other, LogitsOnRead):
                parents.append(other.steps())
                rest, given = (), (other.meta,)
                of_one = other.late.product is late.product and parents[1].path == path
                if not of_one or other.late.made is not None or function is not on_rows:
                    return None
            elif type(other) not in (int, float) or not other or not math.isfinite(other):
                return None
        meta = function(self.meta, *given, **options)
        name = function.overloadpacket.__name__.title().replace("_", "") + "Backward"
        attached = torch.is_grad_enabled() and any(step.attached for step in parents)
        if function in _VIEWS:
            several, views = isinstance(meta, list | tuple), []
            for i, part in enumerate(meta if several else [meta]):
                # A row by itself is no part worth a product of its own.
                if part.dim() < 2 or part.shape[-1] != self.shape[-1] or part.stride(-1) != 1:
                    return None
                taken = function, rest, i if several else None
                if part.shape == self.shape:  # also all words, of which hidden states have others
                    taken = _ATEN.alias.default, (), None
                views.append(LogitsOnRead(late, (*self.views, (name, attached, taken)), part))
            return views if several else views[0]
        step = _Step(name, tuple(parents), attached, path, on_rows, rest, options)
        if meta is not self.meta:
            return LogitsOnRead(_Late(late.product, step), (), meta)
        if self.views:
            return None
        late.step = step
        return self

    def steps(self) -> Any:
        """What makes these of the product, now."""
        step = self.late.step
        for name, attached, view in self.views:
            step = _Step(name, (step,), attached, (*step.path, view))
        return step if self.requires_grad else _Step("", (step,), False, step.path)

    def tensor(self) -> Any:
        """The values, without gradients: of a view the same view."""
        return _viewed(self.late.tensor(), tuple(view for *_, view in self.views))


def identity(logits: Any) -> Any:
    """Which late logits these are, up to their dtype. None where they have values, or where more
    was done to them than scaling.
    """
    if not isinstance(logits, LogitsOnRead) or logits.late.made is not None:
        return None
    steps = logits.steps()
    transform = steps.transform()
    if transform is None:
        return None
    return logits.late.product, steps.path, transform, logits.requires_grad


def _compute(logits: LogitsOnRead, work: Callable[..., Any]) -> Any:
    """``work(x, weight, bias)`` for the rows of late logits, with the graph that the logits have.
    None where that is not the graph of the recorded operations.
    """
    product, steps = logits.late.product, logits.steps()
    hidden, has_graph = product.hidden, torch.is_grad_enabled() and logits.requires_grad
    if has_graph:
        with torch._C.DisableTorchFunctionSubclass():
            origin = _origin(steps, logits.grad_fn)
        trained = product.head.weight.requires_grad
        if origin is None or product.hooked or origin.needs_input_grad[1] is not trained:
            return None
        hidden = origin.hidden
        product.answered |= forward.now is None
    rows = _viewed(hidden, steps.path)
    return product.compute(rows.flatten(0, -2), work, has_graph)


def _origin(step, node):
    """The output layer's node, where ``node`` has the graph of these steps, node for node."""
    if isinstance(step, _Product):
        # During forward, ZeRO-3 puts functions between. They act on the call that computes, too.
        while (
            forward.now is not None
            and "deepspeed" in getattr(node, "_forward_cls", _Late).__module__
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
    transform, others = input.steps().transform(), any(v is not None for v in options.values())
    if others or label_smoothing or transform is None or reduction not in ("none", "sum", "mean"):
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
            torch.utils.checkpoint.checkpoint(
                some, x, weight, bias, *others, use_reentrant=False, preserve_rng_state=False
            )
            for x, *others in parts
        ]
        return torch.cat(outs)

    out = _compute(input, all_rows)
    return None if out is None else _ATEN._unsafe_view(out, (*rows, *out.shape[1:]))


class MakeLate(torch.autograd.Function):
    """The output layer, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, head: Any) -> Any:
        # With its graph, for second derivatives; the product's own reference has none.
        ctx.hidden, ctx.product = hidden, _Product(hidden.detach(), head)
        meta = hidden.new_empty((*hidden.shape[:-1], head.out_features), device="meta")
        return LogitsOnRead(_Late(ctx.product, ctx.product), (), meta)

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
    return torch.utils._pytree.tree_map_only(LogitsOnRead, LogitsOnRead.tensor, given)


_ATEN: Any = torch.ops.aten
_T: Any = torch.Tensor
_OF_MEMORY = (
    _T.numpy,
    _T.tolist,
    _T.data_ptr,
    _T.untyped_storage,
    _T.share_memory_,
    _T.__array__,
    _T.__deepcopy__,
    _T.__reduce_ex__,
    _T.__dlpack__,
    _T.data.__set__,
)
"""What autograd and operations do not see."""
_LOOK = _T.register_hook, _T.retain_grad, torch.autograd.grad, _T.grad_fn.__get__
"""What gives a program the gradient of logits."""
_REGROUP = _ATEN.view.default, _ATEN._unsafe_view.default
_VIEWS = (
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.squeeze.dim,
    _ATEN.unbind.int,
    _ATEN.split.Tensor,
    *_REGROUP,
)
_SCALING = _ATEN.mul.Tensor, _ATEN.div.Tensor
_SOFTMAX = _ATEN._log_softmax.default, _ATEN._softmax.default
_RECORDED: dict[Any, Any] = dict.fromkeys((*_VIEWS, _ATEN.clone.default))
"""Operations that are recorded, and what they do to each row: None where they change nothing."""
for _each in (*_SCALING, *_SOFTMAX, _ATEN._to_copy.default, _ATEN.tanh.default, _ATEN.exp.default):
    _RECORDED[_each] = _each
_RECORDED |= {_ATEN.mul_.Tensor: _ATEN.mul.Tensor, _ATEN.div_.Tensor: _ATEN.div.Tensor}
_REDUCE: dict[Any, Any] = {F.cross_entropy: _cross_entropy}
"""Functions whose results are small."""
for _small in ("gather", "logsumexp", "sum", "argmax"):
    _REDUCE |= {getattr(torch, _small): _reduce, getattr(_T, _small): _reduce}
