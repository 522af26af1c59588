"""CoatAdamW, its parameter groups, and its state in fp32 for checkpoints."""

from .adamw import CoatAdamW
from .checkpoint import export_moments, import_moments
from .groups import param_groups
from .state_dict import fp32_state_dict

__all__ = ["CoatAdamW", "export_moments", "fp32_state_dict", "import_moments", "param_groups"]
