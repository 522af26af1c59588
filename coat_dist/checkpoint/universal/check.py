"""What in a universal checkpoint does not fit an engine: found before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch

from ..names import in_whole, info_of, names_in_whole, part_of_joined
from ..zero_partitions import members, partitions
from .codes import load_codes
from .folder import UniversalFolder
from .zero_files import KEYS

__all__ = ["find_problems", "modules_with_extra_state", "renamed", "untrained_tensors"]

_LENIENT = "or load_module_strict=False, which passes over them"


def find_problems(
    engine: Any, source: UniversalFolder, moments: bool, strict: bool, others: Set[str] = frozenset()
) -> list[str]:
    """One line for each kind of problem. Reads the files' headers and the small ones among them, changes nothing.

    Args:
        engine: with ZeRO-1, 2, 3 or BF16_Optimizer.
        source: the checkpoint.
        moments: these are wanted, not weights only.
        strict: names that only one of checkpoint and model has are a problem.
        others: names in the whole model of what other ranks hold.

    Raises:
        ValueError: the first file that is missing, cannot be read or holds another shape.
    """
    rename, names = renamed(engine), names_in_whole(engine)
    if found := _check_trained(engine, source, moments, names):
        return found
    mine = untrained_tensors(engine)
    for name, target in mine.items():
        if source.has(rename(name)):
            source.weights(rename(name), getattr(target, "ds_shape", target.shape))
    extra = {rename(name) for name in modules_with_extra_state(engine)}
    for name in source.extra.keys() & extra:
        source.extra_state(name)
    if not strict:
        return []
    known = {names[p] for params in members(engine.optimizer) for p in params} | {rename(name) for name in mine}
    unknown = (source.extra.keys() - extra) | ((source.rest.keys() | source.trained()) - known)
    saved = {*engine._get_buffer_names(), *(n for n, t in mine.items() if isinstance(t, torch.nn.Parameter))}
    missing = {rename(name) for name in saved if not source.has(rename(name))}
    accepted = f"accepted: what this model holds, {_LENIENT}"
    kinds = {"got": unknown - others, "missing": missing}
    return [f"{source.folder}: {kind} {_some(sorted(which))}, {accepted}" for kind, which in kinds.items() if which]


def untrained_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters of the model that no optimizer steps, and buffers, by their own names."""
    stepped = {id(p) for params in members(engine.optimizer) for p in params}
    found: dict[str, torch.Tensor] = {n: p for n, p in engine.module.named_parameters() if id(p) not in stepped}
    return found | dict(engine.module.named_buffers())


def renamed(engine: Any) -> Callable[[str], str]:
    """A function from names of this engine's pipeline stage to names in the whole model."""
    return in_whole(info_of(engine))


def modules_with_extra_state(engine: Any) -> dict[str, torch.nn.Module]:
    """Modules by the key that their extra state has in the state dict of the model (of its stage)."""
    plain = torch.nn.Module.set_extra_state
    found = {f"{n}.".lstrip(".") + "_extra_state": m for n, m in engine.module.named_modules()}
    return {n: m for n, m in found.items() if getattr(type(m), "set_extra_state", plain) is not plain}


def _check_trained(engine: Any, source: UniversalFolder, moments: bool, names: dict[Any, str]) -> list[str]:
    found = []
    parts = list(partitions(engine.optimizer))
    new = [names[f.param] for part in parts for f in part.fragments if names[f.param] in source.rest]
    if new and moments:
        return [
            f"{source.folder}: {_some(new)} had no moments when this was saved and would have some now, accepted: the "
            "same frozen parameters, or load_optimizer_states=False, which loads weights alone"
        ]
    for part, params in zip(parts, members(engine.optimizer), strict=True):
        for f in part.fragments:
            name = names[f.param]
            shape, _ = part_of_joined(engine, name, f.shape)
            source.weights(name, shape)
            if moments:
                for key in KEYS[1:]:
                    source.local(name, key, shape)
                load_codes(source.codes(name))
        held = [names[p] for p in [f.param for f in part.fragments] or params[:1]] if moments else []
        steps = {source.step(name) for name in held}
        if len(steps) > 1:
            found.append(
                f"{source.folder}: got steps {sorted(steps)} of {_some(held)}, accepted: one, as ZeRO counts them "
                "together"
            )
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
