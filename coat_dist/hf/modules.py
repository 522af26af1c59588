"""Modules of transformers models that run the FP8 flow in training mode, and their own code
otherwise.

**One rule of mode** (:func:`runs_flow`). A module in training mode runs the flow, with gradients or
without, so old and new log-probabilities of a policy, and both forwards of reentrant checkpointing,
are of one function. A module in eval mode runs the model's own code, and so does every module while
a model is called with a cache of keys and values.

**What a program put there is honoured** (``patching/reasons.py``). A fused block computes what its
linears, norms and activation would, without calling them. Each call first looks whether one of them
has got hooks, a ``forward`` of its own or another type of weight, before the patch or since; then
the block runs its own code, and the report says why. LoRA of PEFT around its linears, put there
before the patch or since, it computes with them (``adapters.py``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .. import flow
from ..config import ActivationConfig
from ..flow.core.frozen import FrozenWeight, replace
from ..flow.function import leave_out
from ..flow.function import outside_of_graphs as opaque
from ..patching.classes import Patched
from ..patching.reasons import PLAIN, has_plain_weight, named_class, original_class, own_code
from ..patching.report import PatchReport
from .adapters import adapters_of, base_of

ONE = flow.TensorParallel()
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Part(NamedTuple):
    """The attribute ``coat`` of a patched module: all that its forward needs to know, found when
    it was patched.
    """

    settings: ActivationConfig
    name: str = ""
    """Of a block or layer, in the report."""
    report: PatchReport | None = None
    kind: Any = None
    """Of a fused attention ``AttentionKind``, of an MLP ``MLPKind``, of a norm its ``norm_kind``,
    of a layer that computes its norms and residuals with its blocks ``Sides``.
    """
    parts: tuple[tuple[str, nn.Module, type], ...] = ()
    """Modules that a block computes without calling them, or calls with arguments of its own: their
    names in the module, and their classes before the patch. Of those that are ``nn.Linear``, the
    flow reads the weights; they may stand inside of adapters.
    """
    recompute: bool = True
    """Of a layer: whether gradient checkpointing recomputes it."""
    compress: bool = False
    """Of a layer: whether gradient checkpointing keeps codes of its input."""

    @property
    def linears(self) -> list[Any]:
        """Linears whose weights the flow reads without calling them."""
        return [module for _, module, cls in self.parts if cls is nn.Linear]


class _Calls(threading.local):
    # torch.compile cannot guard defaults of the class that each thread then covers.
    def __init__(self) -> None:
        self.cached = False
        """Whether the model under way was given a cache of keys and values."""


_calls = _Calls()
CACHES = "cache", "past_key_values", "past_key_value", "cache_params"
"""Names of that argument, by transformers' version."""


def inlined(function: _Function) -> _Function:
    """``function``, which torch.compile traces as a part of its caller only: after a graph break in
    it, what it calls is compiled. Else all modules would share the graphs of one code object, of
    which the compiler keeps eight.
    """
    leave_out(function, callees=False)
    return function


@inlined
def runs_flow(module: Any) -> bool:
    """Whether a patched module is to run the flow now."""
    if not module.training and module.coat.settings.evaluation == "plain":
        return False
    if _calls.cached or "_is_replica" in vars(module):  # of nn.DataParallel
        return False
    cls = type(module)
    return cls.coat_original.forward is cls.coat_plain  # else a program replaced the class's own


def is_cached(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    checkpoints = module.training and getattr(module, "gradient_checkpointing", False)
    if checkpoints and torch.is_grad_enabled():
        return False  # transformers drops the cache then
    by_name = any(kwargs.get(name) is not None for name in CACHES)
    return by_name or any(hasattr(a, "get_seq_length") for a in args)


def why_parts_act(module: nn.Module, part: Part) -> str | None:
    """Why a patched module must call its parts; None where the flow may compute them."""
    rates: set[float] = set()
    for name, known, cls in part.parts:
        outer = module._modules.get(name)
        found, adapters = base_of(outer), adapters_of(outer, look=True)
        if found is not known or original_class(found) is not cls or adapters is None:
            return f"{named_class(outer)} in place of {name}"
        rates.update(adapter.dropout for adapter in adapters)
        if "weight" in found._parameters and not has_plain_weight(found):
            return f"a {type(found.weight).__name__} as weight of {name}"
        if (why := own_code(name, found)) is not None:
            return why
    return None if len(rates) < 2 else "adapters with several rates of dropout"


class ModePatched(Patched):
    """Base of mixins that compute in the flow in training mode alone: by ``coat_forward``, which
    each of them has; ``plain`` is the ``forward`` of the original class.
    """

    coat: Part
    coat_plain: Callable[..., Any]
    """The original class's ``forward`` when the class was patched."""

    @classmethod
    def coat_content(cls, plain: Callable[..., Any]) -> dict[str, Any]:
        @functools.wraps(plain)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if runs_flow(self):
                return self.coat_forward(plain, *args, **kwargs)
            return self.coat_own_forward(self.coat_original.forward, *args, **kwargs)

        # Decorators of transformers share code objects, too.
        inner: Any = forward
        while hasattr(inner, "__wrapped__") and hasattr(inner, "__code__"):
            inlined(inner)
            inner = inner.__wrapped__
        return {"coat_plain": plain, "forward": forward}

    def _apply(self: Any, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Any:
        """torch's ``_apply``, by which modules are moved; it cannot replace a frozen weight."""
        frozen = {n: p for n, p in self._parameters.items() if isinstance(p, FrozenWeight)}
        for name, weight in frozen.items():
            replace(weight, fn(weight))
            self._parameters[name] = None
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._parameters.update(frozen)
        return self

    def coat_runs(self: Any) -> bool:
        """Whether a call of the module would run the flow."""
        return runs_flow(self)

    @inlined
    def coat_own_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``forward`` otherwise."""
        return plain(self, *args, **kwargs)


class Stack(ModePatched):
    """A module that calls layers. It tells :func:`runs_flow` whether its caller gave it a cache.

    A cache that the model makes for itself, because its configuration has ``use_cache``, does not
    count.
    """

    @inlined
    def coat_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = _calls.cached
        _calls.cached = before or is_cached(self, args, kwargs)
        # Graphs would differ by layer: each fills another part of the cache.
        if self.training and self.coat.settings.compile and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        try:
            return plain(self, *args, **kwargs)
        finally:
            _calls.cached = before

    coat_own_forward = coat_forward


class Block(ModePatched):
    """A module that computes its parts without calling them, as long as nothing was put on them."""

    def coat_ready(self: Any) -> bool:
        """Whether the parts are as they were patched. In every call: two microseconds where
        nothing was put there.
        """
        part, modules = self.coat, self._modules
        for name, module, cls in part.parts:
            given = module.__dict__
            if (
                modules.get(name) is not module
                or getattr(type(module), "coat_original", type(module)) is not cls
                or (cls is nn.Linear and type(given["_parameters"].get("weight")) not in PLAIN)
                or "forward" in given
                or given["_forward_hooks"]
                or given["_forward_pre_hooks"]
                or given["_backward_hooks"]
                or given["_backward_pre_hooks"]
            ):
                return self.coat_settled()
        report = part.report
        if report is not None and part.name in report.unfused:
            return self.coat_settled()
        return True

    @opaque
    def coat_settled(self: Any) -> bool:
        """:meth:`coat_ready` after a close look, which keeps the report true."""
        if "_is_replica" in vars(self):
            why: str | None = "a replica of nn.DataParallel"
        elif type(self).coat_original.forward is not type(self).coat_plain:
            why = "another forward of its class"
        else:
            why = why_parts_act(self, self.coat)
        if self.coat.kind is not None:  # a layer without one computes nothing of its parts
            self.coat.report.settle(self.coat.name, why)
        return why is None

    def coat_runs(self: Any) -> bool:
        return runs_flow(self) and self.coat_ready()

    @inlined
    def coat_own_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.training:
            self.coat_settled()
        return plain(self, *args, **kwargs)


class Fused(Block):
    """A block that reads the weights of its linears."""

    def coat_flow_weights(self: Any) -> list[Any]:
        """As :meth:`Projection.coat_flow_weights`."""
        *first, last = (m.weight for m in self.coat.linears)
        return [tuple(first), last]

    def coat_adapters(self: Any) -> tuple[list[Any], list[Any]]:
        """Adapters of the linears of its first product, and of its last."""
        names = [name for name, _, cls in self.coat.parts if cls is nn.Linear]
        found: Any = [adapters_of(self._modules[name]) for name in names]
        return found[:-1], found[-1:]


def fits(x: Any) -> bool:
    """Whether the flow takes x."""
    return (
        isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float32) and x.dim() > 1
    )


def norm_of(module: Any) -> flow.Norm:
    """A patched norm and its parameters; the weight of a centered one is 1 + w, through which
    gradients reach w.
    """
    kind = module.coat.kind
    eps = getattr(module, "variance_epsilon", None)
    weight: Any = getattr(module, "weight", None)
    if kind == "centered":
        weight = 1.0 + weight.float()
    return flow.Norm("rmsnorm", module.eps if eps is None else eps, weight)


def bias_of(y: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """``y`` with the bias of a row-parallel linear."""
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


class UnfusedNorm(ModePatched):
    """A norm on its own: saves an alias of its input and a number a row."""

    def coat_forward(self: Any, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        # The compiler fuses a norm with what is around it.
        if torch.compiler.is_compiling() or not fits(x):
            return plain(self, x)
        y = flow.norm(x, norm_of(self), ONE)
        if self.coat.kind != "rms":
            return y
        # Its weight, which is multiplied last, may have a wider dtype.
        return y.to(torch.promote_types(x.dtype, self.weight.dtype))


class PartProjection(ModePatched):
    """A linear in FP8 by itself. Linears whose weights a fused block reads are such ones for the
    calls in which the block runs its own code.
    """

    def coat_runs(self: Any) -> bool:
        return runs_flow(self) and has_plain_weight(self)

    @opaque
    def coat_forward(
        self: Any, plain: Callable[..., Any], x: torch.Tensor, coat_adapters: Any = ()
    ) -> torch.Tensor:
        if not (fits(x) and has_plain_weight(self)):
            return plain(self, x)
        settings = self.coat.settings
        if is_attention_output(x):
            y = flow.linear(x, self.weight, ONE, settings, adapters=coat_adapters)
            return bias_of(y, self)
        return flow.norm_linear(x, None, self.weight, self.bias, ONE, settings, coat_adapters)


class Projection(PartProjection):
    """A linear in FP8 by itself, always."""

    def coat_flow_weights(self: Any) -> list[Any]:
        """Parameters that only the flow reads while training; those of one product, in a tuple."""
        return [self.weight]


class AdaptedProjection(ModePatched):
    """PEFT's LoRA around a linear in FP8: one operation, which the linear computes."""

    @opaque
    def coat_forward(
        self: Any, plain: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        base, adapters = self.base_layer, adapters_of(self)
        ready = fits(x) and base.coat_runs() and not own_code("", base)
        if adapters is None or args or kwargs or not ready:
            return plain(self, x, *args, **kwargs)
        return base(x, coat_adapters=[adapters])


_VIEWS = {
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
}


def is_attention_output(x: torch.Tensor) -> bool:
    """Whether x is the output of an attention kernel, which the kernel keeps for its own backward:
    an alias of it costs nothing, and codes would be a byte more for each element.
    """
    node = x.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and ("Attention" in node.name() or "Attn" in node.name())


class MLP(Fused):
    """An MLP; with ``norm`` the norm before it as well, and the alias of x for the residual
    connection.
    """

    @opaque
    def coat_forward(
        self: Any, plain: Callable[..., Any], x: torch.Tensor, norm: Any = None
    ) -> Any:
        # With a norm, the layer has looked.
        if norm is None and not (fits(x) and self.coat_ready()):
            return plain(self, x)
        kind, settings = self.coat.kind, self.coat.settings
        *linears, last = self.coat.linears
        biases = None if linears[0].bias is None else [m.bias for m in linears]
        out: Any = flow.norm_mlp(
            x,
            None if norm is None else norm_of(norm),
            [m.weight for m in linears],
            last.weight,
            kind.activation,
            ONE,
            settings,
            biases,
            norm is not None,
            None,
            *self.coat_adapters(),
        )
        if norm is None:
            return bias_of(out, last)
        y, alias = out
        return bias_of(y, last), alias
