"""CoatAdamW, its parameter groups, and its state in fp32 for checkpoints."""

from .accessors import safe_get_full_moment, safe_set_full_moment
from .adamw import CoatAdamW
from .checkpoint import export_moments, import_moments
from .groups import param_groups
from .master import export_master, set_master
from .state_dict import fp32_state_dict
from .universal import convert_to_universal

__all__ = [
    "CoatAdamW",
    "convert_to_universal",
    "export_master",
    "export_moments",
    "fp32_state_dict",
    "import_moments",
    "param_groups",
    "safe_get_full_moment",
    "safe_set_full_moment",
    "set_master",
]
