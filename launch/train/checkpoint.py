"""Checkpoints of a training run: what it adds to DeepSpeed's files, and which of them it can continue from.

``coat_dist/checkpoint`` keeps the folders whole, whatever happens. A run adds the states of its random generators, its
progress and its settings. Before one is loaded, its files are verified and its settings compared with the run's.
"""

from __future__ import annotations

import re
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
from coat_dist.checkpoint.team import Team, check_part, everyone, team_of
from coat_dist.checkpoint.write.publish import find, name_of, own_name
from coat_dist.config import look_up
from launch.train.runtime import get_random_state, reseed, set_random_state
from launch.weights.source import CARRIED, Weights, files_in

__all__ = ["Examined", "carried", "examine", "of_another_layout", "require_loadable", "restore", "save"]

# A checkpoint cannot be loaded where one of these differs. Other differences are printed and taken as wanted.
_STRUCTURE = (
    "model.",
    "parallel.",
    "deepspeed.zero_optimization.stage",
    "deepspeed.zero_optimization.round_robin_gradients",
    "deepspeed.zero_optimization.parameter_alignment",
    "deepspeed.zero_optimization.sub_group_size",
    "deepspeed.optimizer.type",
    "deepspeed.coat.optimizer",
    "deepspeed.data_types",
    "format",
)
_UNIVERSAL_STRUCTURE = ("model.", "format")
_LAYOUT = (
    "parallel.",
    "deepspeed.zero_optimization.stage",
    "deepspeed.zero_optimization.round_robin_gradients",
    "deepspeed.zero_optimization.parameter_alignment",
    "deepspeed.zero_optimization.sub_group_size",
    "deepspeed.data_types",
)
"""How ranks share what there is: ``launch/train/layout.py`` converts these without being asked."""
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
"""Of which the beginning tells two apart."""
_FREE = (
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.seq_length",
    "model.sliding_window",
    "model.moe_aux_loss_coeff",
    "model.moe_token_dispatcher_type",
    "parallel.sequence_parallel",
    "deepspeed.coat.optimizer.stochastic_rounding",  # how the next codes are found; what they mean stays
)
_NODE_LOCAL = "deepspeed.checkpoint.use_node_local_storage"


def save(
    engine: Any,
    folder: str | Path,
    run: Mapping[str, Any],
    progress: Mapping[str, Any],
    keep_last: int = 0,
    supersedes: Collection[Path] = (),
    travelling: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint; collective.

    Args:
        engine: DeepSpeed engine.
        folder: holds one folder a checkpoint and the file ``latest``.
        run: nested plain values that say what this run is; compared by :func:`examine`.
        progress: plain values to get back from :func:`restore`; ``progress["step"]`` names the checkpoint.
        keep_last, supersedes: see :class:`coat_dist.checkpoint.save.Extras`.
        travelling: files that came with the initial weights, from :func:`carried`; one rank writes them, or one of each
            node with a folder of its own.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: on every rank; what was there before is untouched.
    """

    def add_files(temporary: Path) -> None:
        torch.save(get_random_state(), temporary / _random_file(dist.get_rank()))
        for name, content in (travelling or {}).items() if leads else ():
            (temporary / CARRIED / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / CARRIED / name).write_bytes(content)

    leads = team_of(engine).leads
    save_whole_checkpoints(engine)  # one without a "coat" block has not got it
    content = {"progress": dict(progress), "run": run}
    tag = name_of(progress["step"])
    engine.save_checkpoint(str(folder), tag, extras=Extras(add_files, content, keep_last, supersedes))
    return Path(folder) / tag


def carried(source: Path | None, weights: Weights | None) -> dict[str, bytes]:
    """Tokenizer files and the like, to be kept in every checkpoint so that a Hugging Face folder can be made of it.

    Args:
        source: checkpoint that the run continues from; its files are taken on.
        weights: what a run without one starts with.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    files = files_in(source / CARRIED) if source is not None else weights.travelling() if weights is not None else {}
    try:
        return {name: content for name, path in files.items() if (content := path.read_bytes())}
    except OSError as problem:
        raise CheckpointError(f"{problem.filename}: cannot be read ({problem})") from problem


@dataclass(frozen=True)
class Examined:
    """A whole checkpoint that fits the run."""

    path: Path
    manifest: dict[str, Any]
    run: Mapping[str, Any]
    """What is about to load it."""
    changed: list[str]
    """A line for every setting that differs from the checkpoint's."""

    @property
    def universal(self) -> bool:
        """Whether it was written by ``launch/to_universal.py``."""
        return bool(self.manifest.get("universal"))


def examine(checkpoint: Path, run: Mapping[str, Any], team: Team | None = None) -> Examined:
    """Whether a run can load a checkpoint, and whether its files are whole; collective, needs no model.

    Args:
        team: the ranks that have it before them; None = all.

    Raises:
        CheckpointError: damaged or missing files, or a checkpoint of another model or another parallel layout.
    """
    team = team or everyone()
    manifest = team.ask_leader(lambda: read_manifest(checkpoint))
    check_part(checkpoint, manifest, team)
    changed = differences(manifest["run"], run)
    structure = _UNIVERSAL_STRUCTURE if manifest.get("universal") else _STRUCTURE
    if fatal := {key: line for key, line in changed.items() if _among(key, structure)}:
        lines = [f"{checkpoint} was made by a different run:", *fatal.values()]
        if not any(_among(key, _UNIVERSAL_STRUCTURE) for key in fatal):
            lines.append(_way_out(checkpoint, manifest, run, fatal))
        raise CheckpointError("\n".join(lines))
    verify(checkpoint, manifest["files"], team)
    told = [_DIGEST.sub(r"\1", v) for k, v in changed.items() if not _among(k, structure) and k != "batch.given"]
    return Examined(checkpoint, manifest, run, told)


def _way_out(checkpoint: Path, manifest: Mapping[str, Any], run: Mapping[str, Any], fatal: Collection[str]) -> str:
    """What makes a checkpoint fit a run from which it differs in the keys ``fatal``."""
    if manifest.get("part"):
        return (
            "what lies on nodes' own disks (checkpoint.use_node_local_storage) is not converted, accepted: the "
            "checkpoint's own values of these keys"
        )
    in_the_way = [key for key in fatal if not key.startswith(_LAYOUT)]
    in_the_way += [_NODE_LOCAL] if look_up(run, _NODE_LOCAL) else []
    by_itself = f"cannot, because of {', '.join(in_the_way)}" if in_the_way else "does so by itself"
    return (
        f"launch/to_universal.py --load {checkpoint} --output DIR converts it for these settings, and --load DIR takes "
        f"what it wrote; --load auto {by_itself}"
    )


def of_another_layout(manifest: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """A line for each setting that keeps a checkpoint from being loaded as it is, where a conversion mends all."""
    changed = {} if manifest.get("universal") else differences(manifest["run"], run)
    fatal = {key: line for key, line in changed.items() if _among(key, _STRUCTURE)}
    return list(fatal.values()) if all(key.startswith(_LAYOUT) for key in fatal) else []


def restore(engine: Any, examined: Examined) -> dict[str, Any]:
    """Restore model, optimizer and random states; collective.

    A universal checkpoint fits any parallel layout and ZeRO stage, and either optimizer. It holds no random states:
    they start anew, from the run's seed and the step.

    Returns:
        The ``progress`` given to :func:`save`.

    Raises:
        CheckpointError: it has disappeared since it was examined.
    """
    checkpoint, progress = examined.path, examined.manifest["progress"]
    kept = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    load_whole_checkpoints(engine)
    engine.load_checkpoint(str(checkpoint.parent), tag=own_name(checkpoint), verify=False)  # examine() has
    for group, own in zip(engine.optimizer.param_groups, kept, strict=True):
        group.update(own)  # hyperparameters are the configuration's, also where DeepSpeed restores one group's for all
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
        below = Path(folder) / "checkpoints"  # of a run's folder
        hint = f" (did you mean {below}?)" if below.is_dir() and find(below) is not None else ""
        raise CoatConfigError(
            f"--load: got {folder}, accepted: a folder with a file `latest`, one checkpoint's folder, or auto{hint}"
        )
    return found
