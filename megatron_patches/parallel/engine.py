"""``megatron_patches.initialize``: everything that a Megatron model needs under DeepSpeed, in
one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import nn

import coat_dist
from coat_dist.config import CoatConfig, CoatConfigError
from coat_dist.deepspeed.parallel.replicated_grads import SUMMED
from coat_dist.deepspeed.request import given_configurations
from coat_dist.patching.report import PatchReport, check_settings, is_patched, reports_of
from coat_dist.ranks import gather
from coat_dist.settings import Settings

from ..groups import MPUAdapter
from ..patch.blocks import language_models
from ..patch.patch import patch_model, unpatch_model
from .pipeline import chunks_of, mark_stage
from .replicated_grads import install_replicated_grad_hooks
from .universal import universal_checkpoint_info


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
    """A DeepSpeed engine around a Megatron-core model; arguments and return values of
    ``deepspeed.initialize``.

    Call it after :func:`~megatron_patches.initialize_model_parallel`, on the built model. It

    1. patches the layers (:func:`~megatron_patches.patch_model`), if there is a ``"coat"`` block
       whose ``activation.enabled`` is true; what is patched already must have the same settings;
    2. installs the hooks that sum replicated gradients
       (:func:`~megatron_patches.install_replicated_grad_hooks`);
    3. makes the ``mpu`` (:class:`~megatron_patches.MPUAdapter`);
    4. sets ``model.universal_checkpoint_info``;
    5. calls :func:`coat_dist.initialize`.

    What is there already (hooks, mpu, info) stays. ``engine.coat_patch_report`` is the
    :class:`~megatron_patches.PatchReport`, or None where nothing is patched. If this raises, layers
    that it has patched are as before; hooks stay, and the next call finds them.

    Args:
        model: a Megatron-core model, one in Megatron's ``Float16Module``, or a module that holds
            one; or the list with one model that Megatron's programs keep, or with this rank's
            interleaved pipeline stages; the engine's ``module`` is then a ``ModuleList``.
            Megatron's and torch's ``DistributedDataParallel`` are refused: DeepSpeed does their
            work.

    Raises:
        CoatConfigError: the model or its settings cannot be used; and whatever
            :func:`coat_dist.initialize` refuses.
    """
    model = _one_module(model)
    _check_stage(model)
    mark_stage(model)
    mpu = MPUAdapter() if mpu is None else mpu
    given = {"args": args, "config": config, "config_params": config_params}
    sources = given_configurations(given)
    if len(sources) == 1:  # any other number is refused below
        config = Settings.read(sources[0])
    coat = config.coat if isinstance(config, Settings) else None
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


def _one_module(model: Any) -> nn.Module:
    if isinstance(model, Sequence) and not isinstance(model, nn.Module):
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        if len(model) != chunks:
            raise CoatConfigError(
                f"model: got a list of {len(model)} model chunks, accepted: {chunks} on this rank"
            )
        model = model[0] if chunks == 1 else nn.ModuleList(model)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | nn.parallel.DistributedDataParallel):
            raise CoatConfigError(
                f"model: got {type(module).__module__}.{type(module).__name__}, which reduces "
                "gradients as DeepSpeed "
                "does too; accepted: the model inside it"
            )
    return model


def _check_stage(model: nn.Module) -> None:
    """Raises CoatConfigError, on every rank, where a model was not built for the pipeline whose
    groups are set up.

    Its stages would train on their own.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    sizes = {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual,
    }
    stage, chunks, problems = (
        parallel_state.get_pipeline_model_parallel_rank(),
        chunks_of(model),
        [],
    )
    for i, chunk in enumerate(chunks):
        where = f"stage {stage}" + (f", chunk {i}" if len(chunks) > 1 else "")
        ends = {
            "pre_process": stage == 0 and i == 0,
            "post_process": stage == stages - 1 and i == len(chunks) - 1,
        }
        for _, one in language_models(chunk):
            problems += [
                f"config.{key}: got {given}, accepted: {wanted}"
                for key, wanted in sizes.items()
                if ((given := getattr(one.config, key)) or 1) != (wanted or 1)
            ]
            problems += [
                f"model on pipeline {where}: got {key}={getattr(one, key)}, accepted: {wanted}"
                for key, wanted in ends.items()
                if stages > 1 and getattr(one, key, wanted) != wanted
            ]
    found = [line for lines in gather(problems) for line in lines] if stages > 1 else problems
    if found:
        raise CoatConfigError("\n".join(dict.fromkeys(found)))


def _patch(model: nn.Module, coat: CoatConfig | None) -> tuple[PatchReport | None, bool]:
    """The report of the patched model, if it is patched, and whether it was patched just now."""
    before = next(iter(reports_of(model)), None)
    if coat is None or not coat.activation.enabled:
        return before, False
    if all(is_patched(chunk) for chunk in chunks_of(model)):
        check_settings(model, coat.activation)
        return before, False
    try:
        return patch_model(model, coat), True
    except ValueError as problem:
        text = str(problem)
        if not text.startswith("coat."):
            text = f"coat.{text}" if text.startswith("activation.") else f"coat.activation: {text}"
        raise CoatConfigError(text) from problem
