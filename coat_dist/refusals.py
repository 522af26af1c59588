"""DeepSpeed settings that CoatAdamW or the flow cannot honour: refused by key before anything is built."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from .config import CoatConfig, CoatConfigError

__all__ = ["check_deepspeed"]


def check_deepspeed(
    config: Mapping[str, Any], *, tp: int = 1, cp: int = 1, pipeline: bool = False, mpu: bool = False
) -> None:
    """Refuse DeepSpeed settings that CoatAdamW or the flow cannot honour; warn of the doubtful ones.

    Args:
        config: the whole DeepSpeed configuration; nothing is checked beyond the block itself where it has neither a
            ``"coat"`` block nor ``"optimizer": {"type": "CoatAdamW"}``.
        tp, cp: Megatron tensor- and context-parallel sizes.
        pipeline: the model is a ``deepspeed.pipe.PipelineModule``.
        mpu: a Megatron mpu is handed to DeepSpeed.

    Raises:
        CoatConfigError: names each offending key, its value and what is accepted.
    """
    coat = CoatConfig.from_deepspeed(config)
    optimizer_type = _get(config, "optimizer", "type")
    compressed = optimizer_type == "CoatAdamW"
    if coat is None and not compressed:
        return
    problems: list[str] = []

    def refuse(key: str, accepted: str, when: bool = True) -> None:
        if when:
            problems.append(
                f"{key}: got {json.dumps(_get(config, *key.split('.')), default=str)}, accepted: {accepted}"
            )

    if coat is not None and "optimizer" in config["coat"] and optimizer_type is not None:
        refuse(
            "optimizer.type", '"CoatAdamW" when the block has "coat.optimizer" (remove one of the two)', not compressed
        )
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    bf16 = bool(_get(config, "bf16", "enabled") or _get(config, "bfloat16", "enabled"))
    if compressed:
        with_coat = "with CoatAdamW"
        refuse(
            "zero_optimization.elastic_checkpoint",
            f"false {with_coat}: it merges raw optimizer state across ranks",
            bool(zero.get("elastic_checkpoint")),
        )
        device = _get(zero, "offload_optimizer", "device")
        refuse(
            "zero_optimization.offload_optimizer.device",
            f'"none" {with_coat}: compressed moments are small enough to stay on the GPU',
            device not in (None, "none"),
        )
        refuse(
            "zero_optimization.offload_optimizer.super_offload",
            f"false {with_coat}",
            bool(_get(zero, "offload_optimizer", "super_offload")),
        )
        refuse("zero_optimization.cpu_offload", f"false {with_coat}", bool(zero.get("cpu_offload")))
        refuse("zero_optimization.zenflow", f"absent {with_coat}", zero.get("zenflow") is not None)
        refuse(
            "zero_optimization.stage",
            "1, 2 or 3 with bf16.enabled: stage 0 steps on zero gradients while the engine is built",
            stage == 0 and bf16,
        )
        _check_master_weights(config, coat, stage, refuse)
        if _get(config, "compile", "deepcompile") and _get(config, "compile", "offload_opt_states"):
            warnings.warn(
                "compile.offload_opt_states: DeepCompile does not know CoatAdamW's state and will not offload it",
                stacklevel=2,
            )
    if stage and cp > 1:
        problems.append(
            f"context_parallel_size: got {cp}, accepted: 1 with ZeRO (gradients are not reduced over CP ranks)"
        )
    autotp = _get(config, "tensor_parallel", "autotp_size") or 0
    refuse("tensor_parallel.autotp_size", f"0 or 1 with Megatron tensor parallelism {tp}", autotp > 1 and tp > 1)
    if pipeline and mpu:
        problems.append(
            "mpu: got an mpu with a PipelineModule, accepted: one of the two (the PipelineModule has its own grid)"
        )
    refuse(
        "checkpoint.load_universal",
        f"false with zero_optimization.stage 3 and tensor parallelism {tp}: DeepSpeed does not "
        "slice universal checkpoints over TP there; use stage 1 or 2, or CoatAdamW",
        bool(_get(config, "checkpoint", "load_universal"))
        and stage == 3
        and tp > 1
        and _get(config, "optimizer", "type") != "CoatAdamW",  # has a loader of its own
    )
    if coat is not None and coat.activation.enabled:
        refuse(
            "fp16.enabled",
            "false with coat.activation.enabled: the flow runs in bf16",
            bool(_get(config, "fp16", "enabled")),
        )
        refuse(
            "coat.activation.weights",
            '"on_use" with zero_optimization.stage 3: a cache would hold whole weights on every rank',
            coat.activation.weights == "cached" and stage == 3,
        )
        refuse(
            "coat.activation.wgrad",
            '"grad" under DeepSpeed, whose parameters have no main_grad',
            coat.activation.wgrad == "main_grad",
        )
    if problems:
        raise CoatConfigError("\n".join(problems))


def _check_master_weights(
    config: Mapping[str, Any], coat: CoatConfig | None, stage: int, refuse: Callable[..., None]
) -> None:
    """``master_weights`` and DeepSpeed's keys have to say the same: each alone would lose the lower 16 bits."""
    given = _get(config, "optimizer", "params", "master_weights")  # if in both places, initialize refuses
    chosen = given or (coat.optimizer.master_weights if coat is not None else "parameter")
    block = "bfloat16" if "bfloat16" in config and "bf16" not in config else "bf16"
    weights, states = f"{block}.bf16_master_weights_and_grads", f"{block}.bf16_optimizer_states"
    on = {key: bool(_get(config, *key.split("."))) for key in (weights, states)}
    if chosen != "bf16_remainder":
        accepted = 'false with CoatAdamW, or true with coat.optimizer.master_weights "bf16_remainder"'
        refuse(weights, f"{accepted}: bfloat16 alone loses small updates", on[weights])
        return
    option = 'coat.optimizer.master_weights "bf16_remainder"'
    refuse(f"{block}.enabled", f"true with {option}", not _get(config, block, "enabled"))
    refuse(weights, f"true with {option}", not on[weights])
    refuse(states, f"true with {option} (moments stay FP8; without it DeepSpeed wants CPU offload)", not on[states])
    refuse(
        "data_types.grad_accum_dtype",
        f'"bf16" with {option} at zero_optimization.stage 1, where fp32 sums mean fp32 weights (BF16_Optimizer); or '
        "stage 2 or 3",
        stage == 1 and _get(config, "data_types", "grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32"),
    )


def _get(config: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(config, Mapping):
            return None
        config = config.get(key)
    return config
