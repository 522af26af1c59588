"""The model that is evaluated: weights from anywhere, in one process or several, patched or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from coat_dist import CoatConfig, CoatConfigError
from launch.model.gpt import ModelConfig, build_model
from launch.weights import Weights, fill
from launch.weights.checkpoint import CheckpointWeights

__all__ = ["Coat", "build", "choose_coat", "read_run"]


def read_run(weights: Weights) -> tuple[dict[str, Any], int | None]:
    """What a checkpoint says of the run that saved it, and after how many steps; empty of other weights."""
    manifest = weights.manifest if isinstance(weights, CheckpointWeights) else {}
    return manifest.get("run") or {}, (manifest.get("progress") or {}).get("step")


@dataclass(frozen=True)
class Coat:
    """The block of an FP8 forward pass."""

    config: CoatConfig
    source: str
    """Where it is from, for the reader."""


def choose_coat(deepspeed_config: str | None, run: Mapping[str, Any]) -> Coat:
    """The ``"coat"`` block of ``--deepspeed_config``, else the checkpoint's own, else the defaults.

    ``activation.enabled`` is taken as true: who asks for an FP8 forward pass gets one.

    Raises:
        CoatConfigError: the configuration has no block, or a wrong one.
    """
    from launch.find_config import read_config

    block, source = None, 'defaults (the checkpoint has no "coat" block)'
    if deepspeed_config is not None:
        block, source = (
            CoatConfig.from_deepspeed(read_config("--deepspeed_config", deepspeed_config, "deepspeed")),
            deepspeed_config,
        )
        if block is None:
            raise CoatConfigError(f'--deepspeed_config: {deepspeed_config} has no "coat" block, accepted: one with it')
    elif (own := (run.get("deepspeed") or {}).get("coat")) is not None:
        block, source = CoatConfig.parse(own), "the checkpoint's own"
    block = block or CoatConfig()
    if not block.activation.enabled:
        block = CoatConfig.parse({"activation": {**block.activation.model_dump(), "enabled": True}})
        source += ", with activation.enabled true"
    return Coat(block, source)


def build(
    weights: Weights, *, forward: str, coat: Coat | None, tp: int, device: torch.device, note: Callable[[str], None]
) -> Any:
    """A ``GPTModel`` in evaluation mode with the weights in it. Megatron's groups are set up before.

    Args:
        forward: "bf16", "fp8" or "fp32". Weights are rounded to bf16 but for "fp32".
        coat: with "fp8".
        note: prints a line on rank 0.

    Raises:
        CoatConfigError, CheckpointError: names what cannot be built, read or patched.
    """
    model_config: ModelConfig = weights.model
    model_config.check_parallel(tp, False)
    dtype = torch.float32 if forward == "fp32" else torch.bfloat16
    model = build_model(model_config, tp=tp, dtype=dtype)
    fill(model, weights)
    if coat is not None:
        from megatron_patches import patch_model

        try:
            note(str(patch_model(model, coat.config)))
        except CoatConfigError:
            raise
        except ValueError as problem:
            raise CoatConfigError(f"--forward: got fp8, accepted: bf16 or fp32 for this model ({problem})") from None
    return model.to(device).eval()
