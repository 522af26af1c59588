"""Transformer Engine's layers, on one GPU or over tensor-parallel ranks, to measure beside ours.
Needs its packages; nothing else here does.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import check_peers
from launch.model.gpt import ModelConfig

RECIPES = {"TE bf16": None, "TE fp8 delayed": "DelayedScaling"}
"""What is measured, and its recipe's class in ``transformer_engine.common.recipe``."""


def check(preset: str, model: ModelConfig) -> None:
    """Check that :func:`stack` builds these layers.

    Raises:
        ValueError: the preset is another layer.
    """
    wanted = {
        "normalization": (model.normalization, "rmsnorm"),
        "norm_affine": (model.norm_affine, True),
        "activation": (model.activation, "swiglu"),
        "linear_bias": (model.linear_bias, False),
        "qkv_bias": (model.qkv_bias, False),
        "attention_output_bias": (model.attention_output_bias, False),
        "norm_placement": (model.norm_placement, "pre"),
        "qk_norm": (model.qk_norm, False),
        "num_moe_experts": (model.num_moe_experts, None),
    }
    wrong = [
        f"{key} {given!r}, accepted: {accepted!r}"
        for key, (given, accepted) in wanted.items()
        if given != accepted
    ]
    if wrong:
        raise ValueError(f"--peers: got the preset {preset!r} with {'; '.join(wrong)}")


def unpack(folder: str, target: str) -> Path:
    """The folder with the package: ``folder`` itself, or ``target``, to which the archive in it is
    unpacked.

    Raises:
        ValueError: ``folder`` has neither the package nor one archive of it.
    """
    archive_in = check_peers(folder)
    if archive_in is None:
        return Path(folder).resolve()
    with tarfile.open(archive_in) as archive:
        archive.extractall(target, filter="data")
    return Path(target).resolve()


@functools.cache
def load(folder: Path) -> Any:
    """Transformer Engine's torch module, of ``folder`` and what is in its subfolder ``deps``."""
    sys.path.insert(0, str(folder))
    sys.path.append(str(folder / "deps"))  # behind packages that are loaded already
    return importlib.import_module("transformer_engine.pytorch")


def stack(
    te: Any, model: ModelConfig, tokens: int, recipe: str | None, sequence: int
) -> tuple[Callable[[], torch.Tensor], torch.nn.Module, torch.Tensor]:
    """:func:`benchmarks.speed.layer.stack` of Transformer Engine's layers over all ranks, in a
    recipe or BF16.
    """
    ranks, bf16 = dist.get_world_size(), torch.bfloat16
    layers = torch.nn.ModuleList(
        te.TransformerLayer(
            model.hidden_size,
            model.ffn_hidden_size,
            model.num_attention_heads,
            num_gqa_groups=model.kv_heads,
            kv_channels=model.head_channels,
            layernorm_epsilon=model.norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            attn_input_format="sbhd",
            fuse_qkv_params=True,
            params_dtype=bf16,
            set_parallel_mode=True,
            sequence_parallel=ranks > 1,
            tp_group=dist.group.WORLD,
            tp_size=ranks,
            layer_number=number + 1,
        )
        for number in range(model.num_layers)
    )
    shape, device = (
        (sequence // ranks, tokens // sequence, model.hidden_size),
        next(layers.parameters()).device,
    )
    x = torch.randn(shape, device=device, dtype=bf16, requires_grad=True)
    frequencies = model.rotary_base ** -(
        torch.arange(0, model.head_channels, 2, device=device) / model.head_channels
    )
    angles = torch.arange(sequence, device=device)[:, None] * frequencies
    rope = torch.cat([angles, angles], -1)[:, None, None]
    recipes = importlib.import_module("transformer_engine.common.recipe")
    scaling = None if recipe is None else getattr(recipes, recipe)()

    def forward() -> torch.Tensor:
        y = x
        # One context for all layers, as Megatron has it for this recipe.
        with te.autocast(
            enabled=scaling is not None, recipe=scaling, amax_reduction_group=dist.group.WORLD
        ):
            for layer in layers:
                y = layer(y, rotary_pos_emb=rope)
        return y

    return forward, layers, x
