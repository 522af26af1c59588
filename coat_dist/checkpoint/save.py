"""``engine.save_checkpoint`` of a coat engine: a kill or an error on any rank leaves the previous
checkpoint.

A save is one transaction (:class:`_Save`): prepare, write, publish. DeepSpeed writes its files into
a folder with a temporary name (``write/engine_writes.py`` keeps errors), and a program may add its
own. Every file is flushed to disk and listed with size and checksum in ``manifest.json``
(``manifest.py``). Then the folder is renamed, ``latest`` replaced, and old checkpoints are removed
(``write/publish.py``).
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..flow.core.frozen import digest_of
from ..ranks import gather, of_another_rank, rank_and_world, say_on_rank_0
from ..shared_folders import check_shared
from .manifest import FORMAT, TEAM, CheckpointError, describe, sync_files
from .names import info_of
from .write.durable import write_text
from .write.engine_writes import Writes, watch_writes
from .write.publish import LATEST, begin, finish, retire, unfinished

_DEEPSPEED_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
    }
)
"""What DeepSpeed writes into the model's file. client_state comes last: such a key would replace
DeepSpeed's value.
"""


@dataclass(frozen=True)
class Extras:
    """What a program adds to a checkpoint: ``engine.save_checkpoint(folder, tag,
    extras=Extras(...))``.
    """

    add_files: Callable[[Path], None] | None = None
    """Called on each rank with the folder to write files of its own into."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """Values that the manifest holds beside its own: what JSON can hold."""
    keep_last: int = 0
    """Remove all but this many newest checkpoints named ``step%08d`` afterwards; 0 = keep all."""
    supersedes: Collection[Path] = ()
    """Checkpoints of an earlier run in the same folder, to be removed afterwards."""


def save_whole_checkpoints(engine: Any) -> None:
    """Let ``engine.save_checkpoint`` write checkpoints atomically; same arguments, returns True.

    One more argument, by keyword: ``extras``, an :class:`Extras`. It raises ``CheckpointError`` on
    every rank, whatever rank fails; what was there before is untouched then, and a later call may
    succeed. What could not be removed is printed. A second call of this function changes nothing.
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
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        save = _Save(engine, save_dir, tag, bool(save_latest), extras or Extras())
        state = save.prepare(client_state, bool(exclude_frozen_parameters))
        writes = save.write(original, state, exclude_frozen_parameters)
        try:
            save.publish(writes)
        except CheckpointError:  # on every rank
            if rank_and_world()[0] == 0:
                shutil.rmtree(save.temporary, ignore_errors=True)
            raise
        return True

    save_checkpoint.coat_whole = True  # type: ignore[attr-defined]
    engine.save_checkpoint = save_checkpoint


@dataclass(frozen=True)
class _Save:
    """One save. Each step is collective, and raises ``CheckpointError`` on all ranks if any rank
    fails.
    """

    engine: Any
    save_dir: Any
    tag: str
    save_latest: bool
    extras: Extras

    @property
    def final(self) -> Path:
        return Path(self.save_dir) / self.tag

    @property
    def temporary(self) -> Path:
        return unfinished(self.final)

    def prepare(
        self, client_state: Mapping[str, Any] | None, exclude_frozen: bool
    ) -> Mapping[str, Any]:
        """Compare the arguments of all ranks, and make the temporary folder; what to save of
        ``client_state``.
        """
        state: dict[str, Any] = {}

        def arguments() -> dict[str, Any]:
            _check_tag(self.tag)
            state.update(
                _without_deepspeed_keys({} if client_state is None else client_state, self.engine)
            )
            return {
                "tag": self.tag,
                "save_dir": os.path.abspath(self.save_dir),
                "save_latest": self.save_latest,
                "exclude_frozen_parameters": exclude_frozen,
            }

        TEAM.agree(arguments)
        folder = Path(self.save_dir)
        TEAM.on_rank_0(lambda: begin(self.final), f"cannot write {folder}")
        check_shared(folder, "save_dir", CheckpointError)
        return state

    def write(
        self, original: Callable[..., Any], client_state: Mapping[str, Any], exclude_frozen: Any
    ) -> Writes:
        """Let DeepSpeed write its files. Errors of writing are in the result: :meth:`publish`
        raises them.
        """
        try:
            with watch_writes(self.engine) as writes:
                original(
                    self.save_dir,
                    tag=self.temporary.name,
                    client_state=client_state,
                    save_latest=False,
                    exclude_frozen_parameters=exclude_frozen,
                )
        except (OSError, RuntimeError) as error:  # not of writing, whose errors are kept
            if of_another_rank(error):  # it names the rank
                raise
            raise CheckpointError(f"cannot write {self.temporary}: {error}") from error
        return writes

    def publish(self, writes: Writes) -> None:
        """Add the program's files, bring all to disk, give the folder its name, and remove old
        checkpoints.
        """
        extras, final, temporary = self.extras, self.final, self.temporary

        def own_files() -> None:
            if writes.errors:
                raise writes.errors[0]
            if extras.add_files is not None:
                extras.add_files(temporary)

        TEAM.each(own_files, f"cannot write {temporary}")
        files = sync_files(temporary, writes.files)
        described = describe(self.engine)
        if (digest := digest_of(self.engine.module)) is not None:
            described["frozen_weights"] = digest
        manifest = {
            **extras.content,
            "format": FORMAT,
            "tag": self.tag,
            "saved": gather(time.time())[0],
            LATEST: self.save_latest,
            "engine": described,
            "files": files,
        }

        def finish_on_rank_0() -> None:
            finish(temporary, final, manifest)
            if self.save_latest:
                write_text(final.parent / LATEST, self.tag)

        TEAM.on_rank_0(finish_on_rank_0, f"cannot finish {final}")
        if rank_and_world()[0] == 0:
            for problem in retire(final.parent, final, extras.keep_last, extras.supersedes):
                say_on_rank_0(f"warning: cannot remove an old checkpoint: {problem}")


def _check_tag(tag: str) -> None:
    """Refuse tags under which a checkpoint would not be found again, or lie elsewhere."""
    one_name = tag.isprintable() and tag == tag.strip() and tag == Path(tag).name != ""
    if not one_name or tag == LATEST or tag.startswith("."):
        raise CheckpointError(
            f"tag: got {tag!r}, accepted: the name of one folder that is not {LATEST!r}, does not "
            "begin with a dot and has no spaces around it"
        )


def _without_deepspeed_keys(client_state: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
    """``client_state`` without DeepSpeed's own keys, which are in it if ``load_checkpoint``
    returned it.

    DeepSpeed's tutorial passes that on to the next save, where old values (the number of steps,
    say) would replace the current ones.
    """
    if client_state.keys() >= {"ds_config", "ds_version"}:
        names = _DEEPSPEED_KEYS | ({"universal_checkpoint_info"} if info_of(engine) else set())
        return {key: value for key, value in client_state.items() if key not in names}
    if keys := sorted(client_state.keys() & _DEEPSPEED_KEYS):
        raise CheckpointError(
            f"client_state: got keys {', '.join(keys)}, which DeepSpeed writes itself; accepted: "
            "other names"
        )
    return client_state
