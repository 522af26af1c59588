"""``coat_dist.initialize``: ``deepspeed.initialize`` with the ``"coat"`` block applied.

The block is validated, taken out of a copy of the configuration and turned into arguments of DeepSpeed's public call.
On the engine that it returns, a few methods are then replaced (docs/architecture.md lists them); DeepSpeed's modules
and classes stay as they are. Without a block and without ``"type": "CoatAdamW"`` the call is passed on as it is.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..config import CoatConfig, CoatConfigError, load_json
from ..flow.weights import invalidate_after, invalidate_weights
from ..optim import CoatAdamW, param_groups
from ..ranks import check_same_on_all_ranks
from .attach import attach
from .refusals import check_deepspeed
from .step import fuse_step

__all__ = ["initialize"]

logger = logging.getLogger("coat_dist")


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *,
    mpu: Any = None,
    config: Any = None,
    config_params: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Build a DeepSpeed engine; same arguments and the same four return values as ``deepspeed.initialize``.

    With ``"optimizer": {"type": "CoatAdamW"}`` and no ``optimizer`` argument, a :class:`CoatAdamW` is built with the
    block's settings. Its parameter groups are ``model_parameters`` where that is a list of dicts, and otherwise
    :func:`coat_dist.optim.param_groups` of the model (restricted to ``model_parameters`` where given).

    A model whose layers should run the FP8 flow is patched by the caller, before this call
    (``megatron_patches.patch_model``): this package does not know model classes.

    Raises:
        CoatConfigError: anything in the configuration that cannot be honoured, named by its key; ranks that were
            started with different configurations or models.
    """
    import deepspeed

    if model is None:
        raise ValueError("model: got None, accepted: a torch.nn.Module")
    given = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    if len(given) != 1:
        raise CoatConfigError(
            f"config: got {len(given)} of `config`, `config_params`, `args.deepspeed_config`, "
            "accepted: exactly one of them"
        )
    settings = load_json(given[0])
    coat = CoatConfig.from_deepspeed(settings)
    pipeline = isinstance(model, deepspeed.PipelineModule)
    tp = _size(mpu, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    cp = _size(mpu, "get_context_parallel_world_size")
    check = functools.partial(check_deepspeed, dict(settings), tp=tp, cp=cp, pipeline=pipeline, mpu=mpu is not None)
    check(optimizer=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    if getattr(args, "deepspeed_config", None) is not None:
        args = copy.copy(args)  # the caller's stays as it is; DeepSpeed refuses a configuration given twice
        args.deepspeed_config = None

    chosen = settings.get("optimizer")
    compressed = isinstance(chosen, Mapping) and chosen.get("type") == "CoatAdamW"
    block = coat is not None and "optimizer" in coat.model_fields_set
    if coat is not None:
        del settings["coat"]
        _check_patched(model, coat)
    if block and optimizer is None and not compressed:
        raise CoatConfigError('optimizer.type: got null beside coat.optimizer, accepted: "CoatAdamW"')
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_foreign(optimizer, block)
    elif callable(optimizer):
        optimizer = _checked(optimizer, block, check)
    if coat is not None or compressed:
        if not dist.is_initialized() and kwargs.get("dist_init_required") is not False:
            deepspeed.init_distributed(**{k: kwargs[k] for k in ("distributed_port",) if k in kwargs})
        _take_device(args)
        check_same_on_all_ranks(
            {"config": _digest(settings), "coat": _digest(coat and coat.model_dump())}
            | ({} if pipeline else {"model": _model_digest(model)})
        )
    if compressed or isinstance(optimizer, CoatAdamW):
        settings["zero_allow_untested_optimizer"] = True  # DeepSpeed's word for "not one of ours"
    if compressed and optimizer is None:
        optimizer, model_parameters = _coat_adamw(settings, coat or CoatConfig(), model, model_parameters)
    engine, *others = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        config=settings,
        **kwargs,
    )
    if coat is not None and coat.activation.enabled and coat.activation.weights == "cached":
        invalidate_weights()  # the weights were broadcast, which leaves no trace in them
        invalidate_after(engine, "load_checkpoint", "load_module_state_dict")
        invalidate_after(engine.optimizer, "step", "load_state_dict", "update_lp_params")
    attach(engine)
    if isinstance(getattr(engine, "basic_optimizer", None), CoatAdamW):
        fuse_step(engine.optimizer, engine.basic_optimizer)
    return engine, *others


def _check_foreign(optimizer: torch.optim.Optimizer, block: bool) -> None:
    if block and not isinstance(optimizer, CoatAdamW):
        raise CoatConfigError(
            f"coat.optimizer: got a block beside optimizer={type(optimizer).__name__}, accepted: "
            "no optimizer argument, or a CoatAdamW"
        )


def _checked(make: Callable, block: bool, check: Callable[..., None]) -> Callable:
    """A callable for DeepSpeed whose optimizer is checked as one that is given, before ZeRO is built around it."""

    @functools.wraps(make, updated=())
    def make_and_check(parameters: Any) -> Any:
        optimizer = make(parameters)
        _check_foreign(optimizer, block)
        check(optimizer=optimizer)
        return optimizer

    return make_and_check


def _coat_adamw(settings: dict, coat: CoatConfig, model: torch.nn.Module, parameters: Iterable | None):
    """The optimizer as a callable for DeepSpeed, and the parameter groups it will be called with."""
    params = dict(settings["optimizer"].get("params") or {})
    options = {**coat.optimizer.model_dump(), **params}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])

    def make(groups: list[dict[str, Any]]) -> CoatAdamW:
        return CoatAdamW(_experts_apart(groups), **options)

    listed = list(parameters) if parameters is not None else None
    if listed and isinstance(listed[0], dict):
        return make, listed
    chosen = None if listed is None else {id(p) for p in listed}
    named = [(n, p) for n, p in model.named_parameters() if chosen is None or id(p) in chosen]
    if chosen is not None and len(named) != len(chosen):
        raise ValueError(
            f"model_parameters: {len(chosen) - len(named)} of {len(chosen)} are not parameters of the model"
        )
    groups = param_groups(named, weight_decay=options.get("weight_decay", 0.01))
    return make, groups


def _experts_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters of DeepSpeed's experts (``deepspeed.moe``) in groups of their own: they are sharded over other ranks.

    DeepSpeed makes these groups for the optimizers that it builds from JSON, and not for callables like ours.
    """
    from deepspeed.moe.utils import configure_moe_param_groups, is_moe_param

    def listed(params: Any) -> list[Any]:
        return [params] if isinstance(params, torch.Tensor) else list(params)

    groups = [{**group, "params": listed(group["params"])} for group in groups]
    if not any(is_moe_param(p) for group in groups for p in group["params"]):
        return groups
    named = [{"name": f"group {i}", **group} for i, group in enumerate(groups)]
    return [group for group in configure_moe_param_groups(named) if group["params"]]


def _check_patched(model: torch.nn.Module, coat: CoatConfig) -> None:
    patched = any(getattr(type(m), "coat_patched", False) for m in model.modules())
    if coat.activation.enabled and not patched:
        raise CoatConfigError(
            f"coat.activation.enabled: got true, but no module of {type(model).__name__} is patched; accepted: call "
            "megatron_patches.patch_model(model, CoatConfig.from_deepspeed(config).activation) first, or set it "
            "to false"
        )
    if patched and not coat.activation.enabled:
        raise CoatConfigError(
            "coat.activation.enabled: got false, but the model is patched; accepted: true, or an unpatched model"
        )


def _take_device(args: Any) -> None:
    """Choose the device that DeepSpeed's engine is going to choose, in the same way, before a collective needs one.

    NCCL would otherwise run it on the first GPU for every rank. Without a local rank nothing is chosen: DeepSpeed's
    engine then refuses to start.
    """
    from deepspeed.accelerator import get_accelerator

    local = os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))
    rank = getattr(args, "device_rank", None if local is None else int(local))
    if rank is not None and rank >= 0:
        get_accelerator().set_device(rank)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _model_digest(model: torch.nn.Module) -> str:
    """Names, full shapes (ZeRO-3 keeps them in ``ds_shape``), dtypes and trainability of all parameters."""
    return _digest(
        [
            [n, list(getattr(p, "ds_shape", p.shape)), str(p.dtype), p.requires_grad, type(m).__name__]
            for n, m in model.named_modules()
            for p in m.parameters(recurse=False)
        ]
    )


def _size(mpu: Any, *names: str) -> int:
    return next((int(getattr(mpu, n)()) for n in names if callable(getattr(mpu, n, None))), 1)
