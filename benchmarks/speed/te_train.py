"""Pretraining with Transformer Engine's layers: `launch/pretrain.py` with Megatron's own
specification of a model.

    deepspeed benchmarks/speed/te_train.py \\
        --fp8-recipe {none,delayed,tensorwise} OPTIONS OF launch/pretrain.py

``train.py`` starts it as a peer. Data, loss, optimizer, DeepSpeed's engine and what is logged are
those of the same program without a "coat" block; the layers and Megatron's fusions for them are
what Transformer Engine's users run. Its layers draw their weights by Megatron's functions from
Megatron's generator, in the order of Megatron's own layers: initial weights are those of the same
seed without Transformer Engine, and losses of both can be compared. Its packages have to be
importable; :func:`peer_environment` is to be set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, python_path  # noqa: E402
from launch.train.allocator import expandable_segments  # noqa: E402

if __name__ == "__main__":
    expandable_segments()  # as pretrain.py does

from launch.model import gpt  # noqa: E402
from launch.model.model_config import ModelConfig  # noqa: E402


def peer_environment(te: Path | None, tp: int = 1) -> dict[str, str]:
    """Variables with which a program finds Transformer Engine in a folder, unless it can be
    imported anyway, and what it needs without NVLink multicast, and Megatron's tensor-parallel
    ranks with it.
    """
    found = {"UB_SKIPMC": "1"}
    if te is not None:
        found["PYTHONPATH"] = python_path(ROOT, te, te / "deps")
    if tp > 1:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return found


RECIPES = {"TE bf16": "none", "TE fp8 delayed": "delayed", "TE fp8 tensorwise": "tensorwise"}
"""What ``train.py`` calls a run, and Megatron's ``fp8_recipe``."""


def spec(model: ModelConfig, config: Any, vp_stage: int | None = None) -> Any:
    """Replace ``launch.model.gpt.layer_spec``.

    Raises:
        ValueError: a model that Megatron's specification with Transformer Engine does not build.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    other = {
        "norm_placement": (model.norm_placement, "pre"),
        "norm_affine": (model.norm_affine, True),
        "qk_norm": (model.qk_norm, False),
        "num_moe_experts": (model.num_moe_experts, None),
    }
    for key, (given, accepted) in other.items():
        if given != accepted:
            raise ValueError(
                f"{key}: got {given!r}, accepted with Transformer Engine's layers: {accepted!r}"
            )
    return get_gpt_layer_with_transformer_engine_spec()


@contextmanager
def te_layers(recipe: str) -> Iterator[None]:
    """Models that are built inside have Transformer Engine's layers and Megatron's fusions for
    them, in FP8 by a recipe, or in BF16 by "none".

    Megatron's schedules tell layers that keep FP8 weights when a step begins. No schedule runs
    here: layers would compute with the initial weights forever. So they quantize in every
    micro-batch, which is once a step where a step has one. With more they would be slower than in
    Megatron, and ``train.py`` refuses that.
    """
    fused = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "apply_rope_fusion": True}
    fp8: dict[str, Any] = {}
    if recipe != "none":
        fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "disable_parameter_transpose_cache": True}
    built = gpt.transformer_config

    def config(model: ModelConfig, **given: Any) -> Any:
        return built(model, **{**given, **fused, **fp8})

    with (
        mock.patch.object(gpt, "transformer_config", config),
        mock.patch.object(gpt, "layer_spec", spec),
    ):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """``launch.pretrain.main`` with other layers; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False, add_help=False
    )
    parser.add_argument("--fp8-recipe", choices=[*RECIPES.values()], required=True)
    own, rest = parser.parse_known_args(argv)
    from launch import pretrain

    with te_layers(own.fp8_recipe):
        return pretrain.main(rest)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status:
        os._exit(status)
