"""Where indices of training data are kept. Needs neither torch nor Megatron."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.prep import DataError

__all__ = ["cache_folder"]


def cache_folder(prefixes: Sequence[str], cache_dir: str | None) -> str:
    """A folder for sample indices that can be written: the one asked for, else beside the data, else the user's."""
    key = hashlib.sha256("\n".join(os.path.abspath(p) for p in prefixes).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    beside = Path(f"{prefixes[0]}.cache")
    for folder in [Path(cache_dir)] if cache_dir else [beside, home / "coat_dist" / key]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return str(folder)
        except OSError as problem:
            failed = f"{folder} ({problem.strerror})"
    raise DataError(f"cache_dir: cannot write to {failed}, accepted: a folder that can be written")
