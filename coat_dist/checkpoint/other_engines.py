"""Checkpoints of CoatAdamW before an engine with another optimizer: refused by name.

DeepSpeed would begin to load one, and then end with words about the layout of parameters or the number of groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .manifest import CheckpointError, read_manifest
from .publish import LATEST

__all__ = ["OPTIMIZER", "refuse_compressed_moments"]

OPTIMIZER = "optimizer"
"""What a manifest's "engine" says of the optimizer: the name of its class."""


def refuse_compressed_moments(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` refuse checkpoints whose optimizer is CoatAdamW, where its states are wanted.

    For engines of another optimizer. Every rank reads the same manifest and so comes to the same end. Raises
    ``CheckpointError``, before anything is loaded.
    """
    original: Callable = engine.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        wanted = load_optimizer_states and not load_module_only and not engine.load_universal_checkpoint()
        if wanted and (folder := _written_by_coat_adamw(load_dir, tag)) is not None:
            raise CheckpointError(
                f"optimizer.type: {folder} has states of CoatAdamW, this run has another optimizer; accepted: "
                '"type": "CoatAdamW", load_optimizer_states=False, or the checkpoint converted by '
                'coat_dist.convert_to_universal (launch/to_universal.py) and "checkpoint": {"load_universal": true}'
            )
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return original(load_dir, tag, *flags, *args, **kwargs)

    engine.load_checkpoint = load_checkpoint


def _written_by_coat_adamw(load_dir: Any, tag: Any) -> Path | None:
    """The checkpoint's folder, if its manifest names CoatAdamW. What cannot be read is for DeepSpeed to refuse."""
    try:
        name = (Path(load_dir) / LATEST).read_text(encoding="utf-8").strip() if tag is None else str(tag)
        folder = Path(load_dir) / name
        engine = read_manifest(folder, of_run=False)["engine"]
        return folder if engine[OPTIMIZER] == "CoatAdamW" else None
    except (OSError, ValueError, KeyError, TypeError):  # CheckpointError is a ValueError
        return None
