"""FP8 optimizer states and FP8 activations for DeepSpeed and Megatron-core training.

The public API is what this page exports. DeepSpeed itself is imported on first use of :func:`initialize`.
"""

from typing import Any

import torch

from .config import CoatConfig, CoatConfigError
from .optim import CoatAdamW, convert_to_universal, param_groups, safe_get_full_moment, safe_set_full_moment

__all__ = [
    "CoatAdamW",
    "CoatConfig",
    "CoatConfigError",
    "convert_to_universal",
    "initialize",
    "param_groups",
    "safe_get_full_moment",
    "safe_set_full_moment",
]
__version__ = "0.1.0"

# DeepSpeed looks an optimizer type it does not know up in torch.optim, so `"type": "CoatAdamW"` works in any DeepSpeed
# program (and under libraries that call DeepSpeed) once this package is imported.
torch.optim.CoatAdamW = CoatAdamW  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    if name == "initialize":
        from .engine import initialize

        return initialize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
