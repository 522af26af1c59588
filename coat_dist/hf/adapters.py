"""Adapters of PEFT as the flow computes them: plain and rank-stabilized LoRA around a linear.

Everything is read from PEFT's module in each call, so switched, disabled and merged adapters count
as they are then. What is not such a LoRA (DoRA and other variants, biases of adapters, batches of
several adapters) is PEFT's own to compute, around the linear in FP8.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..flow import Adapter
from ..patching.reasons import has_plain_weight, original_class, own_code


def base_of(module: Any) -> Any:
    """The linear inside of PEFT's LoRA; else the module itself."""
    return module._modules["base_layer"] if _is_lora(original_class(module)) else module


@functools.cache
def _is_lora(cls: type) -> bool:
    return f"{cls.__module__}.{cls.__name__}" == "peft.tuners.lora.layer.Linear"


def adapters_of(lora: Any, look: bool = False) -> list[Adapter] | None:
    """The adapters that act on PEFT's ``lora.Linear`` now, none on other modules; None where its
    own forward computes something else.

    Args:
        look: do not read their weights, which ZeRO-3 would gather for the module that is running.
    """
    found: list[Adapter] = []
    if base_of(lora) is lora:
        return found
    if own_code("", lora) is not None or lora.merged and lora.disable_adapters:
        return None
    if lora.merged or lora.disable_adapters:
        return found
    for name in lora.active_adapters:
        if name not in lora.lora_A:
            continue
        a, b, dropout = lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]
        if type(dropout) not in (nn.Dropout, nn.Identity) or own_code("", dropout) is not None:
            return None
        for half in (a, b):
            plain = original_class(half) is nn.Linear and has_plain_weight(half)
            if not plain or half.bias is not None or own_code("", half) is not None:
                return None
        rate = getattr(dropout, "p", 0.0) if dropout.training else 0.0
        first, second = (half._parameters.get("weight") if look else half.weight for half in (a, b))
        found.append(Adapter(first, second, lora.scaling[name], rate))
        if name in lora.lora_variant or rate != found[0].dropout:
            return None
    return found
