"""What DeepSpeed writes while it saves: each file summed on the way to the disk, errors kept until all ranks can hear.

``engine.save_checkpoint`` meets the other ranks after writing: a rank that left it early would let them wait. So for
the time of a save some methods of the engine are replaced on its instances, and put back.
"""

from __future__ import annotations

import functools
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from ..optim.state import CODE_KEYS
from .summed_file import SummedFile

__all__ = ["Writes", "watch_writes"]


@dataclass
class Writes:
    """What one rank wrote in one save."""

    sums: dict[str, list[int]] = field(default_factory=dict)
    """[bytes, CRC-32] of each file that went through the checkpoint engine, by its absolute path."""
    errors: list[Exception] = field(default_factory=list)
    """Those of writing; the save went on after each."""
    size: int = 0
    """Bytes that were to be written, also those for which there was no room."""

    def torch_save(self, state: Any, path: str, zipfile: bool) -> None:
        """``torch.save``, as DeepSpeed calls it."""
        state = _with_a_name_for_readers(state)
        file = SummedFile(Path(path), zipfile and torch.serialization.get_crc32_options())
        try:
            torch.save(state, cast(IO[bytes], file), _use_new_zipfile_serialization=zipfile)
        finally:
            self.size += file.size
            file.close()
        if file.checksum is not None:
            self.sums[os.path.abspath(path)] = [file.size, file.checksum]


def _with_a_name_for_readers(state: Any) -> Any:
    """Optimizer states whose FP8 moments, looked up under AdamW's keys, name the tool that decodes them.

    ``deepspeed.checkpoint.ds_to_universal`` looks for "exp_avg" in every state, in processes of its own that import
    nothing of this package. Only the standard library is pickled.
    """
    outer: Any = state.get("optimizer_state_dict") if isinstance(state, dict) else None
    for key in ("base_optimizer_state", "optimizer_state_dict") if isinstance(outer, dict) else ():
        inner: Any = outer.get(key)
        states = inner.get("state") if isinstance(inner, dict) else None
        if isinstance(states, dict) and any(isinstance(s, dict) and CODE_KEYS[0] in s for s in states.values()):
            missing = functools.partial(operator.getitem, {}, _DECODED_BY)  # raises a KeyError that says so
            named = {k: defaultdict(missing, s) if isinstance(s, dict) else s for k, s in states.items()}
            return {**state, "optimizer_state_dict": {**outer, key: {**inner, "state": named}}}
    return state


_DECODED_BY = (
    "exp_avg: CoatAdamW's moments are stored in 8 bits; convert this checkpoint with launch/to_universal.py or "
    "coat_dist.convert_to_universal"
)


@contextmanager
def watch_writes(engine: Any, temporary: Path | None = None) -> Iterator[Writes]:
    """Sum what the engine saves meanwhile, and keep the errors of writing instead of raising them.

    Args:
        engine: DeepSpeed's.
        temporary: a folder in which scripts are made that DeepSpeed copies beside checkpoints (``zero_to_fp32.py``).
    """
    writes = Writes()
    zipfile = getattr(engine.checkpoint_engine, "zipfile_serialization", None)

    def keeping(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except Exception as error:  # of any kind: a value that cannot be pickled raises what it likes
                path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str)), "")
                told = OSError(f"{path}: {_text(error)}")
                told.__cause__ = error
                writes.errors.append(told)
                return None

        return attempt

    def save(state_dict: Any, path: str) -> None:
        writes.torch_save(state_dict, path, zipfile)  # type: ignore[arg-type]

    copy = engine._copy_recovery_script

    def copy_whole(folder: str) -> None:
        copy(str(temporary))
        for script in temporary.glob("*.py"):  # type: ignore[union-attr]
            place = Path(folder) / script.name
            if place.exists() and place.read_bytes() == script.read_bytes() and place != script:
                script.unlink()
            else:
                os.replace(script, place)

    places = [
        (engine.checkpoint_engine, "save", save if isinstance(zipfile, bool) else None),
        (engine.checkpoint_engine, "makedirs", None),
        (engine, "_copy_recovery_script", None if temporary is None else copy_whole),
        # What these gather, such as the caller's state_dict hooks, may raise too; there are no collectives in them.
        (engine, "_save_checkpoint", None),
        (engine, "_save_zero_checkpoint", None),
    ]
    before = [vars(owner).get(name) for owner, name, _ in places]
    for owner, name, other in places:
        setattr(owner, name, keeping(other or getattr(owner, name)))
    try:
        yield writes
    finally:
        for (owner, name, _), own in zip(places, before, strict=True):
            delattr(owner, name) if own is None else setattr(owner, name, own)  # without one, its class's is found


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {error}"
