"""Checks that come before ``engine.load_checkpoint`` changes anything, with one answer on all ranks.

Which checkpoint is meant (``tags.py``), whether its files are whole (``whole.py``), and then what others have
registered: whether it fits the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ...ranks import raise_everywhere
from ..expert_names import divided_experts
from ..team import CheckpointError, as_flag, as_folder, check_there, team_of
from ..write.publish import LATEST
from ..zero_partitions import forget_second_shard
from .tags import find_tag
from .whole import check_whole

__all__ = ["Request", "check_before_load", "load_whole_checkpoints"]


class Request(NamedTuple):
    """What ``engine.load_checkpoint`` was asked for."""

    load_dir: Path
    tag: str
    strict: bool
    """load_module_strict"""
    states: bool
    """The optimizer's states are wanted, too."""
    schedule: bool = False
    """So is the state of the learning-rate schedule."""

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
    load_whole_checkpoints(engine)
    engine.load_checkpoint.coat_checks[name] = check, accepted


def load_whole_checkpoints(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` find and verify the checkpoint before it changes anything; same arguments.

    One more, by keyword: ``verify=False`` compares sizes of files and does not read them for their checksums. It
    raises ``CheckpointError`` on every rank, whatever rank finds something wrong.
    """
    if hasattr(engine.load_checkpoint, "coat_checks"):
        return
    original: Callable = engine.load_checkpoint
    checks: dict[str, tuple[Callable[[Request], list[str]], str]] = {}

    @functools.wraps(original)
    def load_checkpoint(
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        verify: bool = True,
    ) -> Any:
        flags = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "verify": verify,
        }

        def arguments() -> dict[str, Any]:
            folder = as_folder("load_dir", load_dir)
            named = None if tag is None else str(tag)
            return {"tag": named, "folder": folder, **{name: as_flag(name, value) for name, value in flags.items()}}

        universal, team = engine.load_universal_checkpoint(), team_of(engine)
        team.agree(arguments)
        tag = find_tag(Path(load_dir), None if tag is None else str(tag), universal, team)
        if tag is not None:  # else there is nothing, and DeepSpeed says so
            check_there(Path(load_dir) / tag, "load_dir", CheckpointError)
            check_whole(Path(load_dir) / tag, team, verify)
            if not load_optimizer_states and not universal:
                raise_everywhere(functools.partial(_weights_of_latest, engine, Path(load_dir), tag))
            states, schedule = (
                one and not load_module_only for one in (load_optimizer_states, load_lr_scheduler_states)
            )
            request = Request(Path(load_dir), tag, load_module_strict, states, schedule)
            for check, accepted in checks.values():
                raise_everywhere(functools.partial(check, request), accepted, _does_not_fit())
        if "universal" in checks and universal:
            # The universal loader has learnt from its check whether moments are wanted. DeepSpeed is told yes in any
            # case: at stage 3 it would otherwise look for a checkpoint of its own kind.
            load_optimizer_states = True
        found = original(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        for parameter in engine.module.parameters():
            forget_second_shard(parameter)
        if not universal and divided_experts(getattr(engine.module, "universal_checkpoint_info", None))[0] > 1:
            engine.optimizer.update_lp_params()  # the model's file holds the experts of one rank
        return found

    load_checkpoint.coat_checks = checks  # type: ignore[attr-defined]
    engine.load_checkpoint = load_checkpoint


@functools.cache
def _does_not_fit() -> type[CheckpointError]:
    """The error of a checkpoint that does not fit the engine: also DeepSpeed's own, for which programs look."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    class DoesNotFit(CheckpointError, ZeRORuntimeException):
        """A checkpoint of another layout than the engine's."""

    return DoesNotFit


def _weights_of_latest(engine: Any, load_dir: Path, tag: str) -> list[str]:
    """At stage 3, weights alone come from DeepSpeed's fp32 reader, which looks at ``latest`` and not at the tag."""
    if not engine.zero_optimization_partition_weights() or engine.has_moe_layers:
        return []
    latest = load_dir / LATEST
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
    if named == tag:
        return []
    return [
        f"load_optimizer_states: got False with tag {tag!r} and zero_optimization.stage 3, where {latest} names "
        f"{named!r}; accepted: the checkpoint that it names (DeepSpeed reads that one), or load_module_only=True alone"
    ]
