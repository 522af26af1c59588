"""The ``"coat"`` block in every form in which a program may have it, and which of its keys are
honoured where.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from ..config import ActivationConfig, CoatConfig, CoatConfigError
from ..config_errors import Problem, got
from ..settings import Settings

Config: TypeAlias = str | os.PathLike | Mapping[str, Any] | Settings | CoatConfig
"""What DeepSpeed takes (path of a JSON file, dict, base64 of JSON), with a ``"coat"`` block; the
same, read; or the parsed block.
"""


Rows: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Keys of ``"activation"``: the values that are accepted, and why no others are."""

_WHOLE = "transformers models have all experts on every rank"
REFUSED: Mapping[str, Rows] = {
    "transformers": {
        "enabled": ((True, "auto"), "for a model that is to be patched"),
        "expert_dispatch": (("auto", "bf16"), _WHOLE),
        "expert_dispatch_grad": (("bf16",), _WHOLE),
        "tp_invariant": ((False,), "transformers models are not tensor-parallel"),
        "wgrad": (("grad",), "only Megatron's parameters have a main_grad"),
        "cuda_graphs": ((False,), "only Megatron layers run as CUDA graphs"),
    },
    "Megatron": {
        "enabled": ((True,), "a Megatron model without patched layers is an error"),
        "frozen_weights": (("bf16",), "only in transformers models"),
        "evaluation": (("plain",), "patched Megatron layers always run the flow in eval mode"),
        "compile": ((False,), "only layers of transformers models are compiled"),
        "recompute": ((None,), "Megatron has recompute_num_layers"),
    },
    "Megatron's optimizer": {
        "fp8_weight_gather": ((False,), "weights are gathered under DeepSpeed's ZeRO-3 alone")
    },
}
"""What each way to train cannot honour; docs/config.md has the table. DeepSpeed's ZeRO stages have
rows of their own in ``coat_dist/settings.py``, Megatron models in
``megatron_patches/patch/plan.py``.
"""


def check_honoured(rows: Rows, settings: ActivationConfig) -> None:
    """Raises CoatConfigError with a line for each key whose value these rows do not accept."""
    problems = []
    for key, (accepted, why) in rows.items():
        if (value := getattr(settings, key)) not in accepted:
            shown = " or ".join(map(json.dumps, accepted))
            problems.append(Problem(f"coat.activation.{key}", got(value), f"{shown} ({why})"))
    if settings.boundaries_device == "cpu" and not torch.cuda.is_available():
        key = "coat.activation.boundaries_device"
        problems.append(Problem(key, 'got "cpu"', '"layer" (pinned memory needs a GPU)'))
    if problems:
        raise CoatConfigError(*problems)


def coat_block(config: Config, name: str = "config") -> CoatConfig:
    """The parsed block of ``config``.

    The content of a block alone, ``{"optimizer": ..., "activation": ...}``, is refused:
    ``"optimizer"`` means something else at the top of a DeepSpeed configuration.

    Raises:
        CoatConfigError: nothing there, no block in it, or a wrong one.
    """
    return config if isinstance(config, CoatConfig) else Settings.read(config).block(name)


def bf16_layers(settings: ActivationConfig, layers: int) -> set[int]:
    """Indices from 0 of the layers that stay BF16, out of ``layers`` (over all pipeline stages)."""
    return {i % layers for i in settings.bf16_layers if -layers <= i < layers}


def check_bf16_layers(settings: ActivationConfig, layers: int) -> None:
    """Raises CoatConfigError for an index that is out of range, or names a layer again;
    ``layers``: of the highest stack in the model."""
    wrong = [i for i in settings.bf16_layers if not -layers <= i < layers]
    if wrong and layers:
        accepted = f"0 to {layers - 1}, or {-layers} to -1 from the last, for {layers} layers"
        raise CoatConfigError(f"activation.bf16_layers: got {wrong[0]}, accepted: {accepted}")
    if layers and len(bf16_layers(settings, layers)) < len(settings.bf16_layers):
        given, accepted = list(settings.bf16_layers), f"each of {layers} layers once"
        raise CoatConfigError(f"activation.bf16_layers: got {given}, accepted: {accepted}")
