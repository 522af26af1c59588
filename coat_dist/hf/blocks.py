"""Blocks of transformers layers: for each, the modules that change class, or why it stays BF16.

:data:`RECOGNIZERS` are asked in their order; the first that knows a block fills in its entry of the
plan. Decoder layers that read as Llama's (:func:`is_fused`) have :data:`FUSED` asked before.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..patching.classes import Patched
from ..patching.plan import Entry, Recognizer
from ..patching.reasons import has_plain_weight, named_class, own_code, own_forward, why_not_fp8
from .layer import AttentionKind, FusedAttention
from .modules import (
    MLP,
    FirstProjection,
    Gate,
    JoinedAttention,
    LaterProjection,
    OutProjection,
    Part,
    Projection,
    why_parts_act,
)
from .recognize import (
    activation_of,
    attention_kind,
    gate,
    is_decoder_layer,
    norm_kind,
    shares_input,
)

__all__ = ["FUSED", "NORMS", "RECOGNIZERS", "is_fused", "parts_of"]

QKV = "q_proj", "k_proj", "v_proj"
NORMS = "input_layernorm", "post_attention_layernorm"


def is_fused(layer: Any) -> bool:
    """Whether a layer is x + attention(norm(x)), then x + mlp(norm(x)), all of it in the flow."""
    if not is_decoder_layer(layer):
        return False
    attention = layer.self_attn
    return (
        attention_kind(attention) is not None
        and all(type(attention._modules.get(name)) is nn.Linear for name in (*QKV, "o_proj"))
        and gate(layer.mlp) is not None
        and all(norm_kind(layer._modules.get(name)) in ("rms", "centered") for name in NORMS)
        and _why_not_linears(attention) is None
        and _why_not_mlp(layer.mlp) is None
    )


def _fused_attention(entry: Entry) -> bool:
    """Norm, queries, keys and values, rotation, attention and projection in one piece."""
    attention = entry.module
    kind = attention_kind(attention)
    if kind is None:
        return False
    _swap_block(
        entry,
        FusedAttention,
        AttentionKind.of(attention, *kind),
        parts_of(attention, *QKV, "o_proj"),
    )
    return True


def _gated_mlp(entry: Entry) -> bool:
    mlp, names = entry.module, gate(entry.module)
    if names is None:
        return False
    entry.why = _why_not_mlp(mlp)
    if entry.why is None:
        functions = [name for name in ("act_fn", "activation_fn") if name in mlp._modules]
        kind = Gate(names, activation_of(mlp) or "")
        _swap_block(entry, MLP, kind, parts_of(mlp, *names, "down_proj", *functions))
    return True


def _swap_block(entry: Entry, mixin: type[Patched], kind: Any, parts: tuple[Any, ...]) -> None:
    """Plan a block that computes its parts; it calls them while a program has put something on
    them.
    """
    part = Part(entry.settings, entry.name, entry.report, kind, parts)
    entry.swap(entry.module, mixin, part)
    entry.why = why_parts_act(entry.module, part)


def parts_of(module: nn.Module, *names: str) -> tuple[tuple[str, nn.Module, type], ...]:
    """``Part.parts`` of a module that is to be patched."""
    return tuple((name, found := getattr(module, name), type(found)) for name in names)


def _attention(entry: Entry) -> bool:
    """The model's own attention, around projections in the flow."""
    attention = entry.module
    if not shares_input(attention):
        return False
    entry.why = _why_not_linears(attention)
    if entry.why is not None:
        return True
    settings = entry.settings
    first: list[Any] = [getattr(attention, name, None) for name in QKV]
    if any(type(m) is not nn.Linear for m in first) or len({m.bias is None for m in first}) > 1:
        first = []
    for i, module in enumerate(first):
        mixin = LaterProjection if i else FirstProjection
        entry.swap(module, mixin, Part(settings, kind=tuple(first)))
    if first:
        entry.swap(attention, JoinedAttention, Part(settings))
    for name, module in _linears(attention).items():
        if all(module is not one for one in first):
            entry.swap(module, OutProjection if name == "o_proj" else Projection, Part(settings))
    why = _why_unfused(entry.layer, attention)
    entry.unfused[entry.name] = f"own code around its projections: {why}"
    return True


def _why_unfused(layer: nn.Module, attention: nn.Module) -> str:
    for name in NORMS:
        if name in layer._modules and (why := own_code(name, layer._modules[name])) is not None:
            return why
    for name, module in attention.named_children():
        if any(type(inner) is nn.Linear for inner in module.children()):
            return f"{named_class(module)} in place of {name}"
    return "no layer that is known as a whole"


def _unknown(entry: Entry) -> bool:
    last = entry.name.rpartition(".")[2]
    if own_forward(entry.module) is not None:
        entry.why = "a forward of its own"
    elif any(name.endswith("experts") for name, _ in entry.module.named_modules()):
        entry.why = "experts that are not known"
    elif "att" in last:
        entry.why = "an attention that is not known"
    else:
        entry.why = f"{'an MLP' if 'mlp' in last else 'a block'} that is not known"
    return True


RECOGNIZERS: tuple[Recognizer, ...] = (_attention, _gated_mlp, _unknown)
FUSED: tuple[Recognizer, ...] = (_fused_attention, *RECOGNIZERS)


def _linears(block: nn.Module) -> dict[str, Any]:
    """The linears of a block that may run in FP8, by name: not those of adapters."""
    named = block.named_modules()
    return {name: m for name, m in named if type(m) is nn.Linear and "lora_" not in name}


def _why_not_mlp(mlp: Any) -> str | None:
    if activation_of(mlp) is None:
        return "an activation that the flow does not have"
    for name in (*(gate(mlp) or ()), "down_proj"):
        if type(linear := getattr(mlp, name)) is not nn.Linear:
            return f"{named_class(linear)} in place of a linear"
    return _why_not_linears(mlp)


def _why_not_linears(block: nn.Module) -> str | None:
    linears = _linears(block)
    if not linears:
        return "no linears that can be computed in FP8"
    for name, module in linears.items():
        if not has_plain_weight(module):
            return f"a {type(module.weight).__name__} as weight of {name}"
        why = own_code(name, module, ()) or why_not_fp8(module.weight)
        if why is not None:
            return why
    return None
