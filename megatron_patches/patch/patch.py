"""Patch a built Megatron model in place: its layers keep their parameters and names, and run the FP8 precision flow.

Patching sets ``__class__`` of built modules to a subclass with another ``forward`` and gives it one attribute,
``coat``. Undoing it sets the class back. Each layer has two blocks that are patched independently, attention
(input_layernorm, linear_qkv, linear_proj) and MLP (pre_mlp_layernorm, linear_fc1, activation, linear_fc2); of a mixture
of experts, the experts and the shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from coat_dist.config import ActivationConfig

from ..compat import check_version
from .apply import apply_plan, restore
from .blocks import pipelined
from .check import check_model, check_plan
from .plan import make_plan
from .report import PatchReport
from .settings import Config, activation_settings
from .swap import original_classes

__all__ = ["PatchReport", "patch_model", "patched", "unpatch_model"]


def patch_model(model: nn.Module | Sequence[nn.Module], config: Config | ActivationConfig) -> PatchReport:
    """Let the transformer layers of ``model`` run the FP8 precision flow. Nothing changes unless this returns.

    Under pipeline parallelism every rank calls this for its own stage. A stage in which nothing can be patched, because
    it has no layers or all of them are ``bf16_layers``, is no error: other stages go on. Settings of the whole model
    that rule out patching are one, on every rank.

    Args:
        model: a built ``GPTModel``, or a module that holds Megatron transformer blocks; before
            ``deepspeed.initialize``. Or the list of a rank's model chunks (interleaved pipeline stages); names in the
            report then begin with the chunk's index.
        config: what ``deepspeed.initialize`` takes (path of a JSON file, dict, base64 of JSON), with a ``"coat"``
            block; or that block as ``CoatConfig``, or its ``"activation"`` as ``ActivationConfig``.

    Returns:
        What was patched, which is also ``model.coat_patch_report`` (of a list, that of each chunk).

    Raises:
        CoatConfigError: ``config`` has no block, or a wrong one.
        ValueError: the model is patched already, holds no transformer block, or nothing in it can be patched (lists
            why); ``bf16_layers`` out of range; ``tp_invariant`` with blocks that would not be; ``attention: "fp8"``
            with attention that cannot; ``z_loss`` with a loss that stays plain.
        ImportError: unsupported megatron-core.
    """
    check_version()
    settings = activation_settings(config)
    model = _one_module(model)
    check_model(model, settings)
    plan = make_plan(model, settings)
    check_plan(plan, model, settings)
    apply_plan(plan, model, settings)
    _name_modules(model, plan.report)
    return plan.report


def unpatch_model(model: nn.Module | Sequence[nn.Module]) -> None:
    """Undo :func:`patch_model`: every class is what it was, and so are outputs, to the bit.

    Modules may have been wrapped by ``fully_shard``, or parametrized, since. Nothing changes unless this returns.

    Raises:
        ValueError: the model is not patched (no error in a pipeline stage, where there may have been nothing to patch),
            or a class was derived from a patched one; names the module.
    """
    model = _one_module(model)
    found = original_classes(model)
    if not found and not pipelined(model):
        raise ValueError("model: not patched")
    restore(model, found)


@contextmanager
def patched(model: nn.Module | Sequence[nn.Module], config: Config | ActivationConfig) -> Iterator[PatchReport]:
    """``model`` runs the flow inside the ``with``, and is as it was after it. Arguments as for :func:`patch_model`."""
    report = patch_model(model, config)
    try:
        yield report
    finally:
        unpatch_model(model)


def _name_modules(model: nn.Module, report: PatchReport) -> None:
    """Name in the report of ``model``, or of each of its chunks, what is patched there. Earlier reports go."""
    for module in model.modules():
        if vars(module).pop("coat_patch_report", None) is report:
            own = report if module is model else replace(report)
            own.modules = [n for n, m in module.named_modules() if getattr(type(m), "coat_patched", False)]
            module.coat_patch_report = own  # type: ignore[assignment]


def _one_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Sequence) or not model or not all(isinstance(chunk, nn.Module) for chunk in model):
        raise ValueError(f"model: got {type(model).__name__}, accepted: a module, or a list of model chunks")
    return nn.ModuleList(model)
