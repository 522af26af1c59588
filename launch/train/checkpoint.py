"""Checkpoints of a training run: what it adds to DeepSpeed's files, and which of them it can
continue from.

``coat_dist/checkpoint`` keeps the folders whole, whatever happens. A run adds the states of its
random generators, its progress and its settings. Before one is loaded, its files are verified and
its settings compared with the run's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError, differences, read_manifest, verify
from coat_dist.checkpoint.read.load_checks import load_whole_checkpoints
from coat_dist.checkpoint.save import Extras, save_whole_checkpoints
from coat_dist.checkpoint.write.publish import find, name_of, own_name
from coat_dist.ranks import on_rank_0
from launch.convert.weights import CARRIED
from launch.train.runtime import get_random_state, reseed, set_random_state

_LAYOUT = (
    "parallel.",
    "deepspeed.zero_optimization.stage",
    "deepspeed.zero_optimization.round_robin_gradients",
    "deepspeed.zero_optimization.parameter_alignment",
    "deepspeed.zero_optimization.sub_group_size",
    "deepspeed.data_types",
)
"""How ranks share the state: ``--load auto`` converts a checkpoint where these differ
(``launch/train/layout.py``).
"""
_STRUCTURE = (*_LAYOUT, "model.", "deepspeed.optimizer.type", "deepspeed.coat.optimizer", "format")
"""A checkpoint cannot be loaded where one of these differs. Other differences are printed and
apply.
"""
_UNIVERSAL_STRUCTURE = ("model.", "format")
_FREE = (
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.seq_length",
    "model.sliding_window",
    "model.moe_aux_loss_coeff",
    "model.moe_token_dispatcher_type",
    "parallel.sequence_parallel",
    # How the next codes are found; what they mean stays.
    "deepspeed.coat.optimizer.stochastic_rounding",
)


def save(
    engine: Any,
    folder: str | Path,
    run: Mapping[str, Any],
    progress: Mapping[str, Any],
    keep_last: int = 0,
    supersedes: Collection[Path] = (),
    travelling: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint into its own folder in ``folder``, and return it; collective.

    Args:
        run: nested plain values that describe this run; compared by :func:`examine`.
        progress: plain values that :func:`restore` returns; ``progress["step"]`` names the
            checkpoint.
        keep_last, supersedes: see :class:`coat_dist.checkpoint.save.Extras`.
        travelling: files beside the weights, such as the tokenizer's, by name.

    Raises:
        CheckpointError: on every rank; earlier checkpoints are untouched.
    """

    def add_files(temporary: Path) -> None:
        torch.save(get_random_state(), temporary / _random_file(dist.get_rank()))
        for name, content in (travelling or {}).items() if dist.get_rank() == 0 else ():
            (temporary / CARRIED / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / CARRIED / name).write_bytes(content)

    save_whole_checkpoints(engine)  # an engine without a "coat" block does not have it yet
    content = {"progress": dict(progress), "run": run}
    tag = name_of(progress["step"])
    engine.save_checkpoint(
        str(folder), tag, extras=Extras(add_files, content, keep_last, supersedes)
    )
    return Path(folder) / tag


@dataclass(frozen=True)
class Examined:
    """A whole checkpoint that fits the run."""

    path: Path
    manifest: dict[str, Any]
    run: Mapping[str, Any]
    """The run that is about to load it."""
    changed: list[str]
    """A line for every setting that differs from the checkpoint's."""

    @property
    def universal(self) -> bool:
        """Whether ``launch/to_universal.py`` wrote it."""
        return bool(self.manifest.get("universal"))


def examine(checkpoint: Path, run: Mapping[str, Any]) -> Examined:
    """Whether a run can load a checkpoint, and whether its files are whole; collective, needs no
    model.

    Raises:
        CheckpointError: damaged or missing files, or a checkpoint of another model or another
            parallel layout.
    """
    manifest = on_rank_0(lambda: read_manifest(checkpoint))
    changed = differences(manifest["run"], run)
    structure = _UNIVERSAL_STRUCTURE if manifest.get("universal") else _STRUCTURE
    if fatal := {key: line for key, line in changed.items() if _among(key, structure)}:
        lines = [f"{checkpoint} was made by a different run:", *fatal.values()]
        if not any(_among(key, _UNIVERSAL_STRUCTURE) for key in fatal):
            lines.append(
                f"launch/to_universal.py --load {checkpoint} --output DIR converts it; then --load "
                "DIR"
            )
        raise CheckpointError("\n".join(lines))
    verify(checkpoint, manifest["files"])
    told = [
        line for key, line in changed.items() if not _among(key, structure) and key != "batch.given"
    ]
    return Examined(checkpoint, manifest, run, told)


def of_another_layout(manifest: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """A line for each setting that differs and makes a conversion necessary; none where a
    conversion is not enough.
    """
    changed = {} if manifest.get("universal") else differences(manifest["run"], run)
    fatal = {key: line for key, line in changed.items() if _among(key, _STRUCTURE)}
    return list(fatal.values()) if all(key.startswith(_LAYOUT) for key in fatal) else []


def restore(engine: Any, examined: Examined) -> dict[str, Any]:
    """Restore model, optimizer and random states, and return the ``progress`` given to
    :func:`save`; collective.

    A universal checkpoint holds no random states: they restart from the run's seed and the step.
    """
    checkpoint, progress = examined.path, examined.manifest["progress"]
    kept = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    load_whole_checkpoints(engine)
    # examine() has.
    engine.load_checkpoint(str(checkpoint.parent), tag=own_name(checkpoint), verify=False)
    for group, own in zip(engine.optimizer.param_groups, kept, strict=True):
        # Hyperparameters are the configuration's, also where DeepSpeed restores one group's for
        # all.
        group.update(own)
    if examined.universal:
        reseed(examined.run["seed"] + progress["step"])
    else:
        set_random_state(torch.load(checkpoint / _random_file(dist.get_rank()), weights_only=True))
    return progress


def _among(key: str, structure: tuple[str, ...]) -> bool:
    return key not in _FREE and key.startswith(structure)


def _random_file(rank: int) -> str:
    return f"random_rank_{rank:05d}.pt"


def require_loadable(folder: str | None, save: str | None) -> Path | None:
    """The checkpoint that ``--load`` means, or None for a fresh start.

    Raises:
        CoatConfigError: a folder was named that holds no checkpoint.
        CheckpointError: one that cannot be read.
    """
    if folder is None:
        return None
    found = find(save if folder == "auto" else folder)  # type: ignore[arg-type]
    if found is None and folder != "auto":
        raise CoatConfigError(
            f"--load: got {folder}, accepted: a folder with a file `latest`, one checkpoint's "
            "folder, or auto"
        )
    return found
