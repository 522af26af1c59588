"""``engine.save_checkpoint`` of a coat engine: a kill or an error on any rank leaves the checkpoint before.

DeepSpeed writes its files into a folder with a temporary name (``engine_writes.py`` sums them on the way), and a
program may add its own. Every file is brought to disk, and ``manifest.json`` lists size and checksum of each
(``manifest.py``). Then the folder is renamed, ``latest`` replaced, and what may go is removed (``publish.py``).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..nodes import say_host
from ..ranks import attempt, gather, of_another_rank, rank_and_world
from .arguments import check_client_state, check_flags, check_folder, on_all_ranks, values_of_the_program
from .durable import make_folder, says_full
from .engine_writes import Writes, watch_writes
from .expert_names import divided_experts
from .manifest import FORMAT, CheckpointError, sync_files
from .other_engines import name_of_optimizer, pipeline_stages
from .publish import LATEST, begin, finish, name_latest, retire, unfinished
from .shared import check_shared, part_of
from .tags import agree, check_place, check_tag
from .team import Team, nodes_of_ranks, team_of

__all__ = ["Extras", "save_whole_checkpoints"]

_MANIFESTS = ("format", "unfinished", "universal", "tag", "saved", LATEST, "engine", "part", "files")
"""What a manifest says by itself: another value of these would make of a checkpoint one that is not found or loaded."""


@dataclass(frozen=True)
class Extras:
    """What a program adds to a checkpoint: ``engine.save_checkpoint(folder, tag, extras=Extras(...))``."""

    add_files: Callable[[Path], None] | None = None
    """Called on each rank with the folder to write files of its own into."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """Values that the manifest holds beside its own: what JSON can hold."""
    keep_last: int = 0
    """Remove all but this many newest checkpoints named ``step%08d`` afterwards; 0 = keep all."""
    supersedes: Collection[Path] = ()
    """Checkpoints of an earlier run in the same folder, to be removed afterwards."""

    def check(self) -> None:
        """Refuse what would fail, or remove too much, when DeepSpeed has written. Saving asks on all ranks together:
        one that raised earlier would let the others wait.

        Raises:
            CheckpointError: names the argument.
        """
        if self.add_files is not None and not callable(self.add_files):
            raise CheckpointError(f"extras.add_files: got {self.add_files!r}, accepted: a function, or None")
        if not isinstance(self.content, Mapping):
            raise CheckpointError(f"extras.content: got {type(self.content).__name__}, accepted: a dict")
        if taken := [key for key in self.content if key in _MANIFESTS]:
            raise CheckpointError(
                f"extras.content: got keys {', '.join(taken)}, which the manifest has itself; accepted: other names"
            )
        try:
            json.dumps(dict(self.content))
        except (TypeError, ValueError, RecursionError) as problem:
            raise CheckpointError(f"extras.content: got {problem}, accepted: what JSON can hold") from None
        count = self.keep_last
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise CheckpointError(f"extras.keep_last: got {count!r}, accepted: a whole number, 0 to keep all")
        if not isinstance(self.supersedes, Collection) or not all(isinstance(p, Path) for p in self.supersedes):
            raise CheckpointError(f"extras.supersedes: got {self.supersedes!r}, accepted: a list of pathlib.Path")


def save_whole_checkpoints(engine: Any) -> None:
    """Let ``engine.save_checkpoint`` write checkpoints that are whole or not there; same arguments, returns True.

    A second time nothing is changed.

    One more argument, by keyword: ``extras``, an :class:`Extras`. It raises ``CheckpointError`` on every rank, whatever
    rank fails; what was there before is untouched then, and a later call may succeed. What could not be removed is
    printed.
    """
    original: Callable[..., Any] = engine.save_checkpoint
    if hasattr(original, "coat_whole"):
        return

    @functools.wraps(original)
    def save_checkpoint(
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        extras: Extras | None = None,
    ) -> bool:
        team = team_of(engine)
        if tag is None:
            tag = f"global_step{engine.global_steps}"
        given, tag, state = tag, str(tag), {} if client_state is None else client_state
        flags = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen_parameters}

        def check() -> None:
            check_folder("save_dir", save_dir)
            check_client_state(state, engine)
            if isinstance(given, bool | bytes):  # DeepSpeed: a folder "True", or "b'x'"
                raise CheckpointError(f"tag: got {given!r}, accepted: a string, or a number")
            check_tag(tag)
            check_flags(flags)
            if extras is not None and not isinstance(extras, Extras):
                accepted = "coat_dist.checkpoint.save.Extras(...)"
                raise CheckpointError(f"extras: got {type(extras).__name__}, accepted: {accepted}")
            (extras or Extras()).check()

        on_all_ranks(check)
        _warn_within_a_step(engine)
        agree({"tag": tag, "folder": os.path.abspath(save_dir), **{k: bool(v) for k, v in flags.items()}}, team)
        _together((lambda: make_folder(Path(save_dir))) if team.leads else None, f"cannot write {save_dir}")
        local, nodes = not team.whole, nodes_of_ranks(getattr(engine, "local_rank", None))
        check_shared(Path(save_dir), "save_dir", nodes, local, CheckpointError)
        team.ask_leader(lambda: check_place(Path(save_dir), tag), CheckpointError)
        final = Path(save_dir) / tag
        temporary = unfinished(final)
        _together((lambda: begin(final)) if team.leads else None, f"cannot write {save_dir}")
        try:
            with watch_writes(engine, temporary) as writes:
                original(
                    save_dir,
                    tag=str(temporary.relative_to(save_dir)),
                    client_state=values_of_the_program(state, engine),
                    save_latest=False,
                    exclude_frozen_parameters=exclude_frozen_parameters,
                )
        except (OSError, RuntimeError) as error:  # none of writing: end this process, for other ranks may wait inside
            if of_another_rank(error):  # the disk is all right: whoever names ranks is to see the error itself
                raise
            raise CheckpointError(f"cannot write {temporary}: {error}") from error
        about = {LATEST: bool(save_latest), "engine": describe(engine), **part_of(team)}
        try:
            _complete(Path(save_dir), tag, about, writes, team, extras or Extras())
        except CheckpointError as problem:  # on every rank
            own = writes.errors[0].__cause__ if writes.errors else None  # its traceback shows where
            raise CheckpointError(f"{problem}{_clear(temporary, writes, str(problem), team)}") from own
        return True

    save_checkpoint.coat_whole = True  # type: ignore[attr-defined]
    engine.save_checkpoint = save_checkpoint


def describe(engine: Any) -> dict[str, Any]:
    """What an engine says about itself in its manifests."""
    known = {
        "world_size": rank_and_world()[1],
        "zero_stage": getattr(engine, "zero_optimization_stage", None),
        "data_parallel": getattr(engine, "dp_world_size", None),
        **_model_parallel(engine),
        "global_steps": getattr(engine, "global_steps", None),
        **name_of_optimizer(engine.optimizer),
    }
    divided, _ = divided_experts(getattr(getattr(engine, "module", None), "universal_checkpoint_info", None))
    known |= {"expert_parallel": divided} if divided > 1 else {}
    return {key: value() if callable(value) else value for key, value in known.items()}


def _model_parallel(engine: Any) -> dict[str, Any]:
    size, stages = getattr(engine, "mp_world_size", None), pipeline_stages(engine)
    if stages == 1:
        return {"tensor_parallel": size}
    return {"tensor_parallel": engine.mp_world_size // stages, "pipeline_stages": stages}


def _complete(save_dir: Path, tag: str, about: dict[str, Any], writes: Writes, team: Team, extras: Extras) -> None:
    """All that comes after DeepSpeed's writing."""
    final = save_dir / tag
    temporary = unfinished(final)

    def own_files() -> None:
        if writes.errors:
            raise writes.errors[0]
        if extras.add_files is not None:
            extras.add_files(temporary)

    _together(own_files, f"cannot write {temporary}")
    root = Path(os.path.abspath(temporary))
    known = {p.relative_to(root).as_posix(): s for p, s in ((Path(n), s) for n, s in writes.sums.items())}
    files = sync_files(temporary, known, team)
    manifest = {"format": FORMAT, "tag": tag, "saved": time.time(), **about, **extras.content, "files": files}
    _together((lambda: finish(temporary, final, manifest)) if team.leads else None, f"cannot finish {final}")
    if about[LATEST]:  # when every node has the checkpoint
        _together((lambda: name_latest(save_dir, tag)) if team.leads else None, f"cannot finish {final}")
    if team.leads:
        for problem in retire(final.parent, final, extras.keep_last, extras.supersedes, save_dir):
            print(f"warning: cannot remove an old checkpoint: {problem}", file=sys.stderr, flush=True)


def _warn_within_a_step(engine: Any) -> None:
    """Say on rank 0 that the micro-batches of a step that is not whole yet will be missing after a resume."""
    # Where a program says itself when a step ends, as accelerate does, DeepSpeed's count is of steps, or of neither.
    by_hand = getattr(engine, "_is_gradient_accumulation_boundary", None) is not None
    if by_hand or not engine.managed_gradient_accumulation():
        return
    each = engine.gradient_accumulation_steps()
    if not (part := engine.micro_steps % each):
        return
    if rank_and_world()[0] == 0:
        warnings.warn(
            f"save_checkpoint: called after {part} of {each} micro-batches of a step (gradient_accumulation_steps); "
            "checkpoints hold no gradients, so a resumed run begins this step anew and differs from this one",
            stacklevel=3,
        )


def _clear(temporary: Path, writes: Writes, problem: str, team: Team) -> str:
    """Remove what a failed save has written; where the disk is full, say how much room there is, and is needed."""
    needed = sum(team.members(gather(writes.size)))
    if team.leads:
        shutil.rmtree(temporary, ignore_errors=True)
    if not says_full(problem):
        return ""
    room = team.ask_leader(lambda: shutil.disk_usage(temporary.parent).free, CheckpointError)
    return f"\n{temporary.parent}: {needed:,} bytes are needed, {room:,} are free"


def _together(work: Callable[[], Any] | None, what: str) -> None:
    """Do this rank's part, if it has one, and raise on every rank when one of them fails.

    Raises:
        CheckpointError: names ranks and errors.
    """
    _, errors = attempt(work or (lambda: None))
    if errors:
        told = "; ".join(f"rank {rank}{say_host(rank)}: {text}" for rank, text in errors.items())
        raise CheckpointError(f"{what}: {told}")
