"""Validation of a call of ``deepspeed.initialize``: configuration, model and optimizer together,
on this rank alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...config import CoatConfig, CoatConfigError, Problem, load_json, look_up, without_comments
from ...config_errors import got
from ...optim import CoatAdamW
from ...patching.report import check_settings
from ..build.pipeline import stages
from ..build.pipeline_module import check_tied, tied_apart, tied_weights
from ..build.replicated_grads import check_replicated_grads
from ..optimizer_from_json import build_coat_adamw, list_parameters, wrong_params
from .keys import misspelt, unknown
from .table import EXPERTS, OFFLOAD, RULES, STAGES, TYPES, Facts, as_read, refused, with_remainders

__all__ = [
    "Request",
    "check_deepspeed",
    "check_parallel",
    "configurations",
    "read_block",
    "validate",
]


@dataclass
class Request:
    """What a call asks for."""

    given: dict[str, Any]  # the arguments by name; those that are None are left out
    passed_on: bool = False  # nothing in it is ours: it is DeepSpeed's call as it is
    source: Any = None  # the configuration as the caller gave it
    # DeepSpeed's, without comments and the block.
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Facts = Facts({})
    # Weights that several stages of a PipelineModule hold.
    tied: set[int] = field(default_factory=set)
    make: Callable | None = None  # makes the CoatAdamW that the configuration names, of `groups`
    groups: list[dict[str, Any]] = field(default_factory=list)
    to_patch: bool = False  # the block asks for the flow in a transformers model that has none yet
    error: Exception | None = None  # why it is refused

    @property
    def coat(self) -> CoatConfig | None:
        """The block."""
        return self.facts.coat

    @property
    def ours(self) -> bool:
        """Whether it has a block or a CoatAdamW."""
        return self.coat is not None or self.facts.compressed

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer, given or made by a callable, that is not what the configuration
        asks for.
        """
        facts, name = self.facts, type(optimizer).__name__
        if isinstance(optimizer, CoatAdamW):
            check_tied(optimizer.param_groups, self.tied, "optimizer.param_groups")
        elif facts.block or facts["optimizer.type"] == "CoatAdamW":
            key, what = (
                ("coat.optimizer", "a block") if facts.block else ("optimizer.type", '"CoatAdamW"')
            )
            accepted = "no optimizer argument, or a CoatAdamW"
            if name == "DeepSpeedCPUAdam":  # Accelerate puts it in the place of an object
                accepted += f' with "zero_force_ds_cpu_optimizer": false beside {OFFLOAD}'
            raise CoatConfigError(Problem(key, f"got {what} beside optimizer={name}", accepted))
        else:
            _check_effect(self.coat, name)

    def checked(self, make: Callable) -> Callable:
        """A callable for DeepSpeed whose optimizer is checked before ZeRO is built around it."""

        @functools.wraps(make, updated=())
        def make_and_check(parameters: Any) -> Any:
            optimizer = make(parameters)
            self.check_optimizer(optimizer)
            on_cpu = look_up(self.settings, f"{OFFLOAD}.device") == "cpu" and not self.facts.hosted
            # DeepSpeed, which is being built, would step there.
            if on_cpu and isinstance(optimizer, CoatAdamW):
                accepted = '"none" with a callable, or "optimizer.type": "CoatAdamW"'
                raise CoatConfigError(Problem(f"{OFFLOAD}.device", 'got "cpu"', accepted))
            block = {} if self.coat is None else {"coat": self.coat}
            check_deepspeed({**self.settings, **block}, tp=self.facts.tp, optimizer=optimizer)
            return optimizer

        return make_and_check


def validate(given: Mapping[str, Any], explicit: bool = False) -> Request:
    """Check a call without other ranks; what is wrong becomes the request's ``error``, for
    :func:`.agree` to raise.

    DeepSpeed's own call (not ``explicit``) is passed on as it is where nothing of this project is
    among its arguments: a block, CoatAdamW's name, a CoatAdamW, a patched model, or the mpu of
    ``megatron_patches``, beside which gradients need more sums.
    """
    request = Request(dict(given))
    try:
        _validate(request, explicit)
    except (ValueError, TypeError) as error:
        request.error = error
    return request


def _validate(request: Request, explicit: bool) -> None:
    import deepspeed

    given, sources = request.given, configurations(request.given)
    model, optimizer, mpu = (given.get(name) for name in ("model", "optimizer", "mpu"))
    request.tied = tied_weights(model)
    read = [source if isinstance(source, Mapping) else load_json(source) for source in sources]
    ours = isinstance(optimizer, CoatAdamW) or getattr(mpu, "coat_mpu", False) or _is_patched(model)
    named = any("coat" in one or look_up(one, "optimizer.type") == "CoatAdamW" for one in read)
    if not (explicit or ours or named):
        for one in read:
            check_deepspeed(one)
        request.passed_on, request.settings = True, next(iter(read), {})
        return
    if model is None:
        raise CoatConfigError(Problem("model", "got None", "a torch.nn.Module"))
    if len(sources) != 1:
        ways = "`config`, `config_params`, `args.deepspeed_config`"
        raise CoatConfigError(
            Problem("config", f"got {len(sources)} of {ways}", "exactly one of them")
        )
    # DeepSpeed would take some comments for settings.
    settings = with_remainders(without_comments(load_json(read[0])))
    object_given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    tp = _size(mpu, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    ep = _size(mpu, "get_expert_model_parallel_world_size")
    pipeline = isinstance(model, deepspeed.PipelineModule)
    cp = _size(mpu, "get_context_parallel_world_size")
    coat = check_deepspeed(settings, tp=tp, cp=cp, pipeline=pipeline, optimizer=object_given)
    check_parallel(settings, stages=stages(mpu), ep=ep)
    settings.pop("coat", None)
    if not pipeline:
        check_replicated_grads(model, mpu, tp)
    if coat is not None:
        request.to_patch = _to_patch(model, coat)
    frozen = not any(p.requires_grad for p in model.parameters())
    facts = request.facts = Facts(as_read(settings), coat, object_given, tp, ep, frozen=frozen)
    request.source, request.settings = sources[0], settings
    if object_given is not None:
        request.check_optimizer(object_given)
    elif optimizer is None and coat is not None:
        # The Trainer of transformers evaluates with ZeRO-3 by leaving the block and taking
        # "optimizer" out.
        evaluates = (
            facts.stage == 3 and "optimizer" not in settings and "model_parameters" not in given
        )
        name = facts["optimizer.type"]
        if name is None and (facts.stage in (1, 2) or (facts.block and not evaluates)):
            raise CoatConfigError(
                Problem("optimizer.type", "got null", '"CoatAdamW", or an optimizer argument')
            )
        if name not in (None, "CoatAdamW"):
            _check_effect(coat, name)
    if (parameters := given.get("model_parameters")) is not None:
        given["model_parameters"] = listed = list_parameters(parameters)
        if facts.compressed:
            check_tied(
                [one for one in listed if isinstance(one, Mapping)],
                request.tied,
                "model_parameters",
            )
    if optimizer is None and facts.compressed and not facts.only_evaluates:
        request.make, groups = build_coat_adamw(
            settings, coat or CoatConfig(), model, given.get("model_parameters")
        )
        request.groups = tied_apart(groups, request.tied)


def configurations(given: Mapping[str, Any]) -> list[Any]:
    """What is given as configuration, in each of the ways that ``deepspeed.initialize`` knows."""
    ways = (
        given.get("config"),
        given.get("config_params"),
        getattr(given.get("args"), "deepspeed_config", None),
    )
    return [way for way in ways if way is not None]


def check_deepspeed(
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    cp: int = 1,
    pipeline: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> CoatConfig | None:
    """Refuse DeepSpeed settings that CoatAdamW or the flow cannot honour; returns the block.

    Args:
        config: the whole DeepSpeed configuration; without a block and CoatAdamW only misspelt names
            are looked for.
        tp, cp: Megatron tensor- and context-parallel sizes.
        pipeline: the model is a ``deepspeed.pipe.PipelineModule``.
        optimizer: handed to DeepSpeed, or what a callable that was handed to it made.

    Raises:
        CoatConfigError: names each offending key, its value and what is accepted.
    """
    coat = read_block(config, optimizer)
    block = {} if coat is None else {"coat": coat.model_dump()}
    facts = Facts(as_read({**config, **block}), coat, optimizer, tp, pipeline=pipeline)
    if coat is None and not facts.compressed:
        return None
    problems = [*refused(RULES, facts), *_against(facts)]
    if facts.compressed and optimizer is None:
        problems += wrong_params(facts["optimizer.params"] or {}, coat)
    if facts.stage and cp > 1:
        accepted = "1 with ZeRO (gradients are not reduced over CP ranks)"
        problems.append(Problem("context_parallel_size", got(cp), accepted))
    _raise(problems)
    return coat


def read_block(
    config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> CoatConfig | None:
    """The ``"coat"`` block of a whole DeepSpeed configuration.

    Raises:
        CoatConfigError: the block is wrong; and with it misspelt keys and values of a wrong type in
            the whole configuration, so that a file is not corrected line by line.
    """
    coat, found = None, []
    try:
        coat = CoatConfig.from_deepspeed(config)
    except CoatConfigError as error:
        found = [*error.problems]
    facts = Facts(as_read(config), coat, optimizer)
    other = not found and coat is None and not facts.compressed
    found += misspelt(config)
    if not other:
        found += refused(TYPES, facts)
        found += unknown(facts.config, facts.compressed and facts.ours is None)
    first: dict[str, Problem | str] = {}
    for one in found:
        first.setdefault(getattr(one, "key", str(one)), one)
    _raise(first.values())
    return coat


def check_parallel(settings: Mapping[str, Any], stages: int = 1, ep: int = 1) -> None:
    """Refuse what Megatron's pipeline stages, or experts that ``ep`` ranks divide, cannot be
    trained with.

    Raises:
        CoatConfigError: names each key, what was given and what is accepted.
    """
    facts = Facts(as_read(settings))
    problems = [
        *(refused(STAGES, facts) if stages > 1 else ()),
        *(refused(EXPERTS, facts) if ep > 1 else ()),
    ]
    if stages > 1 and ep > 1:
        problems.append(
            Problem("mpu", f"got {stages} pipeline stages", "1 with expert parallelism")
        )
    _raise(problems)


def _raise(problems: Iterable[Problem | str]) -> None:
    if problems := [*problems]:
        raise CoatConfigError(*problems)


def _against(facts: Facts) -> Iterable[Problem]:
    """The block's options, where it has some, that the given CoatAdamW does not have."""
    if facts.coat is None or facts.ours is None or not facts.block:
        return
    for name, value in facts.coat.optimizer.model_dump(exclude_unset=True).items():
        if others := [group[name] for group in facts.ours.param_groups if group[name] != value]:
            given = f"{got(value)} beside a CoatAdamW that has {json.dumps(others[0])}"
            yield Problem(f"coat.optimizer.{name}", given, "its options, or none")


def _check_effect(coat: CoatConfig | None, optimizer: str) -> None:
    """Refuse a block beside which nothing is compressed: training in BF16 that its user takes
    for FP8.
    """
    if coat is not None and not coat.activation.enabled:
        given = (
            "got a block that compresses nothing (activation.enabled is false, the optimizer "
            f'is "{optimizer}")'
        )
        accepted = '"optimizer": {"type": "CoatAdamW"}, activation.enabled true, or no block'
        raise CoatConfigError(Problem("coat", given, accepted))


def _to_patch(model: torch.nn.Module, coat: CoatConfig) -> bool:
    """Whether a transformers model is to be patched; refuse a block that says another thing than
    the model does.
    """
    patched, key = _is_patched(model), "coat.activation.enabled"
    if coat.activation.enabled and not patched:
        from ...hf import is_transformers_model

        if is_transformers_model(model):
            return True
        accepted = (
            "a transformers model, megatron_patches.initialize instead for a Megatron "
            "model, or false"
        )
        raise CoatConfigError(
            Problem(key, f"got true, but no module of {type(model).__name__} is patched", accepted)
        )
    if patched and not coat.activation.enabled:
        raise CoatConfigError(
            Problem(key, "got false, but the model is patched", "true, or an unpatched model")
        )
    check_settings(model, coat.activation)
    return False


def _is_patched(model: Any) -> bool:
    """Whether some module of a model runs the flow."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(getattr(type(m), "coat_patched", False) for m in modules)


def _size(mpu: Any, *names: str) -> int:
    return next((int(getattr(mpu, n)()) for n in names if callable(getattr(mpu, n, None))), 1)
