"""The ``"coat"`` block of a DeepSpeed configuration, and what DeepSpeed settings it can live with.

Every problem is reported as one :class:`CoatConfigError` that names the key, what was given and what is accepted,
before anything is built. Keys and defaults are the fields below; README has them as a table.
"""

from __future__ import annotations

import base64
import copy
import difflib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["ActivationConfig", "CoatConfig", "CoatConfigError", "OptimizerConfig", "check_deepspeed", "load_json"]


class CoatConfigError(ValueError):
    """A configuration that cannot be run. The message is complete: key, given value, accepted values."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OptimizerConfig(_Block):
    """How CoatAdamW stores its moments."""

    first_moment: Literal["e4m3", "e5m2", "int8"] = "e4m3"
    """Format of the first moment m."""
    second_moment: Literal["e4m3", "e5m2", "log8"] = "e4m3"
    """Format of the second moment v; "log8" is an 8-bit logarithm."""
    expand: bool = True
    """Dynamic range expansion: store (x / amax)^k, so that a group fills the format's range (COAT section 4)."""
    group_size: Literal[64, 128, 256] = 128
    """Consecutive elements that share one amax and one exponent."""
    stochastic_rounding: Literal[True, False, "auto"] = "auto"
    """Round codes up or down at random, without bias: true = of both moments, "auto" = of the second moment where beta2
    is above 0.98; otherwise to nearest."""
    master_weights: Literal["parameter", "bf16_remainder"] = "parameter"
    """"parameter": ZeRO's fp32 shard. "bf16_remainder": the bfloat16 weight and the 16 bits it lacks, the same number
    to the bit; needs DeepSpeed's ``bf16.bf16_master_weights_and_grads`` and ``bf16.bf16_optimizer_states``."""

    @field_validator("stochastic_rounding", mode="before")
    @classmethod
    def _no_number(cls, value: Any) -> Any:
        if isinstance(value, bool) or value == "auto":
            return value
        raise PydanticCustomError("literal_error", "not accepted", {"expected": 'true, false or "auto"'})

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.second_moment == "log8" and not self.expand:
            raise ValueError(
                'expand: got false with second_moment "log8", accepted: true (its codes always span a group\'s range)'
            )
        return self


class ActivationConfig(_Block):
    """The FP8 precision flow of transformer layers."""

    enabled: bool = True
    """Patch the layers. False keeps BF16 layers and only the optimizer is compressed."""
    forward: Literal["exact", "quantized"] = "exact"
    """"quantized" (the paper): norm and activation read the FP8 tensor that is saved. "exact": they read the BF16
    tensor, and only backward reads the FP8 one."""
    format: Literal["e4m3", "e5m2"] = "e4m3"
    """FP8 format of activations and weights."""
    grad_format: Literal["e4m3", "e5m2"] = "e4m3"
    """FP8 format of gradients."""
    group_size: Literal[16, 32, 64, 128] = 32
    """Elements along the hidden dimension that share one scale in tensors saved for backward."""
    scale: Literal["e8m0", "bf16"] = "e8m0"
    """Type of those scales: 1-byte power of two (OCP MX) or bfloat16."""
    fp8_gather: bool = True
    """Send FP8 instead of BF16 when sequence parallelism gathers activations and gradients."""
    tp_invariant: bool = False
    """Reduce every scale over tensor-parallel ranks and sum exactly, so that losses do not depend on the TP size."""
    weights: Literal["on_use", "cached"] = "on_use"
    """Quantize weights on every use, or keep their codes until the weights change: 1 byte a parameter and rank."""
    wgrad: Literal["grad", "main_grad"] = "grad"
    """Weight gradients: returned to autograd in the weight's dtype, or added to ``weight.main_grad`` in its own dtype.
    The latter is Megatron's ``gradient_accumulation_fusion``, which ``patch_model`` honours by itself."""
    attention: Literal["bf16", "fp8"] = "bf16"
    """What attention keeps of q, k, v and its output: "fp8" rounds them by groups, and forward computes from the
    rounded values."""
    loss: Literal["chunked", "plain"] = "chunked"
    """Where a model computes its own loss: "chunked" never holds all logits and makes them again in backward; "plain"
    leaves the model's output layer and loss as they are."""
    bf16_layers: tuple[int, ...] = Field(default=(), strict=False)
    """Layers left in BF16: 0-based indices, negative ones count from the last."""

    @model_validator(mode="after")
    def _consistent(self) -> ActivationConfig:
        if self.tp_invariant and not self.fp8_gather:
            raise ValueError(
                "tp_invariant: got true with fp8_gather false, accepted: tp_invariant needs fp8_gather true"
            )
        if len(set(self.bf16_layers)) != len(self.bf16_layers):
            raise ValueError(f"bf16_layers: got {list(self.bf16_layers)}, accepted: a list of distinct layer indices")
        return self


class CoatConfig(_Block):
    """The whole block. A missing sub-block means its defaults."""

    optimizer: OptimizerConfig = OptimizerConfig()
    activation: ActivationConfig = ActivationConfig()

    @classmethod
    def from_deepspeed(cls, config: str | os.PathLike | Mapping[str, Any]) -> CoatConfig | None:
        """The block of a DeepSpeed configuration (path, dict or base64 JSON); None where it has none.

        Raises:
            CoatConfigError: the configuration cannot be read, or the block is wrong.
        """
        block = load_json(config).get("coat")
        return None if block is None else cls.parse(block)

    @classmethod
    def parse(cls, block: Any) -> CoatConfig:
        """Validate the content of a ``"coat"`` block.

        Raises:
            CoatConfigError: lists every wrong key with its value and what is accepted.
        """
        if not isinstance(block, Mapping):
            raise CoatConfigError(f"coat: got {block!r}, accepted: an object with keys {_keys(cls)}")
        try:
            return cls.model_validate(dict(block))
        except ValidationError as error:
            raise CoatConfigError("\n".join(_explain(cls, e) for e in error.errors())) from None


def load_json(config: str | os.PathLike | Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of a DeepSpeed configuration given as dict, path of a JSON file, or base64 of JSON.

    Raises:
        CoatConfigError: nothing there, not JSON, a duplicate key, or not an object.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, str | os.PathLike):
        raise CoatConfigError(f"config: got {type(config).__name__}, accepted: a dict or the path of a JSON file")
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        try:
            text = base64.urlsafe_b64decode(os.fspath(config)).decode()
            json.loads(text)
        except ValueError:
            raise CoatConfigError(
                f"config: cannot read {os.fspath(config)!r} ({problem.strerror}), "
                "accepted: a dict or the path of a JSON file"
            ) from None
    try:
        loaded = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as problem:
        raise CoatConfigError(f"config: {os.fspath(config)} is not JSON: {problem}") from None
    if not isinstance(loaded, dict):
        raise CoatConfigError(f"config: {os.fspath(config)} holds {type(loaded).__name__}, accepted: a JSON object")
    return loaded


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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise CoatConfigError(f"config: key {key!r} is given twice")
        seen[key] = value
    return seen


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


def _explain(model: type[BaseModel], error: Any) -> str:
    """One line for one pydantic error: key, given, accepted."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(["coat", *location])
    kind, given = error["type"], error.get("input")
    if kind == "value_error":  # our own validators word the whole line
        return f"{key}.{error['ctx']['error']}"
    if kind == "extra_forbidden":
        owner = model
        for part in location[:-1]:
            owner = owner.model_fields[part].annotation  # type: ignore[assignment]
        close = difflib.get_close_matches(location[-1], owner.model_fields, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return f"{key}: unknown key{hint}, accepted: {_keys(owner)}"
    accepted = {
        "literal_error": lambda: error["ctx"]["expected"],
        "bool_type": lambda: "true or false",
        "tuple_type": lambda: "a list of integers",
        "int_type": lambda: "an integer",
        "int_parsing": lambda: "an integer",
    }.get(kind, lambda: error["msg"])()
    if kind == "model_type":
        accepted = f"an object with keys {_keys(model.model_fields[location[0]].annotation)}"  # type: ignore[arg-type]
    return f"{key}: got {json.dumps(given, default=str)}, accepted: {accepted}"
