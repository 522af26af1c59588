"""DeepSpeed's monitors need packages that DeepSpeed does not require.

It imports them on rank 0 alone, in the middle of building an engine, while the other ranks go on and wait for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import look_up

__all__ = ["missing_packages"]

_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41.0'"),
}
"""By DeepSpeed's key: the module that it imports, and what pip calls it."""


def missing_packages(config: Mapping[str, Any]) -> Iterator[str]:
    """One line for each monitor that is turned on and whose package is not installed."""
    for key, (module, package) in _PACKAGES.items():
        if look_up(config, f"{key}.enabled") is True and importlib.util.find_spec(module) is None:
            yield f"{key}.enabled: got true without {module}, accepted: false, or first: pip install {package}"
