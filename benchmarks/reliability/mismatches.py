"""Settings that differ between saving and loading, or between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .bench import Bench, Case, describe, short, some
from .program import COAT, DEEPSPEED

__all__ = ["cases"]


class Mismatch(NamedTuple):
    """``settings`` of :class:`~benchmarks.reliability.program.Run` that are not those of the other side."""

    name: str
    settings: dict[str, Any]
    keys: tuple[str, ...]
    """The error must name one of these."""
    programs: tuple[str, ...] = (COAT, DEEPSPEED)
    stages: tuple[int, ...] = (1, 2, 3)


def _zero(**values: Any) -> dict[str, Any]:
    return {"changes": {"zero_optimization": values}}


def _moments(**values: Any) -> dict[str, Any]:
    return {"changes": {"coat": {"optimizer": values}}}


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}, "coat": None}
OTHER_STAGE = {1: 3, 2: 1, 3: 2}
"""Stages 1 and 2 write the same files: one loads what the other has saved."""
LOADING = (
    Mismatch("ZeRO stage", {}, ("stage",)),
    Mismatch("number of ranks", {"world": 1}, ("data-parallel size", "world size", "ranks")),
    Mismatch("width of the model", {"width": 96}, ("other parameters", "size mismatch", "shape")),
    Mismatch("number of parameter groups", {"groups": 2}, ("group",)),
    Mismatch("sub_group_size", _zero(sub_group_size=1000), ("sub_group_size",), stages=(3,)),
    Mismatch("round_robin_gradients", _zero(round_robin_gradients=True), ("round_robin_gradients",), stages=(1, 2)),
    Mismatch("type: CoatAdamW, then AdamW", {"changes": ADAMW}, ("CoatAdamW", "optimizer.type"), (COAT,)),
    Mismatch("group_size", _moments(group_size=64), ("group_size",), (COAT,)),
    Mismatch("first_moment", _moments(first_moment="int8"), ("first_moment",), (COAT,)),
    Mismatch("second_moment", _moments(second_moment="log8"), ("second_moment",), (COAT,)),
    Mismatch("expand", _moments(expand=False), ("expand",), (COAT,)),
)
TOGETHER = (
    Mismatch("lr", {"changes": {"optimizer": {"params": {"lr": 0.02}}}}, ("lr",)),
    Mismatch("gradient_clipping", {"changes": {"gradient_clipping": 0.5}}, ("gradient_clipping",)),
    Mismatch("accumulation", {"changes": {"gradient_accumulation_steps": 2}}, ("gradient_accumulation_steps",)),
    Mismatch("ZeRO stage", {}, ("stage",)),
    Mismatch("width of the model", {"width": 96}, ("model", "0.weight", "0.bias")),
    Mismatch("group_size", _moments(group_size=64), ("group_size",), (COAT,)),
    Mismatch("second_moment", _moments(second_moment="log8"), ("second_moment",), (COAT,)),
    Mismatch("no block on one rank", {"changes": ADAMW}, ("coat", "optimizer.type"), (COAT,)),
)


def cases(bench: Bench, few: int | None) -> Iterator[Case]:
    """Each must be an error on every rank that names the key, with the engine as it was."""
    every = [("loading", m) for m in LOADING] + [("one rank", m) for m in TOGETHER]
    fitting = [(w, m) for w, m in every if bench.program in m.programs and bench.stage in m.stages]
    for where, mismatch in fitting if few is None else some(fitting, few):
        other = OTHER_STAGE[bench.stage]
        if where == "loading":
            judge, settings = _loading, mismatch.settings or {"stage": other}
        else:
            # The model is built in the same way on all ranks; the configuration says otherwise.
            judge, settings = _together, mismatch.settings or _zero(stage=3 - bench.stage if bench.stage < 3 else 2)
        yield Case("mismatch", bench.stage, f"{where}: {mismatch.name}", *judge(bench, settings, mismatch.keys))
    for name, actions in (("tag of a save", _two_tags(bench)), ("folder of a load", _two_folders(bench))):
        if few is None:
            out = bench.run([["train", 1], ["digest"], *actions, ["digest"]], timeout=10)
            yield Case(
                "mismatch", bench.stage, f"one rank: {name}", *_named(out, ("tag", "folder", "load_dir", "director"))
            )


def _loading(bench: Bench, settings: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, bool]:
    actions: list[list[Any]] = [["train", 1], ["digest"], ["load", str(bench.both)], ["digest"]]
    return _named(bench.run(actions, timeout=10, **settings), keys, bench.states["B"])


def _together(bench: Bench, settings: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, bool]:
    return _named(bench.run([["train", 2]], timeout=10, of_rank={1: settings}), keys)


def _two_tags(bench: Bench) -> list[list[Any]]:
    return [["save_apart", str(bench.fresh(bench.a))]]


def _two_folders(bench: Bench) -> list[list[Any]]:
    return [["load_apart", str(bench.a), str(bench.both)]]


def _named(out: Any, keys: tuple[str, ...], state: list[str] | None = None) -> tuple[str, bool]:
    errors = out.errors()
    if (
        not any(errors)
        and state is not None
        and [found[-1:] for found in out.results("digest")] == [[d] for d in state]
    ):
        return "allowed: loads B, to the bit", True
    if None in out.status:
        return describe(out), False
    if not all(errors):
        return (describe(out) if any(errors) else "goes on, without an error"), False
    unnamed = [r for r, e in enumerate(errors) if e and not any(key in e for key in keys)]
    if unnamed:
        return f"rank {unnamed[0]}'s error names no key: {short(errors[unnamed[0]])}", False
    changed = [r for r, found in enumerate(out.results("digest")) if len(set(found)) > 1]
    if changed:
        return "names the key, and has changed the engine", False
    return "every rank names the key", True
