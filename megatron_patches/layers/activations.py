"""Activations: Megatron's functions, by the names of the flow and of model descriptions.

The names are those of ``ACTIVATIONS`` in ``coat_dist/reference/activation.py``; the
``"activation"`` of a model description (``configs/models/*.json``) takes them too. A name stands
for a function and for whether it has a gate. :data:`FUNCTIONS` lists Megatron's functions that
compute the same; the first is given to models that are built here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.transformer import TransformerConfig

from coat_dist.reference.activation import ACTIVATIONS, Activation

from ..compat import other_quick_gelus

FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "silu": (F.silu,),
    "gelu": (F.gelu,),
    "gelu_tanh": (functools.partial(F.gelu, approximate="tanh"), fast_gelu),
    "quick_gelu": (quick_gelu, *other_quick_gelus()),
    "squared_relu": (squared_relu,),
}
"""By the function's name in the flow: what ``config.activation_func`` may be. Models built here
get the first.
"""


def megatron_activation(name: str) -> tuple[Callable[..., Any], bool]:
    """``activation_func`` and ``gated_linear_unit`` of Megatron's configuration for the flow's
    activation ``name``.
    """
    activation = ACTIVATIONS[name]
    return FUNCTIONS[activation.function][0], activation.gated


def activation_name(config: TransformerConfig) -> str:
    """The flow's name of the activation that ``config`` asks for.

    Raises:
        ValueError: the flow has no such activation; names the offending key.
    """
    if getattr(config, "activation_func_clamp_value", None) is not None:
        raise ValueError("activation_func_clamp_value set")
    if getattr(config, "glu_linear_offset", 0.0) != 0.0:
        raise ValueError("glu_linear_offset set")
    if getattr(config, "use_te_activation_func", False):
        raise ValueError("use_te_activation_func")
    wanted = Activation(_function_name(config) or "", config.gated_linear_unit)
    for name, activation in ACTIVATIONS.items():
        if wanted == activation:
            return name
    function, gate = config.activation_func, "with" if config.gated_linear_unit else "without"
    raise ValueError(
        f"activation_func {getattr(function, '__name__', function)} {gate} gated_linear_unit"
    )


def _function_name(config: TransformerConfig) -> str | None:
    """The name of ``config.activation_func`` in :data:`FUNCTIONS`, or None."""
    function = config.activation_func
    # Megatron's fused form of it is the tanh approximation.
    if function is F.gelu and config.bias_activation_fusion:
        return "gelu_tanh"
    if isinstance(function, functools.partial) and function.func is F.gelu and not function.args:
        return {"tanh": "gelu_tanh", "none": "gelu"}.get(
            function.keywords.get("approximate", "none")
        )
    return next(
        (name for name, known in FUNCTIONS.items() if any(function is one for one in known)), None
    )
