"""Weights & Biases, where its package is installed and asked for: one run for all starts that continue one another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import write_text
from coat_dist.ranks import on_rank_0
from launch.log_level import shows

__all__ = ["WandbLog", "start_wandb"]


class WandbLog:
    """Sends records of steps. On rank 0 only.

    Args:
        project, name, entity: of W&B; None = its default.
        mode: "online" or "offline"; None = what ``WANDB_MODE`` says, or W&B's default.
        folder: of the run: W&B's files go there, and ``wandb.json`` with the run's id; None = W&B's default, and every
            start is a run of its own.
        continues: whether ``wandb.json`` there is of this run; else a new one begins.
        config: what the run is, plain values.

    Raises:
        CoatConfigError: W&B refuses, most often because nobody is logged in; its package cannot be imported.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None,
        entity: str | None,
        mode: str | None,
        folder: str | None,
        continues: bool,
        config: Mapping[str, Any],
    ) -> None:
        if not shows("info"):
            os.environ.setdefault("WANDB_SILENT", "true")  # it prints a page; refusals are raised all the same
        wandb = _package()
        kept = None if folder is None else Path(folder, "wandb.json")
        options = {"name": name, "entity": entity, "mode": mode, "dir": folder}
        if continues and kept is not None and (known := _run_id(kept)) is not None:
            options |= {"id": known, "resume": "allow"}
        given = {key: value for key, value in options.items() if value is not None}
        try:
            self._run = wandb.init(project=project, config=dict(config), **given)
        except Exception as problem:  # its own classes, and those of what it talks through
            line = " ".join(str(problem).split())
            raise CoatConfigError(
                f"--wandb: got {project}, which cannot be started ({type(problem).__name__}: {line}), accepted: after "
                "`wandb login`, or with --wandb-mode offline"
            ) from problem
        if kept is not None:
            write_text(kept, json.dumps({"id": str(self._run.id), "project": project}) + "\n")

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of one step. Of steps that are repeated after a restart W&B keeps the first."""
        numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        self._run.log(numbers, step=record["step"])

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        """Give the run its summary's numbers, and end it."""
        for key, value in summary.items():
            if value is not None:
                self._run.summary[key] = value
        self._run.finish(exit_code=int(failed))


def _package() -> Any:
    try:
        import wandb
    except Exception as problem:  # something that it needs is missing, or of another version
        line = " ".join(str(problem).split())
        raise CoatConfigError(
            f"--wandb: its package cannot be imported ({type(problem).__name__}: {line}), accepted: one that can, say "
            "after pip install --upgrade wandb"
        ) from problem
    return wandb


def _run_id(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def start_wandb(p: Any, continues: bool) -> WandbLog | None:
    """The run of a plan at Weights & Biases, on rank 0, if it was asked for; an error of it on all ranks."""
    a = p.args
    if a.wandb is None:
        return None
    made: list[WandbLog] = []

    def start() -> None:  # what it returns would be sent to the other ranks
        made.append(
            WandbLog(
                a.wandb,
                name=a.wandb_name,
                entity=a.wandb_entity,
                mode=a.wandb_mode,
                folder=a.output,
                continues=continues,
                config={**p.identity(), "arguments": {k: v for k, v in vars(a).items() if k != "local_rank"}},
            )
        )

    on_rank_0(start)
    return made[0] if made else None
