"""Documented names under their old address; they live in ``groups.py`` and ``replicated_grads.py``."""

from .groups import MPUAdapter, initialize_model_parallel, rng_state, set_rng_state, tensor_parallel
from .replicated_grads import check_replicas, install_replicated_grad_hooks

__all__ = [
    "MPUAdapter",
    "check_replicas",
    "initialize_model_parallel",
    "install_replicated_grad_hooks",
    "rng_state",
    "set_rng_state",
    "tensor_parallel",
]
