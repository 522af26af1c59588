"""Checks before ``engine.load_checkpoint`` changes anything, with one answer on all ranks.

Which checkpoint is meant (``tags.py``), whether its files are those of its manifest, and then what
others have registered: whether it fits the engine.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...flow.core.frozen import digest_of
from ...ranks import Team, say_on_rank_0, share
from ...shared_folders import check_there
from ..manifest import MANIFEST, TEAM, CheckpointError, read_manifest, verify
from ..names import divided_experts, info_of
from ..universal.zero_files import read as read_file
from ..write.publish import latest_of
from ..zero_partitions import forget_second_shard
from .tags import find_tag


class Request(NamedTuple):
    """What ``engine.load_checkpoint`` was asked for."""

    load_dir: Path
    tag: str
    manifest: Mapping[str, Any]  # of the checkpoint; empty where it has none
    strict: bool  # load_module_strict
    states: bool  # the optimizer's states are wanted, too
    schedule: bool  # so is the state of the learning-rate schedule

    @property
    def folder(self) -> Path:
        """Of the one checkpoint."""
        return self.load_dir / self.tag


def check_before_load(
    engine: Any,
    problems: Callable[[Request], list[str]],
    accepted: str = "",
    universal: bool = False,
) -> None:
    """Let ``engine.load_checkpoint`` call a check first, and raise a ``ValueError`` of what it
    finds on any rank.

    Args:
        engine: DeepSpeed's.
        problems: returns one line for each problem, or raises a ``ValueError``. Must not use
            collectives.
        accepted: last line of the error; says what would be accepted.
        universal: it checks universal checkpoints, and not those that DeepSpeed wrote. There is one
            check of each kind.
    """
    load_whole_checkpoints(engine)
    engine.load_checkpoint.coat_checks[universal] = problems, accepted


def load_whole_checkpoints(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` find and verify the checkpoint before it changes anything;
    same arguments.

    One more, by keyword: ``verify=False`` compares sizes of files and does not read them for their
    checksums. It raises ``CheckpointError`` on every rank, whatever rank finds something wrong.
    """
    if hasattr(engine.load_checkpoint, "coat_checks"):
        return
    original: Callable = engine.load_checkpoint
    signature = inspect.signature(original)
    checks: dict[bool, tuple[Callable[[Request], list[str]], str]] = {}

    @functools.wraps(original)
    def load_checkpoint(*args: Any, verify: bool = True, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given, universal = call.arguments, engine.load_universal_checkpoint()
        given["tag"] = None if given["tag"] is None else str(given["tag"])
        # Functions differ from process to process.
        compared = {**given, "verify": verify, "custom_load_fn": None}
        TEAM.agree(lambda: {**compared, "load_dir": os.path.abspath(given["load_dir"])})
        folder = Path(given["load_dir"])
        given["tag"] = tag = find_tag(folder, given["tag"], universal)
        if tag is not None:  # else there is nothing, and DeepSpeed says so
            more = not given["load_module_only"]
            request = Request(
                load_dir=folder,
                tag=tag,
                manifest=_check_files(folder / tag, verify),
                strict=bool(given["load_module_strict"]),
                states=more and bool(given["load_optimizer_states"]),
                schedule=more and bool(given["load_lr_scheduler_states"]),
            )
            Team(_does_not_fit()).refuse(functools.partial(_other_frozen, engine, request))
            if not given["load_optimizer_states"] and not universal:
                TEAM.refuse(functools.partial(_weights_of_latest, engine, request))
            if universal in checks:
                problems, accepted = checks[universal]
                Team(_does_not_fit()).refuse(lambda: problems(request), accepted=accepted)
        if universal and universal in checks:
            # The universal loader has learnt from its check whether moments are wanted. DeepSpeed
            # is told yes in any case: at stage 3 it would otherwise look for a checkpoint of its
            # own kind.
            given["load_optimizer_states"] = True
        found = original(*call.args, **call.kwargs)
        for parameter in engine.module.parameters():
            forget_second_shard(parameter)
        if not universal and divided_experts(info_of(engine))[0] > 1:
            engine.optimizer.update_lp_params()  # the model's file holds the experts of one rank
        return found

    load_checkpoint.coat_checks = checks  # type: ignore[attr-defined]
    engine.load_checkpoint = load_checkpoint


@functools.cache
def _does_not_fit() -> type[CheckpointError]:
    """The error of a checkpoint that does not fit the engine: also DeepSpeed's own, for which
    programs look.
    """
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    class DoesNotFit(CheckpointError, ZeRORuntimeException):
        """A checkpoint of another layout than the engine's."""

    return DoesNotFit


def _check_files(folder: Path, checksums: bool) -> dict[str, Any]:
    """Refuse a checkpoint with missing, damaged or foreign files; collective. Its manifest.

    Plain DeepSpeed's has none and is loaded with a note on rank 0. Its files are only opened.

    Raises:
        CheckpointError: on every rank; names the files.
    """

    def manifest_or_none() -> dict[str, Any] | None:
        if not (folder / MANIFEST).exists():
            return None
        return read_manifest(folder, of_run=False)

    check_there(folder, "load_dir", CheckpointError)
    manifest = TEAM.on_rank_0(manifest_or_none)
    if manifest is not None:
        verify(folder, manifest["files"], checksums)
        return manifest
    names = TEAM.on_rank_0(lambda: sorted(p.name for p in folder.glob("*.pt")))
    TEAM.each(lambda: [read_file(folder / name) for name in share(names)])
    say_on_rank_0(f"note: {folder} has no {MANIFEST}: it is loaded unverified")
    return {}


def _other_frozen(engine: Any, request: Request) -> list[str]:
    """A line where a run would resume over other frozen FP8 weights than it began with, of whatever
    optimizer: a checkpoint without frozen parameters has nothing else of them.
    """
    saved = (request.manifest.get("engine") or {}).get("frozen_weights")
    if not request.states or saved is None or saved == digest_of(engine.module):
        return []
    return [
        f"{request.folder}: coat.activation.frozen_weights: got other weights than it was saved "
        "with, accepted: the same"
    ]


def _weights_of_latest(engine: Any, request: Request) -> list[str]:
    """At stage 3, weights alone come from DeepSpeed's fp32 reader, which looks at ``latest`` and
    not at the tag.
    """
    if not engine.zero_optimization_partition_weights() or engine.has_moe_layers:
        return []
    if (found := latest_of(request.load_dir)) == request.tag:
        return []
    return [
        f"load_optimizer_states: got False with tag {request.tag!r} and zero_optimization.stage 3, "
        f"where DeepSpeed reads what {request.load_dir}/latest names, {found!r}; accepted: that "
        "one, or load_module_only=True alone"
    ]
