"""Model descriptions (``configs/models/*.json``) and the Megatron-core models built from them."""

from launch.model.gpt import (
    ModelConfig,
    build_model,
    flops_per_token,
    load_model_config,
    parameter_count,
)

__all__ = ["ModelConfig", "build_model", "flops_per_token", "load_model_config", "parameter_count"]
