"""``coat_dist.initialize``, and ``deepspeed.initialize`` after ``import coat_dist``: the ``"coat"``
block applied.

Three steps: ``validate`` checks the call on this rank, ``agree`` raises on every rank what any has
found (``request.py``), and :func:`build` makes DeepSpeed's public call with a copy of the
configuration without the block. ``attach.py`` lists the methods that are then replaced on the
engine.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.zero_partitions import base_optimizer
from ..extras import need
from ..patching.report import PatchReport, reports_of
from ..ranks import say_on_rank_0
from ..settings import Settings
from .attach import attach
from .parallel.experts import announced_experts
from .request import Request, agree, validate


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
    """Build a DeepSpeed engine; same arguments and the same four return values as
    ``deepspeed.initialize``.

    With ``"optimizer": {"type": "CoatAdamW"}`` and no ``optimizer`` argument, a :class:`CoatAdamW`
    is built with the block's settings. Its parameter groups are those of ``model_parameters`` where
    that is a list of dicts (:func:`coat_dist.optim.split_groups`); otherwise
    :func:`coat_dist.optim.param_groups` of the model, restricted to ``model_parameters`` where
    given. A transformers model is patched where the block asks for the flow
    (:func:`coat_dist.patch_model`); ``megatron_patches.initialize`` patches a Megatron model, does
    all else that such a model needs, and then calls this.

    Raises:
        CoatConfigError: anything in the configuration that cannot be honoured, named by its key;
            ranks that were started with different configurations or models; a tensor-parallel model
            without ``mpu``, or one whose replicated gradients nobody sums
            (``replicated_grads.py``).
    """
    given = {name: value for name, value in locals().items() if name != "kwargs"}
    need("deepspeed", "deepspeed", "coat_dist.initialize")
    return _run({**given, **kwargs}, explicit=True)


def called_as_deepspeed(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any, Any]:
    """What ``deepspeed.initialize`` does after ``import coat_dist`` (``hook.py``).

    DeepSpeed's own function, called with the very arguments, where nothing in them is ours.
    """
    return _run(inspect.signature(original()).bind(*args, **kwargs).arguments, explicit=False)


def _run(given: Mapping[str, Any], explicit: bool) -> tuple[Any, Any, Any, Any]:
    request = validate(
        {name: value for name, value in given.items() if value is not None}, explicit
    )
    agree(request)
    return build(request)


def original() -> Callable[..., Any]:
    """DeepSpeed's own ``initialize`` (``hook.py`` keeps it)."""
    import deepspeed

    return deepspeed.initialize_without_coat


def build(request: Request) -> tuple[Any, Any, Any, Any]:
    """Make DeepSpeed's own call, and attach to its engine what belongs there."""
    given, settings = {**request.given}, request.settings
    optimizer = given.get("optimizer")
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        given["optimizer"] = request.checked(optimizer)
    if request.passed_on:
        for way in ("config", "config_params"):
            if isinstance(source := given.get(way), Settings):
                given[way] = source.for_deepspeed()
        engine, *others = original()(**given)
        if base_optimizer(engine.optimizer) is not None:  # a callable has made a CoatAdamW
            attach(engine)
        return engine, *others
    if not request.to_patch:
        return _call_deepspeed(request, given)
    from ..hf import patch_model, unpatch_model

    report = patch_model(given["model"], settings)
    try:
        return _call_deepspeed(request, given)
    except BaseException:
        if report.patched:
            unpatch_model(given["model"])  # the next call may have no block
        raise


def _call_deepspeed(request: Request, given: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    facts, settings = request.facts, request.settings
    if facts.only_evaluates:
        given.pop("model_parameters", None)
        given.pop("lr_scheduler", None)
    elif request.make is not None:
        given["optimizer"], given["model_parameters"] = request.make, request.groups
    # DeepSpeed refuses a configuration that is given twice.
    given.pop("config_params", None)
    if hasattr(args := given.get("args"), "deepspeed_config"):
        given["args"] = copy.copy(args)  # the caller's stays as it is
        given["args"].deepspeed_config = None
    given["config"] = settings.for_deepspeed(facts)
    with announced_experts(given["model"], given.get("mpu"), facts.ep):
        engine, *others = original()(**given)
    if facts.divided:
        # DeepSpeed would save and load experts by names of its own layers.
        engine.has_moe_layers, engine.num_experts = False, []
    if facts.hosted:
        engine.config = settings.for_deepspeed()  # other libraries read it, and expect "cpu"
        for group in getattr(base_optimizer(engine.optimizer), "param_groups", ()):
            group["state_device"] = "cpu"
    attach(engine, facts.coat, evaluates=facts.only_evaluates)
    say_on_rank_0(f"coat_dist: {_describe(engine)}")
    return engine, *others


def _describe(engine: Any) -> str:
    """What a new engine runs."""
    optimizer = base_optimizer(engine.optimizer) or getattr(engine, "basic_optimizer", None)
    reports = reports_of(engine.module)
    flow = PatchReport.summary(reports) if reports else "no layers in the FP8 flow"
    away = any(
        group.get("state_device") == "cpu" for group in getattr(optimizer, "param_groups", ())
    )
    name = "no optimizer, this engine evaluates" if optimizer is None else type(optimizer).__name__
    return f"{name}{', states in host memory' * away}; {flow}"
