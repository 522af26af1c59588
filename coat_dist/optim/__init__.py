"""CoatAdamW, its parameter groups, and its state in fp32 for checkpoints; needs torch only."""

from .adamw import CoatAdamW
from .groups import name_parameters, param_groups, split_groups
from .master import export_master, set_master
from .moments import export_moments, import_moments
from .state_dict import fp32_state_dict

__all__ = [
    "CoatAdamW",
    "export_master",
    "export_moments",
    "fp32_state_dict",
    "import_moments",
    "name_parameters",
    "param_groups",
    "set_master",
    "split_groups",
]
