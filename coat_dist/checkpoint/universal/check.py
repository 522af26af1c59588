"""What in a universal checkpoint does not fit an engine: found before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..expert_names import names_in_whole, part_of_joined, whole_names
from ..stage_names import in_whole, names_of_stages
from ..zero_partitions import members, partitions
from .codes import check_codes
from .folder import UniversalFolder
from .zero_files import KEYS

__all__ = ["find_problems", "modules_with_extra_state", "renamed", "untrained_tensors"]

_ACCEPTED = "accepted: a universal checkpoint of this model, as launch/to_universal.py writes it"
_LENIENT = "or load_module_strict=False, which passes over them"


def find_problems(engine: Any, source: UniversalFolder, moments: bool, strict: bool = True) -> list[str]:
    """One line for each kind of problem. Reads the files' headers and the small ones among them, changes nothing.

    Args:
        engine: with ZeRO-1, 2, 3 or BF16_Optimizer.
        source: the checkpoint.
        moments: these are wanted, not weights only.
        strict: names that only one of checkpoint and model has are a problem.

    Raises:
        ValueError: the first file that cannot be read or holds another shape.
    """
    return [
        *_check_trained(engine, source, moments),
        *_check_untrained(engine, source, strict),
        *_check_extra_states(engine, source, strict),
    ]


def untrained_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters of the model that no optimizer steps, and buffers, by their own names."""
    stepped = {id(p) for params in members(engine.optimizer) for p in params}
    found: dict[str, torch.Tensor] = {n: p for n, p in engine.module.named_parameters() if id(p) not in stepped}
    return found | dict(engine.module.named_buffers())


def renamed(engine: Any) -> Callable[[str], str]:
    """What gives names in the whole model of what this engine's pipeline stage holds."""
    return in_whole(getattr(engine.module, "universal_checkpoint_info", None))


def modules_with_extra_state(engine: Any) -> dict[str, torch.nn.Module]:
    """Modules by the key that their extra state has in the state dict of the model (of its stage)."""
    plain = torch.nn.Module.set_extra_state
    found = {f"{n}.".lstrip(".") + "_extra_state": m for n, m in engine.module.named_modules()}
    return {n: m for n, m in found.items() if getattr(type(m), "set_extra_state", plain) is not plain}


def _check_trained(engine: Any, source: UniversalFolder, moments: bool) -> list[str]:
    names = names_in_whole(engine)
    parts = list(partitions(engine.optimizer))
    given = [(names[f.param], f.shape) for part in parts for f in part.fragments]
    mine = [(name, (part_of_joined(engine, name, shape) or (shape,))[0]) for name, shape in given]
    new = [name for name, _ in mine if name in source.rest]
    if new and moments:
        return [
            f"{source.folder}: {_some(new)} had no moments when this was saved and would have some now, accepted: the "
            "same frozen parameters, or load_optimizer_states=False, which loads weights alone"
        ]
    keys = KEYS if moments else KEYS[:1]
    files = source.missing([n for n, _ in mine if n not in source.rest], (*keys, *(["step"] if moments else [])))
    if files:
        return [f"{source.folder}: missing {_some(files)}, {_ACCEPTED}"]
    for name, shape in mine:
        source.weights(name, shape)
        for key in keys[1:]:
            source.local(name, key, shape)
        if moments:
            check_codes(source.codes(name))
    if not moments:
        return []
    found = []
    for part, params in zip(parts, members(engine.optimizer), strict=True):
        held = [f.param for f in part.fragments] or params[:1]
        files = source.missing([names[p] for p in held], ("step",))
        if files:
            found.append(f"{source.folder}: missing {_some(files)}, {_ACCEPTED}")
            continue
        steps = {source.step(names[p]) for p in held}
        if len(steps) > 1:
            found.append(
                f"{source.folder}: got steps {sorted(steps)} of {_some([names[p] for p in held])}, accepted: one, as "
                "ZeRO counts them together"
            )
    return found


def _check_untrained(engine: Any, source: UniversalFolder, strict: bool) -> list[str]:
    """Frozen parameters and buffers."""
    mine, rename = untrained_tensors(engine), renamed(engine)
    for name, target in mine.items():
        if source.has(rename(name)):
            source.weights(rename(name), getattr(target, "ds_shape", target.shape))
    if not strict or not source.complete:  # DeepSpeed's converter writes trained parameters only
        return []
    found = []
    names = names_in_whole(engine)
    known = {names[p] for params in members(engine.optimizer) for p in params} | {rename(name) for name in mine}
    known |= whole_names(engine) | names_of_stages(engine)
    if unknown := sorted((source.rest.keys() | source.trained()) - known):
        found.append(
            f"{source.folder}: got {_some(unknown)}, accepted: parameters and buffers of this model, {_LENIENT}"
        )
    saved = set(engine._get_buffer_names()) | {n for n, t in mine.items() if isinstance(t, torch.nn.Parameter)}
    if missing := sorted({rename(n) for n in saved if not source.has(rename(n))}):
        found.append(f"{source.folder}: missing {_some(missing)}, {_ACCEPTED}, {_LENIENT}")
    return found


def _check_extra_states(engine: Any, source: UniversalFolder, strict: bool) -> list[str]:
    mine = {renamed(engine)(name) for name in modules_with_extra_state(engine)}
    unknown = sorted(source.extra.keys() - mine - names_of_stages(engine))
    for name in source.extra.keys() & mine:
        source.extra_state(name)
    if not unknown or not strict:
        return []
    return [f"{source.folder}: got {_some(unknown)}, accepted: extra states of this model's modules, {_LENIENT}"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
