"""Modules of transformers models that run the flow while they train, and their own code otherwise.

:func:`swapped` makes a class that looks like the original: name, signature of ``forward``, pickles. It runs the flow in
training with gradients only. What is generated or evaluated comes from the model's own forward, exactly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import flow
from ..config import ActivationConfig
from .recognize import ACTIVATIONS, Attention, gate, norm_kind

__all__ = [
    "MLP",
    "ONE",
    "FirstProjection",
    "JoinedAttention",
    "Layer",
    "LaterProjection",
    "OutProjection",
    "Part",
    "Patched",
    "Projection",
    "UnfusedNorm",
    "activation_of",
    "bias_of",
    "fits",
    "norm_of",
    "plain_linears",
    "running",
    "swapped",
    "trains",
]

ONE = flow.TensorParallel()


class Part(NamedTuple):
    """The attribute ``coat`` of a patched module."""

    settings: ActivationConfig
    joined: tuple[nn.Module, ...] = ()
    """Of an attention's projections that are one product: all of them."""
    kind: Attention | None = None
    """Of a fused attention: how it differs from Llama's."""


class _Active(threading.local):
    depth = 0


_active = _Active()
"""Layers under way: under reentrant checkpointing they run without gradients first, and backward runs them again."""


def trains(module: nn.Module) -> bool:
    """Whether a module is to run the flow now."""
    checkpointed = getattr(module, "gradient_checkpointing", False)
    return module.training and (torch.is_grad_enabled() or _active.depth > 0 or checkpointed)


@contextmanager
def running() -> Iterator[None]:
    _active.depth += 1
    try:
        yield
    finally:
        _active.depth -= 1


class Patched:
    """Base of what :func:`swapped` mixes into a class."""

    coat_patched = True
    coat_original: type
    coat: Part

    def coat_trains(self: Any) -> bool:
        return trains(self)

    def coat_forward(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``forward`` while training; ``plain`` is that of the original class."""
        raise NotImplementedError


def swapped(original: type, mixin: type) -> Any:
    """A class that is ``original`` but for what ``mixin`` computes while it trains."""
    return _swapped(original, mixin)


@functools.cache
def _swapped(original: Any, mixin: Any) -> type:
    plain = original.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.coat_forward(plain, *args, **kwargs) if trains(self) else plain(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return _new, (original, mixin), *rest

    content = {"coat_original": original, "forward": forward, "__reduce_ex__": reduce, "__doc__": original.__doc__}
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__")}
    return type(original.__name__, (mixin, original), content | names)


def _new(original: type, mixin: type) -> Any:
    cls = swapped(original, mixin)
    return cls.__new__(cls)


def plain_linears(*modules: nn.Module) -> bool:
    """Whether these are torch's linears, and not adapters around them or quantized ones."""
    return all(getattr(type(m), "coat_original", type(m)) is nn.Linear for m in modules)


def fits(x: Any) -> bool:
    """Whether the flow takes x."""
    return isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float32) and x.dim() > 1


def norm_of(module: Any) -> flow.Norm:
    """A norm and its parameters; the weight of a centered one is 1 + w, through which gradients reach w."""
    kind = norm_kind(module)
    eps = getattr(module, "variance_epsilon", None)
    if kind == "layer":
        return flow.Norm("layernorm", module.eps, module.weight, module.bias)
    weight = 1.0 + module.weight.float() if kind == "centered" else module.weight
    return flow.Norm("rmsnorm", module.eps if eps is None else eps, weight)


def bias_of(y: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """``y`` with the bias of a row-parallel linear."""
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def activation_of(mlp: Any) -> str | None:
    """The flow's name of a gated MLP's activation; None of others."""
    from transformers.activations import ACT2FN

    config = getattr(mlp, "config", None)
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    found = ACTIVATIONS.get(name) if isinstance(name, str) else None
    act = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    return found if found is not None and type(act) is type(ACT2FN[name]) else None


class Layer(Patched):
    """A layer that runs its own code, with parts in the flow."""

    def coat_forward(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with running():
            return plain(self, *args, **kwargs)


class UnfusedNorm(Patched):
    """A norm on its own: saves an alias of its input and a number a row."""

    def coat_forward(self: Any, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        if not fits(x):
            return plain(self, x)
        norm = norm_of(self)
        y = flow.norm(x, norm, ONE)
        # Llama's RMSNorm multiplies by its weight last, whose dtype may be wider
        return y if norm_kind(self) != "rms" else y.to(torch.promote_types(x.dtype, self.weight.dtype))


class Projection(Patched):
    """A linear in FP8 by itself."""

    def coat_flow_weights(self: Any) -> list[Any]:
        """Parameters that only the flow reads while training; of one product, in a tuple."""
        return [tuple(m.weight for m in self.coat.joined) or self.weight]

    def coat_forward(self: Any, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        if not fits(x):
            return plain(self, x)
        return flow.norm_linear(x, None, self.weight, self.bias, ONE, self.coat.settings)


class OutProjection(Projection):
    """The linear behind attention, which saves an alias of attention's output."""

    def coat_forward(self: Any, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return bias_of(flow.linear(x, self.weight, ONE, self.coat.settings), self) if fits(x) else plain(self, x)


class FirstProjection(Projection):
    """The first of several linears of one input: computes all of them, and keeps the others' results for them."""

    def coat_forward(self: Any, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        linears = self.coat.joined
        if not fits(x):
            return plain(self, x)
        biases = None if self.bias is None else [m.bias for m in linears]
        sizes = [m.weight.shape[0] for m in linears]
        out = flow.norm_linear(x, None, [m.weight for m in linears], biases, ONE, self.coat.settings)
        first, *rest = out.split(sizes, -1)
        for module, result in zip(linears[1:], rest, strict=True):
            vars(module)["coat_given"] = x, result
        return first


class LaterProjection(Projection):
    """One of the others: takes what the first has computed of the same input."""

    def coat_forward(self: Any, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        given = vars(self).pop("coat_given", None)
        if given is not None and given[0] is x:
            return given[1]
        return Projection.coat_forward(self, plain, x)

    def coat_take(self: Any, x: torch.Tensor) -> torch.Tensor:
        """What the first has computed, whatever tensor object it was given."""
        given = vars(self).pop("coat_given", None)
        return self(x) if given is None else given[1]


class JoinedAttention(Patched):
    """An attention that runs its own code around joined projections.

    ZeRO-3 gives each module another tensor object, gathers weights for each call, and releases them when the gradient
    of its input is there. So the later projections are not called there: the first uses their weights.
    """

    def coat_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        later = {name: m for name, m in self._modules.items() if isinstance(m, LaterProjection) and hasattr(m, "ds_id")}
        try:
            vars(self).update((name, module.coat_take) for name, module in later.items())
            return plain(self, *args, **kwargs)
        finally:
            for name in later:
                vars(self).pop(name, None)


class MLP(Patched):
    """A gated MLP; with ``norm`` the norm before it as well, and the alias of x for the residual connection."""

    def coat_flow_weights(self: Any) -> list[Any]:
        linears = [getattr(self, name) for name in gate(self) or ()]
        whole = plain_linears(*linears, self.down_proj)
        return [tuple(m.weight for m in linears), self.down_proj.weight] if whole else []

    def coat_forward(self: Any, plain: Callable[..., Any], x: torch.Tensor, norm: Any = None) -> Any:
        names = gate(self)
        linears = [getattr(self, name) for name in names or ()]
        known = norm is None or norm_kind(norm) is not None
        if not (known and fits(x) and plain_linears(*linears, self.down_proj)):
            if norm is None:
                return plain(self, x)
            return plain(self, norm(x)), x
        weights = [m.weight for m in linears]
        biases = None if linears[0].bias is None else [m.bias for m in linears]
        rest: tuple[Any, ...] = weights, self.down_proj.weight, activation_of(self), ONE, self.coat.settings, biases
        if norm is None:
            return bias_of(flow.mlp(x, *rest), self.down_proj)
        y, alias = flow.norm_mlp(x, norm_of(norm), *rest, residual=True)  # type: ignore[misc]
        return bias_of(y, self.down_proj), alias
