"""``megatron_patches.initialize``: everything that a Megatron model needs under DeepSpeed, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import nn

import coat_dist
from coat_dist.config import ActivationConfig, CoatConfig, CoatConfigError
from coat_dist.deepspeed.engine import configurations
from coat_dist.deepspeed.replicated_grads import SUMMED

from .groups import MPUAdapter
from .patch import patch_model, unpatch_model
from .replicated_grads import install_replicated_grad_hooks
from .report import PatchReport
from .universal import universal_checkpoint_info

__all__ = ["initialize"]


def initialize(
    args: Any = None,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """A DeepSpeed engine around a Megatron-core model; arguments and return values of ``deepspeed.initialize``.

    Call it after :func:`~megatron_patches.initialize_model_parallel`, on the built model. It

    1. patches the layers (:func:`~megatron_patches.patch_model`), if there is a ``"coat"`` block whose
       ``activation.enabled`` is true; a model that is patched already must have been patched with the same settings;
    2. installs the hooks that sum replicated gradients (:func:`~megatron_patches.install_replicated_grad_hooks`),
       unless they are installed;
    3. makes the ``mpu`` (:class:`~megatron_patches.MPUAdapter`), unless one is given;
    4. sets ``model.universal_checkpoint_info``, unless it is set;
    5. calls :func:`coat_dist.initialize`.

    ``engine.coat_patch_report`` is the :class:`~megatron_patches.PatchReport`, or None where nothing is patched. If
    this raises, layers that it has patched are as before; hooks stay, and the next call finds them.

    Args:
        model: a Megatron-core model, one in Megatron's ``Float16Module``, or a module that holds one; or the list with
            one model that Megatron's programs keep. Several model chunks are refused, and so are both
            ``DistributedDataParallel``, Megatron's and torch's, whose work DeepSpeed does.

    Raises:
        CoatConfigError: the model or its settings cannot be used; and whatever :func:`coat_dist.initialize` refuses.
        RuntimeError: Megatron's groups do not exist yet.
    """
    model = _one_model(model)
    if isinstance(mpu, ModuleType):
        raise CoatConfigError(
            f"mpu: got the module {mpu.__name__}, which lacks functions that DeepSpeed calls; accepted: none, "
            "megatron_patches.MPUAdapter(), or another object with them"
        )
    mpu = MPUAdapter() if mpu is None else mpu
    sources = configurations({"args": args, "config": config, "config_params": config_params})
    coat = CoatConfig.from_deepspeed(sources[0]) if len(sources) == 1 else None  # any other number is refused below
    report, patched_here = _patch(model, coat)
    try:
        if not any(hasattr(p, SUMMED) for p in model.parameters()):
            install_replicated_grad_hooks(model)
        if not hasattr(model, "universal_checkpoint_info"):
            model.universal_checkpoint_info = universal_checkpoint_info(model)  # type: ignore[assignment]
        engine, *others = coat_dist.initialize(
            args,
            model,
            optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            distributed_port,
            mpu,
            dist_init_required,
            collate_fn,
            config,
            mesh_param,
            config_params,
            **kwargs,
        )
    except BaseException:
        if patched_here:
            unpatch_model(model)
        raise
    engine.coat_patch_report = report
    return engine, *others


def _one_model(model: Any) -> nn.Module:
    if isinstance(model, Sequence) and len(model) == 1:
        model = model[0]
    if not isinstance(model, nn.Module):
        given = f"a list of {len(model)} model chunks" if isinstance(model, Sequence) else type(model).__name__
        raise CoatConfigError(f"model: got {given}, accepted: one module, as under DeepSpeed there is one stage")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | nn.parallel.DistributedDataParallel):
            raise CoatConfigError(
                f"model: got {type(module).__module__}.{type(module).__name__}, which reduces gradients as DeepSpeed "
                "does too; accepted: the model inside it"
            )
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("model: Megatron's groups do not exist yet; call initialize_model_parallel first")
    return model


def _patch(model: nn.Module, coat: CoatConfig | None) -> tuple[PatchReport | None, bool]:
    """The report of the patched model, if it is patched, and whether it was patched just now."""
    before: PatchReport | None = next(
        (vars(m)["coat_patch_report"] for m in model.modules() if "coat_patch_report" in vars(m)), None
    )
    if coat is None or not coat.activation.enabled:
        return before, False
    if before is None:
        try:
            return patch_model(model, coat), True
        except ValueError as problem:
            raise CoatConfigError(f"coat.activation: {problem}") from problem
    if before.settings != coat.activation:
        raise CoatConfigError(
            f"coat.activation: got a model that is patched already with {_difference(before.settings, coat.activation)}"
            "; accepted: the same settings, or an unpatched model"
        )
    return before, False


def _difference(model: ActivationConfig | None, block: ActivationConfig) -> str:
    if model is None:
        return "unknown settings"
    pairs = [(key, getattr(model, key), value) for key, value in block if getattr(model, key) != value]
    return ", ".join(f"{key} {given!r} where the block says {asked!r}" for key, given, asked in pairs)
