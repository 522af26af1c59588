"""Megatron-core side of coat_dist: in-place patches, a layer specification, what DeepSpeed needs to drive models."""

import warnings

with warnings.catch_warnings():
    # megatron-core says at import, again and again, that it does without Transformer Engine and Apex. So do we.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)", category=UserWarning)
    from .compat import check_version, prepare_cpu
    from .groups import MPUAdapter, initialize_model_parallel, rng_state, set_rng_state, tensor_parallel
    from .patch import PatchReport, patch_model, patched, unpatch_model
    from .replicated_grads import check_replicas, install_replicated_grad_hooks
    from .spec import gpt_layer_spec
    from .universal import universal_checkpoint_info

__all__ = [
    "MPUAdapter",
    "PatchReport",
    "check_replicas",
    "check_version",
    "gpt_layer_spec",
    "initialize_model_parallel",
    "install_replicated_grad_hooks",
    "patch_model",
    "patched",
    "prepare_cpu",
    "rng_state",
    "set_rng_state",
    "tensor_parallel",
    "universal_checkpoint_info",
    "unpatch_model",
]
