"""FP8 optimizer states and FP8 activations for DeepSpeed and Megatron-core training.

The public API is what this page exports. Once this is imported, ``deepspeed.initialize`` honours a
``"coat"`` block and ``"type": "CoatAdamW"``, also under libraries that call it. DeepSpeed itself is
not imported here, but on first use of :func:`initialize`.
"""

from typing import Any

from .checkpoint.universal.convert import convert_to_universal
from .config import CoatConfig, CoatConfigError
from .deepspeed import hook
from .deepspeed.step.accessors import safe_get_full_moment, safe_set_full_moment
from .extras import need
from .optim import CoatAdamW, param_groups

__all__ = [
    "CoatAdamW",
    "CoatConfig",
    "CoatConfigError",
    "convert_to_universal",
    "initialize",
    "log_probs",
    "param_groups",
    "patch_model",
    "safe_get_full_moment",
    "safe_set_full_moment",
    "unpatch_model",
]
__version__ = "0.1.0"

hook.install()


def __getattr__(name: str) -> Any:
    if name == "initialize":
        from .deepspeed.engine import initialize

        return initialize
    if name in ("log_probs", "patch_model", "unpatch_model"):
        from . import hf

        return getattr(hf, name)
    if name == "FrozenWeightsConfig":  # not in __all__: its base class is transformers'
        need("transformers", "hf", "coat_dist.FrozenWeightsConfig")
        from .hf.load import FrozenWeightsConfig

        return FrozenWeightsConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
