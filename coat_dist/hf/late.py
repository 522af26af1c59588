"""Late logits: a tensor of logits whose values are made when something needs them.

**What is recorded.** Late logits hold the hidden states and the output layer. They record the
operations that act on each row of logits by itself (:meth:`_Late.record`): copies, conversions of
dtype, multiples by a number, tanh, exp, softmax, log-softmax, products of two of them, and views
that take or reorder whole rows. The results are late logits too. Multiples in place are recorded
where no view shares the logits.

**What is answered in pieces.** Functions that make little of each row (``_REDUCE``): cross entropy,
``gather``, ``logsumexp``, sums and the like over the vocabulary. So ``log_softmax(-1).gather(-1,
ids)`` and entropies need no tensor of tokens times vocabulary. :func:`_cross_entropy` cuts the
vocabulary, with the flow's kernels. :func:`_reduce` cuts the tokens: it makes the logits of some,
applies what was recorded and the function, and makes them again in backward. Gradients go straight
to hidden states and weight, so logits that are answered in pieces have no gradient and call no
hooks. :func:`_hidden` makes sure that nothing between the output layer and these logits is passed
by.

**What gets values.** Any other operation, and what reads memory without an operation (``numpy``,
``data_ptr``, pickling). :meth:`_Late.tensor` makes the values once, without gradients, by the
recorded operations. Changes in place are made to these values. To autograd, late logits are the
output of :class:`MakeLate`, whose backward is that of a linear layer, and recorded operations are
what they are of any tensor. So a loss of values reaches hidden states and weights, whether values
were read under ``no_grad`` before or not.

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
weight too, and raises the same error where ZeRO-3 has not fetched it.

**Two references to the hidden states.** ``ctx.hidden`` in :class:`MakeLate` has its graph, for
answers in pieces and second derivatives. ``rows`` are detached: logits that a program detaches and
keeps, for metrics over an epoch, hold the hidden states but no graph of the model.
"""

from __future__ import annotations

import functools
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

    def __init__(self, head: Any, keep: bool, z_loss: float) -> None:
        self.head = head
        """The output layer, or None where it returns values."""
        self.options: dict[str, Any] = {"keep": keep, "z_loss": z_loss}
        """Of :func:`coat_dist.flow.linear_cross_entropy`."""
        self.hidden: dict[_Product, torch.Tensor] = {}
        """The hidden states with their graph, by calls of the output layer."""
        self.work: Callable[..., Any] | None = None
        """What the output layer is to compute in its next call."""
        self.why: str | None = "logits that the forward reads, or a loss without them"
        """Why the loss was not computed in chunks; None where it was."""


class _Given(threading.local):
    """The forward under way, for each thread."""

    # torch.compile cannot guard defaults of the class that each thread then covers.
    def __init__(self) -> None:
        self.now: Pass | None = None
        self.instead: Callable[[torch.Tensor], Any] | None = None
        """Makes what the next model returns in place of logits."""


forward = _Given()


def parameters(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)


class LogitsOnRead(torch.Tensor):
    """Logits whose values are made when something needs them. The module's docstring says why this
    is a tensor.
    """

    late: _Late

    @staticmethod
    def __new__(cls, late: _Late) -> LogitsOnRead:
        self = torch.Tensor._make_wrapper_subclass(
            cls, late.shape, dtype=late.dtype, device=late.rows.device
        )
        self.late = late
        return self

    @classmethod
    @opaque
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _OF_MEMORY:
            args, kwargs = _values((args, kwargs))
        elif function in _REDUCE:
            out = _REDUCE[function](function, *args, **kwargs)
            if out is not None:
                return out
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
        kwargs, late = kwargs or {}, getattr(args[0], "late", None)
        if late is not None and function is _ATEN.detach.default:
            return cls(late)
        if late is not None and not late.has_values():
            out = late.record(function, args, kwargs)
            if isinstance(out, list):
                return [cls(part) for part in out]
            if out is not None:
                return args[0] if out is late else cls(out)
        values = _values(args)
        out = function(*values, **_values(kwargs))
        return args[0] if out is values[0] else out  # changed in place


class _Step(NamedTuple):
    """An operation on logits: ``function(logits, *rest, **options)``."""

    function: Any
    rest: tuple
    options: dict[str, Any]


class _Steps(tuple[_Step, ...]):
    """Operations in their order. An argument of one may be other steps: what they make of the same
    tensor.
    """

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor
        for function, rest, options in self:
            if function is _ATEN.view.default:  # of logits, or of hidden states in their place
                out = out.reshape(*rest[0][:-1], out.shape[-1])
            else:
                given = [each(tensor) if isinstance(each, _Steps) else each for each in rest]
                out = function(out, *given, **options)
        return out

    def then(self, function: Any, rest: tuple, options: Any = None) -> _Steps:
        return _Steps((*self, _Step(function, rest, options or {})))


class _Product:
    """A call of the output layer."""

    def __init__(self, hidden: torch.Tensor, head: Any) -> None:
        self.hidden, self.head = hidden, head
        self.wide: torch.Tensor | None = None
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

    def widened(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in fp32, one copy for all that is answered in pieces: autograd then sums in
        fp32 what each piece adds to the gradient.
        """
        if self.wide is None:
            self.wide = weight.float()
        return self.wide

    def compute(
        self, hidden: torch.Tensor, work: Callable[..., Any], has_graph: bool
    ) -> torch.Tensor:
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


class _Late:
    """Logits, or what operations make of each row of them, without values."""

    def __init__(
        self,
        product: _Product,
        path: _Steps,
        rows: torch.Tensor,
        steps: _Steps,
        base: _Late | None = None,
    ) -> None:
        self.product, self.path, self.rows, self.steps = product, path, rows, steps
        """``path`` takes ``rows`` out of the product's hidden states, ``steps`` follow the product
        with the weight.
        """
        self.base = base
        """The logits that this is a view of, by the last operation of ``path``."""
        self.views: weakref.WeakSet[_Late] = weakref.WeakSet()
        self.made: torch.Tensor | None = None
        self.shape = (*rows.shape[:-1], product.head.out_features)
        self.dtype = steps(torch.empty(1, 1, dtype=rows.dtype, device="meta")).dtype

    def has_values(self) -> bool:
        return self.made is not None or (self.base is not None and self.base.has_values())

    def record(self, function: Any, args: tuple, options: dict[str, Any]) -> Any:
        """The late logits that an operation makes of these: this object where it changes them in
        place, a list where it makes several. None where it needs values.
        """
        rest, last = args[1:], len(self.shape) - 1
        if function in _DIMENSION:
            place = _DIMENSION[function]
            dim = rest[place] if len(rest) > place else 0
            if dim % len(self.shape) == last:
                return None
            if function is _ATEN.unbind.int:
                # A row by itself is no part worth a product of its own.
                parts = range(self.shape[dim]) if last > 1 else ()
                return [self._view(_ATEN.select.int, dim, i) for i in parts] or None
            if function is _ATEN.split.Tensor:
                parts = range(0, self.shape[dim], rest[0])
                return [self._view(_ATEN.slice.Tensor, dim, i, i + rest[0]) for i in parts]
            return self._view(function, *rest)
        if function is _ATEN.view.default:
            return self._view(function, *rest) if rest[0][-1] == self.shape[-1] else None
        if function in _IN_PLACE:
            if self.base is not None or self.views or not _is_factor(rest[0]):
                return None
            self.steps = self.steps.then(_IN_PLACE[function], rest)
            return self
        if function in _SOFTMAX:
            if rest[0] % len(self.shape) != last:
                return None
            rest = -1, rest[1]
        elif function in _SCALING:
            other = getattr(rest[0], "late", None)
            if other is not None and other.rows is self.rows and not other.has_values():
                # Steps cannot tell a factor that is a constant to autograd.
                if rest[0].requires_grad is not args[0].requires_grad:
                    return None
                rest = (other.steps,)
            elif not _is_factor(rest[0]):
                return None
        elif function is _ATEN._to_copy.default:
            if set(options) != {"dtype"} or not options["dtype"].is_floating_point:
                return None
        elif function not in _ELEMENTWISE:
            return None
        return _Late(self.product, self.path, self.rows, self.steps.then(function, rest, options))

    def _view(self, function: Any, *rest: Any) -> _Late:
        rows = _Steps().then(function, rest)(self.rows)
        view = _Late(self.product, self.path.then(function, rest), rows, self.steps, self)
        self.views.add(view)
        return view

    def transform(self) -> tuple[float, float] | None:
        """``scale`` and ``softcap`` of :func:`coat_dist.flow.linear_cross_entropy`. None where the
        operations are others.
        """
        scale, softcap = 1.0, 0.0
        for function, rest, _ in self.steps:
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
        if self.base is not None:
            return _Steps(self.path[-1:])(self.base.tensor())
        if self.made is None:
            with torch.inference_mode(False), torch.no_grad():
                self.made = self.steps(self.product.compute(self.rows, F.linear, False))
        return self.made


def _is_factor(number: Any) -> bool:
    return type(number) in (int, float) and number != 0 and math.isfinite(number)


def _compute(logits: LogitsOnRead, work: Callable[..., torch.Tensor]) -> torch.Tensor | None:
    """``work(x, weight, bias)`` for the rows of late logits, with the graph that the logits have.
    None where that has more in it than recorded operations.
    """
    late, now = logits.late, forward.now
    rows, has_graph = late.rows, torch.is_grad_enabled() and logits.requires_grad
    if has_graph:
        # During forward, ZeRO-3 puts functions between, and its hooks see the call that follows.
        hidden = None if now is None else now.hidden.get(late.product)
        if hidden is None:
            hidden = _hidden(logits.grad_fn)
        if hidden is None:
            return None
        rows = late.path(hidden)
    return late.product.compute(rows.reshape(-1, rows.shape[-1]), work, has_graph)


def _hidden(node: Any) -> Any:
    """The hidden states with their graph, which a graph of recorded operations begins with."""
    made: Any = MakeLate._backward_cls
    while not isinstance(node, made):
        # No function in Python is recorded, such as that by which DDP sees backward begin.
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            return None
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return node.hidden


def _cross_entropy(
    _: Any,
    input: Any,
    target: torch.Tensor,
    *others: Any,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor | None:
    """``F.cross_entropy`` of late logits; None where it needs values."""
    late = getattr(input, "late", None)
    if late is None or late.has_values() or target.shape != input.shape[:1]:
        return None
    transform = late.transform()
    plain = options.get("weight") is None and not options.get("label_smoothing")
    if transform is None or others or not plain:
        return None
    labels, now = target.masked_fill(target == ignore_index, IGNORED), forward.now
    if now is not None and now.head is not late.product.head:
        now = None

    def losses(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return flow.linear_cross_entropy(
            x,
            weight,
            labels,
            ONE,
            bias=bias,
            scale=transform[0],
            softcap=transform[1],
            **({} if now is None else now.options),
        )

    loss = _compute(input, losses)
    if loss is None:
        return None
    if now is not None:
        now.why = None
    loss = loss.to(input.dtype)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (labels != IGNORED).sum()


def _reduce(
    function: Any, input: Any, dim: Any = None, *rest: Any, index: Any = None, **options: Any
) -> torch.Tensor | None:
    """``function(input, dim=-1, ...)`` of late logits, for some rows at a time; None where it needs
    values.
    """
    late = getattr(input, "late", None)
    if late is None or late.has_values() or late.rows.dim() < 2:
        return None
    if not isinstance(dim, int) or dim % input.dim() != input.dim() - 1:
        return None
    if function in _GATHER and index is None:
        index, rest = rest[0], rest[1:]
    if index is not None and index.shape[:-1] != input.shape[:-1]:
        return None
    tensors = [] if index is None else [index.reshape(-1, index.shape[-1])]
    steps = late.steps  # in backward, too, where the logits were changed since

    def some(
        x: torch.Tensor, weight: torch.Tensor, bias: Any, *aligned: torch.Tensor
    ) -> torch.Tensor:
        logits = steps(F.linear(x, weight.to(x.dtype), bias))
        return function(logits, -1, *aligned, *rest, **options)

    def all_rows(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            weight = late.product.widened(weight)
        size = max(1, _PART // len(weight))
        parts = zip(*(t.split(size) for t in (x, *tensors)), strict=True)
        return torch.cat([_recomputed(some, x, weight, bias, *aligned) for x, *aligned in parts])

    out = _compute(input, all_rows)
    return None if out is None else out.view(*input.shape[:-1], *out.shape[1:])


_recomputed = functools.partial(
    torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False
)


class MakeLate(torch.autograd.Function):
    """The output layer, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, head: Any) -> Any:
        # With its graph, for second derivatives; the late logits' own reference has none.
        ctx.hidden, ctx.product = hidden, _Product(hidden.detach(), head)
        return LogitsOnRead(_Late(ctx.product, _Steps(), ctx.product.hidden, _Steps()))

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


_DIMENSION = {
    _ATEN.slice.Tensor: 0,
    _ATEN.select.int: 0,
    _ATEN.squeeze.dim: 0,
    _ATEN.unbind.int: 0,
    _ATEN.split.Tensor: 1,
}
"""Which argument of an operation names the dimension of which it takes parts."""
_IN_PLACE = {_ATEN.mul_.Tensor: _ATEN.mul.Tensor, _ATEN.div_.Tensor: _ATEN.div.Tensor}
_SCALING = _ATEN.mul.Tensor, _ATEN.div.Tensor
_SOFTMAX = _ATEN._log_softmax.default, _ATEN._softmax.default
_ELEMENTWISE = _ATEN.clone.default, _ATEN.tanh.default, _ATEN.exp.default, _ATEN.neg.default
_GATHER = torch.gather, _T.gather
_REDUCE: dict[Any, Callable[..., torch.Tensor | None]] = {F.cross_entropy: _cross_entropy}
"""Functions whose results are small."""
for _name in ("gather", "logsumexp", "sum", "mean", "argmax", "amax"):
    _REDUCE |= {getattr(torch, _name): _reduce, getattr(_T, _name): _reduce}
