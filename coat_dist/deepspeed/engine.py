"""``coat_dist.initialize``: ``deepspeed.initialize`` with the ``"coat"`` block applied.

The block is parsed once, checked against DeepSpeed's settings (``refusals.py``), taken out of a copy of the
configuration and turned into arguments of DeepSpeed's public call. On the engine that it returns, some methods are then
replaced: ``attach.py`` lists them. Without a block and without ``"type": "CoatAdamW"`` the call is passed on as it is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..config import CoatConfig, CoatConfigError, load_json, look_up
from ..optim import CoatAdamW
from .attach import attach
from .compare_ranks import compare_ranks
from .optimizer_from_json import build_coat_adamw
from .refusals import check_deepspeed
from .replicated_grads import check_replicated_grads

__all__ = ["initialize"]


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

    A model whose layers should run the FP8 flow is patched before this call: this package does not know model classes.
    ``megatron_patches.initialize`` does that, and all else that a Megatron model needs, and then calls this.

    Raises:
        CoatConfigError: anything in the configuration that cannot be honoured, named by its key; ranks that were
            started with different configurations or models; a tensor-parallel model without ``mpu``, or one whose
            replicated gradients nobody sums (``replicated_grads.py``).
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
    check = functools.partial(
        check_deepspeed, dict(settings), coat=coat, tp=tp, cp=cp, pipeline=pipeline, mpu=mpu is not None
    )
    check(optimizer=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    if not pipeline:
        check_replicated_grads(model, mpu, tp)
    if getattr(args, "deepspeed_config", None) is not None:
        args = copy.copy(args)  # the caller's stays as it is; DeepSpeed refuses a configuration given twice
        args.deepspeed_config = None

    compressed = look_up(settings, "optimizer.type") == "CoatAdamW"
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
        compare_ranks(settings, coat, None if pipeline else model, args, kwargs)
    if compressed or isinstance(optimizer, CoatAdamW):
        settings["zero_allow_untested_optimizer"] = True  # DeepSpeed's word for "not one of ours"
    if compressed and optimizer is None:
        optimizer, model_parameters = build_coat_adamw(settings, coat or CoatConfig(), model, model_parameters)
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
    attach(engine, coat)
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


def _check_patched(model: torch.nn.Module, coat: CoatConfig) -> None:
    patched = any(getattr(type(m), "coat_patched", False) for m in model.modules())
    if coat.activation.enabled and not patched:
        raise CoatConfigError(
            f"coat.activation.enabled: got true, but no module of {type(model).__name__} is patched; accepted: call "
            "megatron_patches.patch_model(model, config) first, or megatron_patches.initialize instead of this, or set "
            "it to false"
        )
    if patched and not coat.activation.enabled:
        raise CoatConfigError(
            "coat.activation.enabled: got false, but the model is patched; accepted: true, or an unpatched model"
        )


def _size(mpu: Any, *names: str) -> int:
    return next((int(getattr(mpu, n)()) for n in names if callable(getattr(mpu, n, None))), 1)
