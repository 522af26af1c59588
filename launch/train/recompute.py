"""Activation recomputation: Megatron's settings from the programs' options."""

from __future__ import annotations

from typing import Any

from coat_dist import CoatConfig, CoatConfigError
from launch.model.model_config import ModelConfig

_MODULES = ("core_attn", "mlp", "layernorm")


def recompute_options(args: Any, model: ModelConfig, coat: CoatConfig | None) -> dict[str, Any]:
    """Arguments of Megatron's ``TransformerConfig``; none where nothing is computed again.

    Raises:
        CoatConfigError: parts of BF16 layers with which Megatron's own fail (docs/megatron.md):
            ``layernorm`` needs Transformer Engine, ``mlp`` with biases never ends.
    """
    if args.recompute_granularity is None:
        return {}
    if args.recompute_granularity == "selective":
        modules = list(args.recompute_modules or ["core_attn"])
        bf16 = coat is None or not coat.activation.enabled or bool(coat.activation.bf16_layers)
        fail = {"layernorm", *["mlp"] * model.linear_bias} if bf16 else set()
        if found := [name for name in modules if name in fail]:
            possible = ", ".join(name for name in _MODULES if name not in fail)
            why = (
                "needs Transformer Engine"
                if found[0] == "layernorm"
                else "never ends with biases (linear_bias)"
            )
            raise CoatConfigError(
                f"--recompute-modules: got {found[0]}, accepted: {possible}; in BF16 layers "
                f"Megatron's {found[0]} {why}"
            )
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": args.recompute_method or "uniform",
        "recompute_num_layers": args.recompute_num_layers or 1,
    }
