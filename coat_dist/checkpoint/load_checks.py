"""Checks that come before ``engine.load_checkpoint`` changes anything, with one answer on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..ranks import raise_everywhere

__all__ = ["Request", "check_before_load"]


class Request(NamedTuple):
    """What ``engine.load_checkpoint`` was asked for."""

    load_dir: Path
    tag: str
    strict: bool
    """load_module_strict"""
    states: bool
    """The optimizer's states are wanted, too."""

    @property
    def folder(self) -> Path:
        """Of the one checkpoint."""
        return self.load_dir / self.tag


def check_before_load(engine: Any, name: str, check: Callable[[Request], list[str]], accepted: str = "") -> None:
    """Let ``engine.load_checkpoint`` call ``check`` first, and raise a ``ValueError`` of what it finds on any rank.

    Args:
        engine: DeepSpeed's.
        name: of the check; a later one of the same name takes its place.
        check: returns one line for each problem, or raises a ``ValueError``. Must not use collectives.
        accepted: last line of the error; says what would be accepted.
    """
    checks = getattr(engine.load_checkpoint, "coat_checks", None)
    if checks is not None:
        checks[name] = check, accepted
        return
    original: Callable = engine.load_checkpoint
    checks = {name: (check, accepted)}

    @functools.wraps(original)
    def load_checkpoint(
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        tag = None if tag is None else str(tag)  # as saving does; DeepSpeed's loading joins paths with it
        states = load_optimizer_states and not load_module_only

        def problems(check: Callable[[Request], list[str]]) -> list[str]:
            found = tag or _latest(engine, Path(load_dir))
            if found is None:
                return []  # DeepSpeed says so
            return check(Request(Path(load_dir), found, load_module_strict, states))

        for check, accepted in checks.values():
            raise_everywhere(functools.partial(problems, check), accepted)
        if "universal" in checks and engine.load_universal_checkpoint():
            # The universal loader has learnt from its check whether moments are wanted. DeepSpeed is told yes in any
            # case: at stage 3 it would otherwise look for a checkpoint of its own kind.
            load_optimizer_states = True
        return original(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            **kwargs,
        )

    load_checkpoint.coat_checks = checks  # type: ignore[attr-defined]
    engine.load_checkpoint = load_checkpoint


def _latest(engine: Any, folder: Path) -> str | None:
    path = folder / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None
