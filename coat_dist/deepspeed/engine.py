"""``coat_dist.initialize``, and ``deepspeed.initialize`` after ``import coat_dist``: the ``"coat"`` block applied.

The block is parsed once, checked against DeepSpeed's settings (``refusals.py``), taken out of a copy of the
configuration and turned into arguments of DeepSpeed's public call. On the engine that it returns, some methods are then
replaced: ``attach.py`` lists them. Without a block and without a CoatAdamW, DeepSpeed builds what it would build.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.zero_partitions import base_optimizer
from ..config import CoatConfig, CoatConfigError, load_json, look_up, without_comments
from ..optim import CoatAdamW
from ..ranks import on_rank_0
from .attach import attach
from .batch_sizes import batch_sizes, data_parallel_ranks
from .belongs_together import (
    check_effect,
    check_foreign,
    check_its_parameters,
    check_name,
    check_patched,
    is_patched,
)
from .compare_ranks import compare_ranks
from .expert_parallel import announced_experts, check_expert_parallel
from .json_types import as_read
from .monitors import make_folders
from .near_misses import check_names
from .optimizer_from_json import build_coat_adamw, list_parameters
from .pipeline import check_one_model_a_stage, check_settings, stages
from .pipeline_module import check_tied, tied_apart, tied_weights
from .refusal_facts import Facts
from .refusals import check_deepspeed, read_block
from .replicated_grads import check_replicated_grads
from .roll_call import answer, refusals_are_heard
from .start_line import print_start_line
from .without_launcher import leave_out_compiled_operation

__all__ = ["called_as_deepspeed", "configurations", "initialize"]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
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
    """Build a DeepSpeed engine; same arguments and the same four return values as ``deepspeed.initialize``.

    With ``"optimizer": {"type": "CoatAdamW"}`` and no ``optimizer`` argument, a :class:`CoatAdamW` is built with the
    block's settings. Its parameter groups are those of ``model_parameters`` where that is a list of dicts, of which one
    that does not say ``"moments"`` is split where it holds vectors among others (:func:`coat_dist.optim.split_groups`);
    otherwise :func:`coat_dist.optim.param_groups` of the model (restricted to ``model_parameters`` where given).

    After ``import coat_dist``, ``deepspeed.initialize`` does the same for configurations with a block or a CoatAdamW.
    A model whose layers should run the FP8 flow is patched before this call: this package does not know model classes.
    ``megatron_patches.initialize`` does that, and all else that a Megatron model needs, and then calls this.

    Raises:
        CoatConfigError: anything in the configuration that cannot be honoured, named by its key; ranks that were
            started with different configurations or models; a tensor-parallel model without ``mpu``, or one whose
            replicated gradients nobody sums (``replicated_grads.py``).
    """
    given = {
        **{"args": args, "model": model, "optimizer": optimizer, "model_parameters": model_parameters},
        **{"training_data": training_data, "lr_scheduler": lr_scheduler, "distributed_port": distributed_port},
        **{"mpu": mpu, "dist_init_required": dist_init_required, "collate_fn": collate_fn, "config": config},
        **{"mesh_param": mesh_param, "config_params": config_params, **kwargs},
    }
    return _initialize({name: value for name, value in given.items() if value is not None})


def called_as_deepspeed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """What ``deepspeed.initialize`` does after ``import coat_dist`` (``hook.py``).

    DeepSpeed's own function, called with the very arguments, where nothing in them is ours. Its engine is left as it
    is but for one thing: it refuses to load CoatAdamW's states (``checkpoint/read/other_engines.py``).
    """
    start = original()
    try:
        bound = inspect.signature(start).bind(*args, **kwargs).arguments
    except TypeError:
        return start(*args, **kwargs)  # for DeepSpeed to refuse
    given = {name: value for name, value in bound.items() if value is not None}
    with refusals_are_heard(given):
        ours = _is_ours(given)
    if ours:
        return _initialize(given)
    answer(False, given)
    if not callable(given.get("optimizer")) or isinstance(given["optimizer"], torch.optim.Optimizer):
        engine, *others = start(*args, **kwargs)
        attach(engine, ours=False)
        return engine, *others
    # What it makes is seen only when DeepSpeed calls it.
    check = functools.partial(check_deepspeed, _settings_of(given) or {})
    checked = _checked(given["optimizer"], None, False, False, check, tied_weights(given.get("model")))
    engine, *others = start(**{**given, "optimizer": checked})
    attach(engine, ours=isinstance(base_optimizer(engine.optimizer), CoatAdamW))
    return engine, *others


def original() -> Callable[..., Any]:
    """DeepSpeed's own ``initialize``, which knows nothing of the block (``hook.py`` keeps it)."""
    import deepspeed

    return deepspeed.initialize_without_coat


def configurations(given: Mapping[str, Any]) -> list[Any]:
    """What is given as configuration, a dict or a path, in each of the ways that ``deepspeed.initialize`` knows.

    Args:
        given: its arguments by name.
    """
    args = given.get("args")
    ways = (given.get("config"), given.get("config_params"), *(getattr(args, name, None) for name in _ARGUMENTS))
    return [way for way in ways if way is not None]


_ARGUMENTS = ("deepspeed_config", "deepscale_config")
"""Names of the configuration in ``args``; the second is DeepSpeed's old one."""


def _settings_of(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration, not a copy, if there is one."""
    return next(map(_read, configurations(given)), None)


def _read(source: Any) -> Mapping[str, Any]:
    """Raises CoatConfigError where DeepSpeed could not read it either, and would name no file."""
    return source if isinstance(source, Mapping) else load_json(source)


def _is_ours(given: Mapping[str, Any]) -> bool:
    """Whether something of this project is among the arguments of ``deepspeed.initialize``: a block, CoatAdamW's name,
    a CoatAdamW, a patched model, or the mpu of ``megatron_patches``, beside which gradients need more sums.

    Raises:
        CoatConfigError: something that is nearly a block or CoatAdamW's name; a configuration that cannot be read.
    """
    if isinstance(given.get("optimizer"), CoatAdamW) or getattr(given.get("mpu"), "coat_mpu", False):
        return True
    if isinstance(given.get("model"), torch.nn.Module) and is_patched(given["model"]):
        return True
    for source in configurations(given):
        settings = _read(source)
        if "coat" in settings or look_up(settings, "optimizer.type") == "CoatAdamW":
            return True
        CoatConfig.from_deepspeed(settings)
        check_names(settings)
    return False


def _initialize(given: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """``initialize`` with arguments by name, those that are None left out."""
    with refusals_are_heard(given):
        return _checked_and_built(given)


def _checked_and_built(given: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    import deepspeed

    given = dict(given)
    model, optimizer, mpu = given.get("model"), given.get("optimizer"), given.get("mpu")
    if model is None:
        raise ValueError("model: got None, accepted: a torch.nn.Module")
    sources = configurations(given)
    if len(sources) != 1:
        raise CoatConfigError(
            f"config: got {len(sources)} of `config`, `config_params`, `args.deepspeed_config`, "
            "accepted: exactly one of them"
        )
    settings = without_comments(load_json(sources[0]))  # DeepSpeed would take some for settings
    coat = read_block(settings, optimizer if isinstance(optimizer, CoatAdamW) else None)
    pipeline, tied = isinstance(model, deepspeed.PipelineModule), tied_weights(model)
    tp = _size(mpu, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    cp = _size(mpu, "get_context_parallel_world_size")
    check = functools.partial(
        check_deepspeed, dict(settings), coat=coat, tp=tp, cp=cp, pipeline=pipeline, mpu=mpu is not None
    )
    check(optimizer=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    check_settings(settings, stages(mpu))
    ep = _size(mpu, "get_expert_model_parallel_world_size")
    check_expert_parallel(settings, ep, optimizer, stages(mpu))
    if not pipeline:
        check_replicated_grads(model, mpu, tp)
    compressed = look_up(settings, "optimizer.type") == "CoatAdamW"
    block = coat is not None and "optimizer" in coat.model_fields_set
    if coat is not None:
        del settings["coat"]
        check_patched(model, coat)
    if block and optimizer is None and not compressed and not _only_evaluates(given, settings):
        raise CoatConfigError('optimizer.type: got null beside coat.optimizer, accepted: "CoatAdamW"')
    stage, named = (look_up(settings, key) for key in ("zero_optimization.stage", "optimizer.type"))
    if coat is not None and optimizer is None and named is None and stage in (1, 2):  # DeepSpeed asserts
        raise CoatConfigError(
            f'optimizer.type: got null with zero_optimization.stage {stage}, accepted: "CoatAdamW", or an optimizer '
            "argument"
        )
    if coat is not None and optimizer is None:
        check_name(named)
    if optimizer is None:
        check_effect(coat, named)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_foreign(optimizer, block, compressed)
        check_effect(coat, optimizer)
        _check_made(optimizer, tied)
        if stage:  # ZeRO's own error is a KeyError that prints the parameter
            check_its_parameters(optimizer, model)
    elif callable(optimizer):
        given["optimizer"] = _checked(optimizer, coat, block, compressed, check, tied)
    if (parameters := given.get("model_parameters")) is not None:
        given["model_parameters"] = list_parameters(parameters)
        if compressed:  # here, where stages that hold other weights still hear of it
            groups = [one for one in given["model_parameters"] if isinstance(one, Mapping)]
            check_tied(groups, tied, "model_parameters")
    if coat is not None or compressed or isinstance(optimizer, CoatAdamW):
        compare_ranks(settings, coat, None if pipeline or stages(mpu) > 1 else model, given)
        if (ranks := data_parallel_ranks(given, settings)) is not None:  # DeepSpeed asserts
            batch_sizes(as_read(settings), ranks)
        on_rank_0(lambda: make_folders(settings))
    else:
        answer(False, given)
    check_one_model_a_stage(model, mpu)
    if compressed or isinstance(optimizer, CoatAdamW):
        settings["zero_allow_untested_optimizer"] = True  # DeepSpeed's word for "not one of ours"
        if isinstance(sources[0], dict) and not sys.modules.keys().isdisjoint(("lightning", "pytorch_lightning")):
            sources[0].setdefault("zero_allow_untested_optimizer", True)  # Lightning's trainer.test looks it up there
    evaluates = Facts(as_read(settings), coat, optimizer, tp, cp, pipeline, mpu is not None).only_evaluates
    if evaluates:  # as a reference model: an engine of stage 0 with bf16 would step while it is built
        for key in ("optimizer", "scheduler"):
            settings.pop(key, None)
        for key in ("model_parameters", "lr_scheduler"):
            given.pop(key, None)
    elif compressed and optimizer is None:
        make, ours = build_coat_adamw(settings, coat or CoatConfig(), model, given.get("model_parameters"))
        given["optimizer"], given["model_parameters"] = make, tied_apart(ours, tied)
    given.pop("config_params", None)
    if (args := given.get("args")) is not None:
        given["args"] = _without_configuration(args)
    leave_out_compiled_operation()
    with announced_experts(model, mpu, ep) as built:
        engine, *others = original()(**{**given, "config": settings})
        built.append(engine)
    attach(engine, coat, evaluates=evaluates)
    print_start_line(engine)
    return engine, *others


def _only_evaluates(given: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether this is ZeRO-3 without an optimizer, as the Trainer of transformers evaluates: it takes "optimizer" out
    of the configuration and leaves the block. Nothing can be trained then."""
    nothing = "optimizer" not in settings and "model_parameters" not in given
    return nothing and look_up(settings, "zero_optimization.stage") == 3


def _without_configuration(args: Any) -> Any:
    """The caller's ``args`` stays as it is; DeepSpeed refuses a configuration that is given twice."""
    names = [name for name in _ARGUMENTS if getattr(args, name, None) is not None]
    if names:
        args = copy.copy(args)
        for name in names:
            setattr(args, name, None)
    return args


def _checked(
    make: Callable,
    coat: CoatConfig | None,
    block: bool,
    compressed: bool,
    check: Callable[..., None],
    tied: set[int],
) -> Callable:
    """A callable for DeepSpeed whose optimizer is checked as one that is given, before ZeRO is built around it."""

    @functools.wraps(make, updated=())
    def make_and_check(parameters: Any) -> Any:
        optimizer = make(parameters)
        check_foreign(optimizer, block, compressed)
        check_effect(coat, optimizer)
        check(optimizer=optimizer)
        _check_made(optimizer, tied)
        return optimizer

    return make_and_check


def _check_made(optimizer: Any, tied: set[int]) -> None:
    if isinstance(optimizer, CoatAdamW):
        check_tied(optimizer.param_groups, tied, "optimizer.param_groups")


def _size(mpu: Any, *names: str) -> int:
    return next((int(getattr(mpu, n)()) for n in names if callable(getattr(mpu, n, None))), 1)
