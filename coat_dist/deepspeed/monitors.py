"""DeepSpeed's monitors need packages that DeepSpeed does not require, and folders.

It asks for both on rank 0 alone, in the middle of building an engine, while the other ranks go on and wait for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import CoatConfigError, look_up

__all__ = ["make_folders", "missing_packages"]

_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41.0'"),
}
"""By DeepSpeed's key: the module that it imports, and what pip calls it."""
_WRITE_FILES = ("tensorboard", "csv_monitor")


def missing_packages(config: Mapping[str, Any]) -> Iterator[str]:
    """One line for each monitor that is turned on and whose package is not installed."""
    for key, (module, package) in _PACKAGES.items():
        if look_up(config, f"{key}.enabled") is True and not _is_there(module):
            yield f"{key}.enabled: got true without {module}, accepted: false, or first: pip install {package}"


def _is_there(module: str) -> bool:
    """Not a folder of that name without code either, such as runs leave in the current one."""
    loaded = sys.modules.get(module)
    spec = importlib.util.find_spec(module) if loaded is None else loaded.__spec__
    return loaded is not None if spec is None else spec.origin is not None


def make_folders(config: Mapping[str, Any]) -> None:
    """Make the folders that monitors write to, as they would; on rank 0.

    Raises:
        CoatConfigError: one cannot be written; names the key and the folder.
    """
    for key in _WRITE_FILES:
        if look_up(config, f"{key}.enabled") is not True:
            continue
        folder = Path(str(config[key].get("output_path", "")), str(config[key].get("job_name", "DeepSpeedJobName")))
        why = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            why = str(problem.strerror)
        if why or not os.access(folder, os.W_OK):
            raise CoatConfigError(
                f"{key}.output_path: cannot write {folder} ({why or 'no permission'}), accepted: a folder that can be "
                "written from rank 0"
            )
