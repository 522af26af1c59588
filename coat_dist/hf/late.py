"""Late logits: a tensor of logits whose values are made when something needs them.

**What is recorded.** Late logits hold the hidden states, the output layer, and the operations that
act on each row of logits by itself (:meth:`LogitsOnRead.record`): copies, conversions of dtype,
multiples by a number, tanh, exp, softmax, log-softmax, products of two of them, and views that take
or regroup whole rows. The results are late logits too.

**They are like any tensor.** Shape, strides and offset are those that the operation gives a tensor
without memory (``meta``), so ``contiguous`` or ``reshape`` copies where it would copy. Views share
the storage (:class:`_Late`) of the logits that they are views of, copies have one of their own.
A storage holds one step (:class:`Step`) with all before it. Steps never change, so a copy keeps
what was there when it was made. A whole storage that is multiplied by a number in place gets
another step; all its views see it. Every other change in place makes the values of the storage, and
acts on the same view of them.

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

**What is refused.** Values are those of the forward pass. So reading them for the first time after
an optimizer's step, or after another change of weight or hidden states, raises an error; so does
``logits.grad`` where the loss did not use the logits, which would silently be None. ZeRO-3 lets the
output layer's weight go when its call ends. Reading logits later is an error that names
``GatheredParameters``, and not a product with an empty weight. Backward through logits needs the
weight too, and raises the same error where ZeRO-3 has not fetched it. Changes of shape in place
(``squeeze_``) are errors, and so are second derivatives of cross entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .late_answers import ANSWERS
from .late_steps import ATEN, REGROUP, SCALING, Product, Step, viewed
from .modules import opaque


@dataclass(eq=False)
class _Late:
    """A storage of late logits: what they share with their views."""

    product: Product
    step: Any
    made: Any = None

    def tensor(self) -> Any:
        """The values, without gradients."""
        if self.made is None:
            rows = viewed(self.product.hidden, self.step.path)
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
            function in ANSWERS and args and isinstance(args[0], cls) and args[0].late.made is None
        ):
            out = ANSWERS[function](function, *args, **kwargs)
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
        if function is ATEN.detach.default:
            return LogitsOnRead(late, self.views, self.meta)
        if late.made is not None or function not in _RECORDED:
            return None
        parents, on_rows, given = [self.steps()], _RECORDED[function], rest
        path = parents[0].path
        if function in _SOFTMAX:
            if rest[0] not in (-1, self.dim() - 1):
                return None
            rest = -1, rest[1]
        elif function is ATEN._to_copy.default:
            if set(options) != {"dtype"} or not options["dtype"].is_floating_point:
                return None
        elif on_rows in SCALING:
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
                    taken = ATEN.alias.default, (), None
                views.append(LogitsOnRead(late, (*self.views, (name, attached, taken)), part))
            return views if several else views[0]
        step = Step(name, tuple(parents), attached, path, on_rows, rest, options)
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
            step = Step(name, (step,), attached, (*step.path, view))
        return step if self.requires_grad else Step("", (step,), False, step.path)

    def tensor(self) -> Any:
        """The values, without gradients: of a view the same view."""
        return viewed(self.late.tensor(), (view for *_, view in self.views))


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


class MakeLate(torch.autograd.Function):
    """The output layer, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, head: Any) -> Any:
        # With its graph, for second derivatives; the product's own reference has none.
        ctx.hidden, ctx.product = hidden, Product(hidden.detach(), head)
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
_VIEWS = (
    ATEN.slice.Tensor,
    ATEN.select.int,
    ATEN.squeeze.dim,
    ATEN.unbind.int,
    ATEN.split.Tensor,
    *REGROUP,
)
_SOFTMAX = ATEN._log_softmax.default, ATEN._softmax.default
_RECORDED: dict[Any, Any] = dict.fromkeys((*_VIEWS, ATEN.clone.default))
"""Operations that are recorded, and what they do to each row: None where they change nothing."""
for _each in (*SCALING, *_SOFTMAX, ATEN._to_copy.default, ATEN.tanh.default, ATEN.exp.default):
    _RECORDED[_each] = _each
_RECORDED |= {ATEN.mul_.Tensor: ATEN.mul.Tensor, ATEN.div_.Tensor: ATEN.div.Tensor}
