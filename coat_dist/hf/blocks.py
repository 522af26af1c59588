"""Blocks of transformers layers: for each, the modules that change class, or why it stays BF16.

:data:`RECOGNIZERS` are asked in their order; the first that knows a block fills in its entry of the
plan. A recognizer that knows a block and cannot fuse it leaves the reason in the entry, and the
last one, which knows every block, says so in the report: the block runs its own code, around
linears in the flow.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..patching.classes import Patched
from ..patching.plan import Entry, Recognizer
from ..patching.reasons import (
    has_plain_weight,
    named_class,
    original_class,
    own_code,
    own_forward,
    why_not_fp8,
)
from .adapters import adapters_of, base_of
from .experts import Experts, experts_in, experts_kind, why_not_experts
from .layer import AttentionKind, FusedAttention
from .modules import MLP, Part, PartProjection, Projection, why_parts_act
from .recognize import attention_kind, is_mlp, layer_norms, mlp_kind, norm_kind

SMALLEST = 256
"""Linears with fewer inputs or outputs stay BF16: routers, gates and adapters, whose products take
less time than quantizing their input.
"""


def blocks_of(layer: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Parts of a layer that hold weights of matrices, by name: its children, and what is a block by
    itself inside of these.
    """
    for name, module in layer.named_children():
        label = f"{prefix}.{name}"
        if isinstance(module, nn.ModuleDict) or _is_list(label, module):
            yield from blocks_of(module, label)
        elif not _has_matrices(module):
            continue
        elif _is_block(label, module):
            yield label, module
        else:
            inner = list(_inner_blocks(module, label))
            if not inner or linears_of(module, label):
                yield label, module
            yield from inner


def _is_list(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and not name.endswith("experts")


def _is_block(name: str, module: nn.Module) -> bool:
    """Whether a module is a block wherever it stands."""
    experts = name.endswith("experts") or experts_kind(module) is not None
    return experts or is_mlp(module)


def _inner_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        label = f"{prefix}.{name}"
        if _is_block(label, child):
            yield label, child
        else:
            yield from _inner_blocks(child, label)


def _has_matrices(module: nn.Module) -> bool:
    return any(getattr(p, "ds_shape", p.shape)[1:] for p in module.parameters())


def linears_of(block: nn.Module, name: str) -> dict[str, Any]:
    """The linears of a block, by their names in it: not those of blocks inside, of adapters and of
    routers.
    """
    if type(block) is nn.Linear:
        return {"": block}
    found = {}
    experts = any(child.endswith("experts") for child in block._modules)
    for child, module in block.named_children():
        if "lora_" in child or experts and child in ("gate", "router"):
            continue
        if not _is_block(child, module):
            for inner, linear in linears_of(module, child).items():
                found[f"{child}.{inner}".rstrip(".")] = linear
    return found


def _fused_attention(entry: Entry) -> bool:
    """Queries, keys and values, rotation, attention and projection in one piece, with the norm
    that the layer gives it.

    Others are called by keyword: ZeRO-3, which lets weights go when the gradient of a module's
    first positional argument is there, would keep theirs. They were not faster in one piece either.
    """
    attention = entry.module
    kind = attention_kind(attention)
    if kind is None or layer_norms(entry.layer) is None:
        return False
    linears = *kind.projections, "o_proj"
    entry.why = _why_not_linears(attention, *linears) or why_called(attention, *kind.norms)
    if entry.why is None:
        _swap_block(entry, FusedAttention, AttentionKind.of(attention, kind), *linears, *kind.norms)
    return entry.why is None


def _fused_mlp(entry: Entry) -> bool:
    mlp, kind = entry.module, mlp_kind(entry.module)
    if kind is None:
        return False
    linears = *kind.first, kind.last
    if kind.activation is None:
        entry.why = "an activation that the flow does not have"
    else:
        entry.why = _why_not_linears(mlp, *linears)
    if entry.why is None:
        functions = [name for name in ("act_fn", "activation_fn") if name in mlp._modules]
        _swap_block(entry, MLP, kind, *linears, *functions)
    return entry.why is None


def _swap_block(entry: Entry, mixin: type[Patched], kind: Any, *parts: str) -> None:
    """Plan a block that computes its parts; it calls them while a program has put something on
    them.
    """
    part = Part(entry.settings, entry.name, entry.report, kind, parts_of(entry.module, *parts))
    entry.swap(entry.module, mixin, part)
    for linear in part.linears:
        if own_code("", linear, ()) is None:
            entry.swap(linear, PartProjection, Part(entry.settings))
    if (why := why_parts_act(entry.module, part)) is not None:
        entry.unfused[entry.name] = why


def why_called(module: nn.Module, *norms: str) -> str | None:
    """Why these norms of a module are called, and not computed with the products next to them."""
    for name in norms:
        norm: Any = module._modules.get(name)
        if norm_kind(norm) is None:
            return own_code(name, norm) or f"{named_class(norm)} as {name}"
    return None


def parts_of(module: nn.Module, *names: str) -> tuple[tuple[str, nn.Module, type], ...]:
    """``Part.parts`` of a module that is to be patched."""
    return tuple((name, found := base_of(getattr(module, name)), type(found)) for name in names)


def _experts(entry: Entry) -> bool:
    experts = experts_in(entry.module)
    kind = experts_kind(experts)
    if kind is None and not (entry.name.endswith("experts") and _is_opaque(experts, entry.name)):
        return False
    if kind is None:
        entry.why = "experts that are not known"
    else:
        entry.why = why_not_experts(experts, kind)
    if entry.why is None:
        acts = parts_of(experts, "act_fn") if "act_fn" in experts._modules else ()
        entry.swap(experts, Experts, Part(entry.settings, entry.name, entry.report, kind, acts))
    return True


def _is_opaque(experts: nn.Module, name: str) -> bool:
    """Whether no linear of experts can run in FP8 by itself, as those of shared experts can: an
    expert in a list gets a few tokens only.
    """
    linears = linears_of(experts, name).values()
    return isinstance(experts, nn.ModuleList) or not any(
        _why_not_linear(m) is None for m in linears
    )


def _own_code(entry: Entry) -> bool:
    """The block's own code, around linears in the flow."""
    block, known, left = entry.module, entry.why, {}
    linears = linears_of(block, entry.name)
    for name, linear in linears.items():
        why = _why_not_linear(linear) or _why_read(entry, name)
        if why is None:
            entry.swap(linear, Projection, Part(entry.settings))
        else:
            left[f"{entry.name}.{name}"] = why
    entry.why = None
    if not entry.changes:
        entry.why = "; ".join(sorted(set(left.values()))) or known or _no_linears(block)
    elif type(block) is not nn.Linear:
        entry.unfused = left
        if own_forward(block) is not None:
            known = "a forward of its own"
        why = known or "no block that is known as a whole"
        entry.unfused[entry.name] = f"own code around its linears: {why}"
    return True


def _why_read(entry: Entry, name: str) -> str | None:
    """Why a linear cannot be trusted to be called: the code around it reads its weight, for a
    product of its own.
    """
    inner, _, last = (name or entry.name).rpartition(".")
    holder = entry.module.get_submodule(inner) if name else entry.layer
    read = rf"(?<!isinstance\()self\.{last}\.weight\b(?!\.(dtype|device|shape)\b)"
    if re.search(read, _source(original_class(holder))):
        return f"a weight that {named_class(holder)} reads"
    return None


@functools.cache
def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def _no_linears(block: nn.Module) -> str:
    holder = next(m for m in block.modules() if m._parameters and _has_matrices(m))
    return f"{named_class(holder)} in place of linears"


def fuses(entry: Entry) -> bool:
    """Whether a block computes its parts itself."""
    return any(module is entry.module for module, _, _ in entry.changes)


RECOGNIZERS: tuple[Recognizer, ...] = (_fused_attention, _fused_mlp, _experts, _own_code)


def _why_not_linear(linear: Any) -> str | None:
    """Why a linear that is called stays BF16."""
    shape = getattr(linear.weight, "ds_shape", linear.weight.shape)
    if min(shape) < SMALLEST:
        return f"a weight {list(shape)}, smaller than {SMALLEST}"
    return _why_not_weight("", linear) or own_code("", linear, ())


def _why_not_weight(name: str, linear: Any) -> str | None:
    if not has_plain_weight(linear):
        return f"a {type(linear.weight).__name__} as weight of {name}".removesuffix(" of ")
    return why_not_fp8(linear.weight)


def _why_not_linears(block: nn.Module, *names: str) -> str | None:
    """Why a block cannot compute these children of it."""
    for name in names:
        found = block._modules.get(name)
        linear = base_of(found)
        if type(linear) is not nn.Linear or adapters_of(found) is None:
            return f"{named_class(found)} in place of {name}"
        if (why := _why_not_weight(name, linear)) is not None:
            return why
    *first, _ = (base_of(block._modules[name]).bias is None for name in names)
    return "a product of which some parts have a bias" if len({*first}) > 1 else None
