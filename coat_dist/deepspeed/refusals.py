"""DeepSpeed settings that CoatAdamW or the flow cannot honour: refused by key before anything is built."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..config import CoatConfig, CoatConfigError
from ..optim import CoatAdamW
from ..optim.state import check_group

__all__ = ["check_deepspeed"]

_BLOCKS = (
    *("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "data_types", "zero_optimization", "checkpoint", "compile"),
    *("tensor_parallel", "pipeline", "amp", "torch_autocast", "activation_checkpointing", "flops_profiler", "aio"),
)
_NUMBERS = (
    *((f"train_{name}", int, "an integer >= 1") for name in ("batch_size", "micro_batch_size_per_gpu")),
    ("gradient_accumulation_steps", int, "an integer >= 1"),
    ("gradient_clipping", int | float, "a number >= 0"),
    ("tensor_parallel.autotp_size", int, "an integer >= 0"),
)
"""DeepSpeed compares them with numbers without a look at their types, some of them in the first step."""
_UNSET = ("bf16", "bfloat16", "aio", *(key for key, kind, _ in _NUMBERS if kind is int))
"""Keys that may be null, which means to DeepSpeed that they are not given."""
_MODELS = ("zero_optimization", "fp16", "bf16", "bfloat16", "tensor_parallel", "compile")
"""Blocks in which DeepSpeed drops what is "auto"."""
_INNER = (
    "optimizer.params",
    "scheduler.params",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)


def check_deepspeed(
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    cp: int = 1,
    pipeline: bool = False,
    mpu: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Refuse DeepSpeed settings that CoatAdamW or the flow cannot honour; warn of the doubtful ones.

    Args:
        config: the whole DeepSpeed configuration; nothing is checked beyond the block itself where it has neither a
            ``"coat"`` block nor ``"optimizer": {"type": "CoatAdamW"}``, and ``optimizer`` is no CoatAdamW.
        tp, cp: Megatron tensor- and context-parallel sizes.
        pipeline: the model is a ``deepspeed.pipe.PipelineModule``.
        mpu: a Megatron mpu is handed to DeepSpeed.
        optimizer: handed to DeepSpeed, or what a callable that was handed to it made.

    Raises:
        CoatConfigError: names each offending key, its value and what is accepted.
    """
    coat = CoatConfig.from_deepspeed(config)
    given = optimizer if isinstance(optimizer, CoatAdamW) else None
    optimizer_type = _get(config, "optimizer", "type")
    compressed = optimizer_type == "CoatAdamW" or given is not None
    meant = [k for k in config if isinstance(k, str) and k.strip().lower() == "coat" and k != "coat"]
    if meant:  # DeepSpeed passes over keys it does not know
        raise CoatConfigError(f'{meant[0]}: unknown key, accepted: "coat"')
    if not compressed and isinstance(optimizer_type, str) and optimizer_type.lower() == "coatadamw":
        raise CoatConfigError(f'optimizer.type: got {json.dumps(optimizer_type)}, accepted: "CoatAdamW"')
    if coat is None and not compressed:
        return
    config = _as_read(config)
    _check_types(config)
    problems: list[str] = []

    def refuse(key: str, accepted: str, when: bool = True) -> None:
        if when:
            problems.append(
                f"{key}: got {json.dumps(_get(config, *key.split('.')), default=str)}, accepted: {accepted}"
            )

    if coat is not None and "optimizer" in coat.model_fields_set and optimizer_type is not None and given is None:
        refuse(
            "optimizer.type", '"CoatAdamW" when the block has "coat.optimizer" (remove one of the two)', not compressed
        )
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if compressed:
        _check_zero(zero, refuse)
        half = next((k for k in (_bf16(config), "fp16") if _get(config, k, "enabled")), None)
        reason = "stage 0 steps on zero gradients while the engine is built"
        if half == "fp16":
            reason = "DeepSpeed's optimizer of stage 0 hands out states and weights that nothing here was written for"
        refuse(
            "zero_optimization.stage",
            f"1, 2 or 3 with {half}.enabled: {reason}",
            stage == 0 and half is not None,
        )
        if given is not None:
            problems += _against(coat, given)
        elif optimizer is None:
            problems += _check_params(_get(config, "optimizer", "params") or {}, coat)
        option = f'{"coat.optimizer." if given is None else "CoatAdamW "}master_weights "bf16_remainder"'
        _check_master_weights(config, _master_weights(config, coat, given) == "bf16_remainder", option, stage, refuse)
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
        and not compressed,  # has a loader of its own
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


def _as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what DeepSpeed reads as not given: null of some keys, and "auto", which programs on top
    of it fill in."""

    def without_auto(value: Any) -> Any:
        return {k: without_auto(v) for k, v in value.items() if v != "auto"} if isinstance(value, Mapping) else value

    given = {key: value for key, value in config.items() if value is not None or key not in _UNSET}
    return given | {key: without_auto(given[key]) for key in _MODELS if key in given}


def _check_types(config: Mapping[str, Any]) -> None:
    """Refuse what is no object, no stage or no number before anything is looked up in it: DeepSpeed would end in an
    AttributeError or TypeError that names no key."""
    wrong = [key for key in _BLOCKS if key in config and not isinstance(config[key], Mapping)]
    inner = {key: _get(config, *key.split(".")) for key in _INNER}
    wrong += [key for key, value in inner.items() if value is not None and not isinstance(value, Mapping)]
    problems = [
        f"{key}: got {json.dumps(_get(config, *key.split('.')), default=str)}, accepted: an object with its settings"
        for key in wrong
    ]
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage: got {json.dumps(stage, default=str)}, accepted: 0, 1, 2 or 3")
    for key, kind, accepted in _NUMBERS:
        value = _get(config, *key.split("."))
        wanted = key in config or value is not None
        least = 1 if accepted.endswith("1") else 0
        if wanted and (isinstance(value, bool) or not isinstance(value, kind) or not value >= least):
            problems.append(f"{key}: got {json.dumps(value, default=str)}, accepted: {accepted}")
    if problems:
        raise CoatConfigError("\n".join(problems))


def _check_zero(zero: Mapping[str, Any], refuse: Callable[..., None]) -> None:
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


def _check_params(params: Mapping[str, Any], coat: CoatConfig | None) -> list[str]:
    """Options of a CoatAdamW that is going to be built from JSON."""
    known = inspect.signature(CoatAdamW.__init__).parameters
    defaults = {name: p.default for name, p in known.items() if name not in ("self", "params")}
    own = coat.optimizer.model_dump() if coat is not None and "optimizer" in coat.model_fields_set else {}
    problems = []
    for name, value in params.items():
        if name not in defaults:
            problems.append(f"optimizer.params.{name}: unknown key, accepted: {', '.join(defaults)}")
        elif name in own:
            problems.append(f"optimizer.params.{name}: given beside coat.optimizer, accepted: one of the two")
        elif isinstance(value, Mapping | list) and name != "betas":
            problems.append(f"optimizer.params.{name}: got {json.dumps(value, default=str)}, accepted: a single value")
        else:
            problems += _group_problem({**defaults, name: value})
    return problems or _group_problem({**defaults, **own, **params})


def _group_problem(options: Mapping[str, Any]) -> list[str]:
    try:
        check_group({**options, "moments": "fp8", "params": []})
    except ValueError as error:
        return [str(error).replace("CoatAdamW ", "optimizer.params.", 1)]
    return []


def _against(coat: CoatConfig | None, optimizer: CoatAdamW) -> list[str]:
    """The block's options, where it has some, that the given optimizer does not have."""
    if coat is None or "optimizer" not in coat.model_fields_set:
        return []
    return [
        f"coat.optimizer.{name}: got {json.dumps(value)} beside a CoatAdamW that has {json.dumps(group[name])}, "
        "accepted: its options, or none"
        for name, value in coat.optimizer.model_dump(exclude_unset=True).items()
        for group in optimizer.param_groups[:1]
        if group[name] != value
    ]


def _master_weights(config: Mapping[str, Any], coat: CoatConfig | None, given: CoatAdamW | None) -> Any:
    """How master weights are going to be kept."""
    if given is not None:
        return given.param_groups[0]["master_weights"]  # all groups: deepspeed/master_weights.py
    named = _get(config, "optimizer", "params", "master_weights")  # if in both places, it has been refused
    return named or (coat.optimizer.master_weights if coat is not None else "parameter")


def _check_master_weights(
    config: Mapping[str, Any], remainder: bool, option: str, stage: int, refuse: Callable[..., None]
) -> None:
    """``master_weights`` and DeepSpeed's keys have to say the same: each alone would lose the lower 16 bits."""
    block = _bf16(config)
    weights, states = f"{block}.bf16_master_weights_and_grads", f"{block}.bf16_optimizer_states"
    on = {key: bool(_get(config, *key.split("."))) for key in (weights, states)}
    if not remainder:
        accepted = f"false with CoatAdamW, or true with {option}"
        refuse(weights, f"{accepted}: bfloat16 alone loses small updates", on[weights])
        return
    refuse(f"{block}.enabled", f"true with {option}", not _get(config, block, "enabled"))
    refuse(weights, f"true with {option}", not on[weights])
    refuse(states, f"true with {option} (moments stay FP8; without it DeepSpeed wants CPU offload)", not on[states])
    refuse(
        "data_types.grad_accum_dtype",
        f'"bf16" with {option} at zero_optimization.stage 1, where fp32 sums mean fp32 weights (BF16_Optimizer); or '
        "stage 2 or 3",
        stage == 1 and _get(config, "data_types", "grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32"),
    )
    refuse(
        "zero_optimization.offload_param.device",
        f'"none" with {option}: weights and remainders are one master weight, on one device',
        _get(config, "zero_optimization", "offload_param", "device") not in (None, "none"),
    )
    for key in ("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"):
        refuse(key, f"false with {option}", bool(_get(config, *key.split("."))))


def _bf16(config: Mapping[str, Any]) -> str:
    """The name of the block that DeepSpeed reads; it passes over the older one beside the newer one."""
    return "bfloat16" if "bfloat16" in config and "bf16" not in config else "bf16"


def _get(config: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(config, Mapping):
            return None
        config = config.get(key)
    return config
