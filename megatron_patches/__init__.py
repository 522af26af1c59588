"""Megatron-core side of coat_dist: in-place patches, a layer specification, what DeepSpeed needs
to drive models.
"""

from coat_dist.deepspeed.attach import FOR_NEW_ENGINES
from coat_dist.extras import need

from .compat import check_version, define_missing_names, prepare_cpu, quiet_imports

with quiet_imports():
    need("megatron.core", "megatron", "megatron_patches")
    define_missing_names()
    from .groups import (
        MPUAdapter,
        initialize_model_parallel,
        rng_state,
        set_rng_state,
        tensor_parallel,
        zero_init,
    )
    from .layers.spec import gpt_layer_spec
    from .parallel.engine import initialize
    from .parallel.optimizer import get_megatron_optimizer
    from .parallel.pipeline import eval_batch, train_batch
    from .parallel.replicated_grads import check_replicas, install_replicated_grad_hooks
    from .parallel.step_jobs import attach_step_jobs, has_step_jobs
    from .parallel.universal import universal_checkpoint_info
    from .patch.patch import PatchReport, patch_model, patched, unpatch_model

FOR_NEW_ENGINES.append((has_step_jobs, attach_step_jobs))

__all__ = [
    "MPUAdapter",
    "PatchReport",
    "check_replicas",
    "check_version",
    "eval_batch",
    "get_megatron_optimizer",
    "gpt_layer_spec",
    "initialize",
    "initialize_model_parallel",
    "install_replicated_grad_hooks",
    "patch_model",
    "patched",
    "prepare_cpu",
    "rng_state",
    "set_rng_state",
    "tensor_parallel",
    "train_batch",
    "universal_checkpoint_info",
    "unpatch_model",
    "zero_init",
]
