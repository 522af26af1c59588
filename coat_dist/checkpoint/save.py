"""``engine.save_checkpoint`` of a coat engine: a kill or an error on any rank leaves the checkpoint before.

A save is one transaction (:class:`_Save`): prepare, write, publish. DeepSpeed writes its files into a folder with a
temporary name (``write/engine_writes.py`` takes checksums), and a program may add its own. Every file is brought to
disk, and ``manifest.json`` lists size and checksum of each (``manifest.py``). Then the folder is renamed, ``latest``
replaced, and old checkpoints are removed (``write/publish.py``).
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

from ..optim import CoatAdamW
from ..ranks import gather, of_another_rank, rank_and_world
from .manifest import FORMAT, MANIFEST, sync_files
from .team import CheckpointError, Team, as_flag, as_folder, check_shared, nodes_of_ranks, part_of, team_of
from .write.durable import make_folder, says_full
from .write.engine_writes import Writes, watch_writes
from .write.publish import HIDDEN, LATEST, begin, finish, name_latest, retire, unfinished

__all__ = ["Extras", "save_whole_checkpoints"]

_MANIFESTS = ("format", "unfinished", "universal", "tag", "saved", LATEST, "engine", "part", "files")
"""Keys of the manifest's own values, by which a checkpoint is found and loaded."""
_BESIDE = (LATEST, f".{LATEST}.new", "latest_universal", MANIFEST, ".lock", "zero_to_fp32.py", "zero_to_torch.py")
"""Files that a folder of checkpoints holds."""
_INFO = "universal_checkpoint_info"
# fmt: off
_DEEPSPEEDS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
})
# fmt: on
"""What DeepSpeed writes into the model's file. client_state comes last: such a key would replace DeepSpeed's value."""
_OF_EXPERTS = frozenset({"num_experts", "ds_autoep_layers", "autoep_layers", "folding"})
"""The same, where DeepSpeed itself divides experts over ranks."""
_HANDED_BACK = frozenset({"buffer_names", "param_shapes", "ds_config", "ds_version"})
"""``load_checkpoint`` returns these beside the program's own values, whatever it is asked for."""


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
        """Refuse what would fail, or remove too much, when DeepSpeed has written.

        Raises:
            CheckpointError: names the argument.
        """
        if taken := [key for key in self.content if key in _MANIFESTS]:
            raise CheckpointError(
                f"extras.content: got keys {', '.join(taken)}, which the manifest has itself; accepted: other names"
            )
        try:
            json.dumps(dict(self.content))
        except (TypeError, ValueError, RecursionError) as problem:
            raise CheckpointError(f"extras.content: got {problem}, accepted: what JSON can hold") from None
        if not isinstance(self.keep_last, int) or self.keep_last < 0:
            raise CheckpointError(f"extras.keep_last: got {self.keep_last!r}, accepted: a whole number, 0 to keep all")


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
        state = {} if client_state is None else client_state
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        save = _Save(engine, team_of(engine), save_dir, tag, save_latest, extras or Extras())
        save.prepare(state, exclude_frozen_parameters)
        _warn_within_a_step(engine)
        writes = save.write(original, state, exclude_frozen_parameters)
        try:
            save.publish(writes)
        except CheckpointError as problem:  # on every rank
            own = writes.errors[0].__cause__ if writes.errors else None  # its traceback shows where
            raise CheckpointError(f"{problem}{save.undo(writes, str(problem))}") from own
        return True

    save_checkpoint.coat_whole = True  # type: ignore[attr-defined]
    engine.save_checkpoint = save_checkpoint


@dataclass(frozen=True)
class _Save:
    """One save. Each step is collective, and raises ``CheckpointError`` on all ranks if any rank fails."""

    engine: Any
    team: Team
    """Ranks that write into the same folder; their first rank does what one rank does for all."""
    save_dir: Any
    tag: str
    save_latest: Any
    extras: Extras

    @property
    def final(self) -> Path:
        """The checkpoint's folder."""
        return Path(self.save_dir) / self.tag

    @property
    def temporary(self) -> Path:
        """Where it is written."""
        return unfinished(self.final)

    def prepare(self, client_state: Mapping[str, Any], exclude_frozen: Any) -> None:
        """Check and compare the arguments of all ranks, and make the temporary folder."""

        def arguments() -> dict[str, Any]:
            folder = as_folder("save_dir", self.save_dir)
            _check_client_state(client_state, self.engine)
            _check_tag(self.tag)
            self.extras.check()
            flags = {"save_latest": self.save_latest, "exclude_frozen_parameters": exclude_frozen}
            return {"tag": self.tag, "folder": folder, **{name: as_flag(name, value) for name, value in flags.items()}}

        self.team.agree(arguments)
        folder = Path(self.save_dir)
        self.team.ask_leader(lambda: make_folder(folder), doing=f"cannot write {folder}")
        nodes = nodes_of_ranks(getattr(self.engine, "local_rank", None))
        check_shared(folder, "save_dir", nodes, not self.team.whole, CheckpointError)
        self.team.ask_leader(lambda: begin(self.final), doing=f"cannot write {folder}")

    def write(self, original: Callable[..., Any], client_state: Mapping[str, Any], exclude_frozen: Any) -> Writes:
        """Let DeepSpeed write its files. Errors of writing are in the result: :meth:`publish` raises them."""
        try:
            with watch_writes(self.engine, self.temporary) as writes:
                original(
                    self.save_dir,
                    tag=self.temporary.name,
                    client_state=_values_of_the_program(client_state, self.engine),
                    save_latest=False,
                    exclude_frozen_parameters=exclude_frozen,
                )
        except (OSError, RuntimeError) as error:  # none of writing: end this process, for other ranks may wait inside
            if of_another_rank(error):  # the disk is all right: whoever names ranks is to see the error itself
                raise
            raise CheckpointError(f"cannot write {self.temporary}: {error}") from error
        return writes

    def publish(self, writes: Writes) -> None:
        """Add the program's files, bring all to disk, give the folder its name, and remove old checkpoints."""
        extras, team, final, temporary = self.extras, self.team, self.final, self.temporary

        def own_files() -> None:
            if writes.errors:
                raise writes.errors[0]
            if extras.add_files is not None:
                extras.add_files(temporary)

        team.each(own_files, f"cannot write {temporary}")
        root = os.path.abspath(temporary)
        files = sync_files(temporary, {os.path.relpath(path, root): sum_ for path, sum_ in writes.sums.items()}, team)
        manifest = {
            **{"format": FORMAT, "tag": self.tag, "saved": time.time(), LATEST: bool(self.save_latest)},
            **{"engine": _describe(self.engine), **part_of(team), **extras.content, "files": files},
        }
        team.ask_leader(lambda: finish(temporary, final, manifest), doing=f"cannot finish {final}")
        if self.save_latest:  # when every node has the checkpoint
            team.ask_leader(lambda: name_latest(final.parent, self.tag), doing=f"cannot finish {final}")
        if team.leads:
            for problem in retire(final.parent, final, extras.keep_last, extras.supersedes):
                print(f"warning: cannot remove an old checkpoint: {problem}", file=sys.stderr, flush=True)

    def undo(self, writes: Writes, problem: str) -> str:
        """Remove what was written; where the disk is full, a line with the room that there is, and is needed."""
        needed = sum(self.team.members(gather(writes.size)))
        if self.team.leads:
            shutil.rmtree(self.temporary, ignore_errors=True)
        if not says_full(problem):
            return ""
        folder = self.temporary.parent
        room = self.team.ask_leader(lambda: shutil.disk_usage(folder).free)
        return f"\n{folder}: {needed:,} bytes are needed, {room:,} are free"


def _check_tag(tag: str) -> None:
    """Refuse tags under which a checkpoint would not be found again, or lie elsewhere."""
    name = tag.isprintable() and tag == tag.strip() and "/" not in tag and tag not in ("", ".", "..", *_BESIDE)
    if not name or tag.startswith(HIDDEN):
        raise CheckpointError(
            f"tag: got {tag!r}, accepted: the name of one folder, without spaces around it, that is none of "
            f"{', '.join(_BESIDE)} and does not begin with {HIDDEN!r}"
        )


def _check_client_state(client_state: Any, engine: Any) -> None:
    """Refuse keys that would replace what DeepSpeed loads a checkpoint by."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state: got {type(client_state).__name__}, accepted: a dict")
    keys = sorted(_values_of_the_program(client_state, engine).keys() & _keys_of_deepspeed(engine))
    if keys:
        raise CheckpointError(
            f"client_state: got keys {', '.join(keys)}, which DeepSpeed writes itself; accepted: other names"
        )


def _values_of_the_program(client_state: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
    """``client_state`` without what DeepSpeed put there itself, where it is one that ``load_checkpoint`` returned.

    DeepSpeed's tutorial hands that back to the next save. The old run's values in it (its steps, say) would replace
    those of now.
    """
    if not client_state.keys() >= _HANDED_BACK:
        return client_state
    old = _keys_of_deepspeed(engine)
    if _info_of(engine):  # DeepSpeed writes the model's; else Megatron-DeepSpeed passes it
        old |= {_INFO}
    return {key: value for key, value in client_state.items() if key not in old}


def _keys_of_deepspeed(engine: Any) -> frozenset[str]:
    return _DEEPSPEEDS | (_OF_EXPERTS if getattr(engine, "has_moe_layers", False) else frozenset())


def _info_of(engine: Any) -> Mapping[str, Any]:
    return getattr(getattr(engine, "module", None), _INFO, None) or {}


def _describe(engine: Any) -> dict[str, Any]:
    """The engine's part of a manifest."""
    info, size = _info_of(engine), getattr(engine, "mp_world_size", None)
    stages = (info.get("pipeline") or {}).get("stages", 1)
    experts = (info.get("expert_parallel") or {}).get("size", 1)
    stepped = getattr(engine.optimizer, "optimizer", engine.optimizer)  # in ZeRO's, or itself
    name = CoatAdamW.__name__ if isinstance(stepped, CoatAdamW) else type(stepped).__name__
    known = {
        "world_size": rank_and_world()[1],
        "zero_stage": getattr(engine, "zero_optimization_stage", None),
        "data_parallel": getattr(engine, "dp_world_size", None),
        "tensor_parallel": size if size is None else size // stages,
        **({"pipeline_stages": stages} if stages > 1 else {}),
        "global_steps": getattr(engine, "global_steps", None),
        "optimizer": None if stepped is None else name,
        **({"expert_parallel": experts} if experts > 1 else {}),
    }
    return {key: value() if callable(value) else value for key, value in known.items()}


def _warn_within_a_step(engine: Any) -> None:
    """Say on rank 0 that the micro-batches of a step that is not whole yet will be missing after a resume."""
    # Where a program says itself when a step ends, as accelerate does, DeepSpeed's count is of steps, or of neither.
    by_hand = getattr(engine, "_is_gradient_accumulation_boundary", None) is not None
    if by_hand or not engine.managed_gradient_accumulation():
        return
    each = engine.gradient_accumulation_steps()
    if (part := engine.micro_steps % each) and rank_and_world()[0] == 0:
        warnings.warn(
            f"save_checkpoint: called after {part} of {each} micro-batches of a step (gradient_accumulation_steps); "
            "checkpoints hold no gradients, so a resumed run begins this step anew and differs from this one",
            stacklevel=3,
        )
