"""Checkpoints of CoatAdamW before an engine with another optimizer: refused by name, on every rank.

DeepSpeed would begin to load one, and then end with words about the layout of parameters or the number of groups.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...optim import CoatAdamW
from ...ranks import raise_everywhere
from ..manifest import MANIFEST
from ..stage_names import place_in_pipeline
from ..write.publish import LATEST
from .load_checks import Request, check_before_load

__all__ = ["pipeline_stages", "refuse_compressed_moments"]


def pipeline_stages(engine: Any) -> int:
    """Stages of the Megatron pipeline of which an engine holds one; 1 of any other engine."""
    return place_in_pipeline(getattr(getattr(engine, "module", None), "universal_checkpoint_info", None))[1]


def refuse_compressed_moments(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` refuse checkpoints whose optimizer is CoatAdamW, where its states are wanted.

    For engines of another optimizer, with a "coat" block or without. Raises ``ValueError`` on every rank, whatever rank
    finds one, before anything is loaded.
    """
    if hasattr(engine.load_checkpoint, "coat_checks"):  # finds and verifies the checkpoint first
        check_before_load(engine, "other optimizer", functools.partial(_problems, engine))
        return
    original: Callable = engine.load_checkpoint
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        raise_everywhere(lambda: _problems_of_call(engine, signature, args, kwargs))
        return original(*args, **kwargs)

    engine.load_checkpoint = load_checkpoint


def _problems_of_call(engine: Any, signature: inspect.Signature, args: Sequence, kwargs: Mapping) -> list[str]:
    """Of a call of DeepSpeed's own ``load_checkpoint``. What cannot be one, or names no folder, it refuses itself."""
    try:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        folder, tag = Path(asked["load_dir"]), asked["tag"]
        named = (folder / LATEST).read_text(encoding="utf-8").strip() if tag is None else str(tag)
    except (OSError, ValueError, TypeError):
        return []
    states = asked["load_optimizer_states"] and not asked["load_module_only"]
    return _problems(engine, Request(folder, named, asked["load_module_strict"], states))


def _problems(engine: Any, request: Request) -> list[str]:
    if not request.states or engine.load_universal_checkpoint() or not _written_by_coat_adamw(request.folder):
        return []
    return [
        f"optimizer.type: {request.folder} has states of CoatAdamW, this run has another optimizer; accepted: "
        '"type": "CoatAdamW", load_optimizer_states=False, or the checkpoint converted by '
        'coat_dist.convert_to_universal (launch/to_universal.py) and "checkpoint": {"load_universal": true}'
    ]


def _written_by_coat_adamw(checkpoint: Path) -> bool:
    """Whether its manifest says so. What cannot be read is for others to refuse."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return manifest["engine"]["optimizer"] == CoatAdamW.__name__
    except (OSError, ValueError, KeyError, TypeError):
        return False
