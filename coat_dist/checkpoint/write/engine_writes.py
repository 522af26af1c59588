"""DeepSpeed's writing during a save: which files a rank wrote, and errors kept until all ranks hear
of them.

``engine.save_checkpoint`` ends with a collective: if one rank raised before it, the others would
hang. So some methods of the engine are replaced on its instance during a save.
"""

from __future__ import annotations

import errno
import functools
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...optim.state import CODE_KEYS


@dataclass
class Writes:
    """What one rank wrote in one save."""

    files: list[Path] = field(default_factory=list)
    """Those that went through the checkpoint engine, absolute."""
    errors: list[Exception] = field(default_factory=list)
    """Those of writing; the save went on after each."""


@contextmanager
def watch_writes(engine: Any) -> Iterator[Writes]:
    """Note what DeepSpeed's engine saves meanwhile, and keep the errors of writing instead of
    raising them.
    """
    writes = Writes()

    def collect_errors(write: Callable[..., Any], saves: bool) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str)), "")
            try:
                if saves:
                    for file in args:
                        _name_converter(file)
                result = write(*args, **kwargs)
            except Exception as error:  # a value that cannot be pickled may raise anything
                text = str(error)
                if not isinstance(error, OSError | RuntimeError):
                    text = f"{type(error).__name__}: {error}"
                if "unexpected pos" in text:  # torch.save's words for a full disk
                    text = os.strerror(errno.ENOSPC)
                kept = OSError(f"{path}: {text}")
                kept.__cause__ = error
                writes.errors.append(kept)
                return None
            if saves:
                writes.files.append(Path(os.path.abspath(path)))
            return result

        return attempt

    places = [
        (engine.checkpoint_engine, "save"),
        (engine.checkpoint_engine, "makedirs"),
        (engine, "_copy_recovery_script"),
        # What these gather, such as the caller's state_dict hooks, may raise too; there are no
        # collectives in them.
        (engine, "_save_checkpoint"),
        (engine, "_save_zero_checkpoint"),
    ]
    before = [vars(owner).get(name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, collect_errors(getattr(owner, name), name == "save"))
    try:
        yield writes
    finally:
        for (owner, name), own in zip(places, before, strict=True):
            if own is None:  # its class's is found again
                delattr(owner, name)
            else:
                setattr(owner, name, own)


_no_moments = functools.partial(
    operator.getitem,
    {},
    "exp_avg: CoatAdamW's moments are stored in 8 bits; convert this checkpoint with "
    "launch/to_universal.py or coat_dist.convert_to_universal",
)


def _name_converter(file: Any) -> None:
    """Let DeepSpeed's own ``ds_to_universal`` end in a KeyError that names ours.

    It looks up "exp_avg" in each optimizer state, without this package: only the standard library
    is pickled.
    """
    zero = file.get("optimizer_state_dict") if isinstance(file, dict) else None
    for part in zero.values() if isinstance(zero, dict) else ():
        states: Any = part.get("state") if isinstance(part, dict) else None
        for key, state in states.items() if isinstance(states, dict) else ():
            if isinstance(state, dict) and CODE_KEYS[0] in state:
                states[key] = defaultdict(_no_moments, state)
