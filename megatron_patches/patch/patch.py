"""Patch a built Megatron model in place: its layers keep their parameters and names, and run the
FP8 precision flow.

Each layer has two blocks that are patched independently, attention (input_layernorm, linear_qkv,
linear_proj) and MLP (pre_mlp_layernorm, linear_fc1, activation, linear_fc2); in a mixture of
experts, the experts and the shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from coat_dist.config import ActivationConfig
from coat_dist.patching import changes
from coat_dist.patching.report import PatchReport
from coat_dist.patching.settings import Config, coat_block

from ..compat import check_version
from .plan import check_model, make_plan, mark_zeroed


def patch_model(
    model: nn.Module | Sequence[nn.Module], config: Config | ActivationConfig
) -> PatchReport:
    """Let the transformer layers of ``model`` run the FP8 precision flow. Nothing changes unless
    this returns.

    Under pipeline parallelism every rank calls this for its own stage. A stage in which nothing can
    be patched, because it has no layers or all of them are ``bf16_layers``, is no error: other
    stages go on. Settings of the whole model that rule out patching are one, on every rank.

    Args:
        model: a built ``GPTModel``, or a module that holds Megatron transformer blocks; before
            ``deepspeed.initialize``. Or the list of a rank's model chunks (interleaved pipeline
            stages); names in the report then begin with the chunk's index.
        config: what ``deepspeed.initialize`` takes (path of a JSON file, dict, base64 of JSON),
            with a ``"coat"`` block; or that block as ``CoatConfig``, or its ``"activation"`` as
            ``ActivationConfig``.

    Returns:
        What was patched, which is also ``model.coat_patch_report`` (of a list, that of each chunk).

    Raises:
        CoatConfigError: ``config`` has no block, or a wrong one.
        ValueError: the model is patched already, holds no transformer block, or nothing in it can
            be patched (lists why); ``bf16_layers`` out of range; ``tp_invariant`` with blocks that
            would not be; ``attention: "fp8"`` with attention that cannot; ``z_loss`` with a loss
            that stays plain.
        ImportError: unsupported megatron-core.
    """
    check_version()
    settings = config if isinstance(config, ActivationConfig) else coat_block(config).activation
    model = _one_module(model)
    check_model(model, settings)
    plan = make_plan(model, settings)
    plan.apply(*(model if type(model) is nn.ModuleList else [model]))
    if any(entry.settings.wgrad == "main_grad" for entry in plan.patched):
        mark_zeroed()
    return plan.report


def unpatch_model(model: nn.Module | Sequence[nn.Module]) -> None:
    """Undo :func:`patch_model` on the model that it was given: every class is what it was, and
    outputs to the bit.

    Modules may have been wrapped by ``fully_shard``, or parametrized, since.

    Raises:
        ValueError: the model is not patched.
    """
    changes.unpatch_model(_one_module(model))


@contextmanager
def patched(
    model: nn.Module | Sequence[nn.Module], config: Config | ActivationConfig
) -> Iterator[PatchReport]:
    """``model`` runs the flow inside the ``with``, and is as it was after it. Arguments as for
    :func:`patch_model`.
    """
    report = patch_model(model, config)
    try:
        yield report
    finally:
        unpatch_model(model)


def _one_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)
