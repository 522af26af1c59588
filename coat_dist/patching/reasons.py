"""Why a module stays as it is: its weight, and what a program put on it.

A reason is a phrase for the report; None means that nothing is in the way.

**What a program put on a module is honoured** (:func:`own_code`). A patched block computes what its
linears, norms and activation would, without calling them. A hook on such a module would not run, or
would see other values; so would a ``forward`` that was set on the instance, as activation
checkpointing, accelerate and adapters do. Hooks by which DeepSpeed, FSDP and Megatron gather
parameters, and with which transformers records outputs, act on patched modules as on others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..flow.core.frozen import FrozenWeight

# The tables of torch.nn.Module that hold hooks, by what their hooks see.
INPUT = ("_forward_pre_hooks",)
OUTPUT = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
CALL = INPUT + OUTPUT
INPUT_OR_ITS_GRADIENT = ("_forward_pre_hooks", "_backward_hooks")

_WRAPPERS = (
    "deepspeed",
    "megatron.core.distributed",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "transformers.utils",
    "coat_dist",
)
"""Modules whose hooks gather parameters or record outputs."""
PLAIN = nn.Parameter, FrozenWeight
"""Types of the weights that the flow reads."""
_ALIGNMENT = 16
"""FP8 tensor cores take dimensions that are multiples of 16; others would be copied into padding
every time.
"""


def original_class(module: Any) -> Any:
    """A module's class before it was patched."""
    cls = type(module)
    return getattr(cls, "coat_original", cls)


def module_of(function: Any) -> str:
    """Where a function or callable object was written, also one that bears another's name by
    ``functools.wraps``.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__func__", function)
    return getattr(code, "__globals__", {}).get("__name__") or type(function).__module__


def _is_of_a_program(function: Any) -> bool:
    # Both: decorators such as torch.compiler.disable are written elsewhere, and keep the name.
    modules = module_of(function), getattr(function, "__module__", None) or ""
    return not any(m == name or m.startswith(f"{name}.") for m in modules for name in _WRAPPERS)


def own_forward(module: Any) -> Any:
    """The ``forward`` that was set on a module itself, or None; transformers before 5.2 leaves the
    class's own one there.
    """
    forward = vars(module).get("forward")
    if getattr(forward, "__func__", None) is type(module).forward:
        return None
    return forward


def drop_own_forward(module: Any) -> None:
    """Drop a copy of the class's forward, which would outlive the class."""
    if "forward" in vars(module) and own_forward(module) is None:
        del module.forward


def own_code(name: str, module: Any, tables: tuple[str, ...] = CALL) -> str | None:
    """What a program put on a module that acts only where the module is called: a ``forward``, or
    hooks in these ``tables``. ``name`` is the module's in the reason.
    """
    forward = own_forward(module)
    if forward is not None and _is_of_a_program(forward):
        return f"a forward of its own on {name}"
    for table in tables:
        if any(map(_is_of_a_program, (vars(module)[table] or {}).values())):
            return f"a {table.strip('_').removesuffix('s').replace('_', ' ')} on {name}"
    return None


def refusal(function: Callable[..., Any], *given: Any) -> str | None:
    """The text of the ValueError by which ``function`` refuses what it is given."""
    try:
        function(*given)
    except ValueError as problem:
        return str(problem)
    return None


def has_plain_weight(module: nn.Module) -> bool:
    """Whether ``weight`` is a parameter as torch makes it, or a frozen one of the flow: no DTensor,
    no quantized tensor of others, nothing computed.
    """
    weight = module._parameters.get("weight")
    return weight.__class__ in PLAIN or isinstance(weight, FakeTensor)  # of the planner


def why_not_fp8(weight: torch.Tensor) -> str | None:
    """Why a product with a weight, ZeRO-3's too, cannot be computed in FP8."""
    shape = getattr(weight, "ds_shape", weight.shape)
    if any(size % _ALIGNMENT for size in shape[-2:]):
        return f"a weight {list(shape)}, whose sizes are not multiples of {_ALIGNMENT}"
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"weights in {weight.dtype}"
    return None


def named_class(module: Any) -> str:
    """A module's class and the package that it comes from, for a reason: "peft's Linear"."""
    cls = type(module)
    return f"{cls.__module__.partition('.')[0]}'s {cls.__name__}"
