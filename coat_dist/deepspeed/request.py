"""A call of ``deepspeed.initialize``, validated on this rank and agreed on by all.

:func:`validate` checks configuration, model and optimizer together, without other ranks; what is
wrong becomes the request's ``error``. :func:`agree` raises on every rank what any has found, and
compares what the ranks are going to run.

A rank with a ``"coat"`` block compares its settings with all others' in a collective. One without
would go straight on into DeepSpeed's collectives, and the ranks would hang until a timeout that
names none of them. So each call of ``deepspeed.initialize`` first leaves its error, and whether it
has a block, in torch.distributed's store, and waits for all others', as DeepSpeed's first
collective would.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..config import CoatConfig, CoatConfigError, refuse
from ..optim import CoatAdamW
from ..optim.groups import listed, parameter_of
from ..patching.report import check_settings
from ..ranks import check_same_on_all_ranks, rank_and_world, say_ranks, wait_for
from ..settings import Facts, Settings
from .heartbeat import group_timeout
from .optimizer_from_json import build_coat_adamw
from .parallel.pipeline import stages
from .parallel.pipeline_module import check_tied, tied_apart, tied_weights
from .parallel.replicated_grads import check_replicated_grads
from .without_launcher import in_a_step, prepare

# Seconds that a rank without a block waits for the others: without one, ranks may build unequal
# numbers of engines.
PATIENCE = 20.0
HEARD = 5.0  # seconds that a rank with an error waits for the others to read it, before it raises

_ERROR = "error: "

_NOTHING = Settings.read({})
_calls = 0  # of this process: all ranks of a program build their engines in the same order


@dataclass
class Request:
    """What a call asks for."""

    given: dict[str, Any]
    """The arguments by name; those that are None are left out."""
    passed_on: bool = False
    """Nothing in the call is this project's: DeepSpeed gets it as it is."""
    settings: Settings = _NOTHING
    facts: Facts = Facts(_NOTHING)
    tied: set[int] = field(default_factory=set)
    """Weights that several stages of a PipelineModule hold."""
    make: Callable | None = None
    """Makes the CoatAdamW that the configuration names, of ``groups``."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    to_patch: bool = False
    """The block asks for the flow in a transformers model that has none yet."""
    error: Exception | None = None
    """Why the call is refused."""

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer, given or made by a callable, that is not what the configuration
        asks for.
        """
        facts, name = self.facts, type(optimizer).__name__
        if isinstance(optimizer, CoatAdamW):
            check_tied(optimizer.param_groups, self.tied, "optimizer.param_groups")
        elif facts.block or facts.named:
            key, what = "optimizer.type", '"CoatAdamW"'
            if facts.block:
                key, what = "coat.optimizer", "a block"
            accepted = "no optimizer argument, or a CoatAdamW"
            refuse(key, f"got {what} beside optimizer={name}", accepted)
        else:
            _check_effect(facts.coat, name)

    def checked(self, make: Callable) -> Callable:
        """A callable for DeepSpeed whose optimizer is checked before ZeRO is built around it."""

        def make_and_check(parameters: Any) -> Any:
            optimizer = make(parameters)
            self.check_optimizer(optimizer)
            self.settings.check(tp=self.facts.tp, optimizer=optimizer)
            return optimizer

        return make_and_check


def validate(given: Mapping[str, Any], explicit: bool = False) -> Request:
    """Check a call without other ranks; what is wrong becomes the request's ``error``.

    DeepSpeed's own call (not ``explicit``) is passed on as it is where nothing of this project is
    among its arguments: a block, CoatAdamW's name, a CoatAdamW, a patched model, or the mpu of
    ``megatron_patches``, beside which gradients need more sums.
    """
    request = Request(dict(given))
    try:
        _validate(request, explicit)
    except Exception as error:  # whatever it is: the other ranks would wait for this one
        request.error = error
    return request


def _validate(request: Request, explicit: bool) -> None:
    import deepspeed
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

    given = request.given
    model, optimizer, mpu = (given.get(name) for name in ("model", "optimizer", "mpu"))
    pipeline = isinstance(model, deepspeed.PipelineModule)
    if pipeline:
        request.tied = tied_weights(model)
    read = [Settings.read(source) for source in given_configurations(given)]
    if read:
        request.settings = read[0]
    in_use = isinstance(optimizer, CoatAdamW) or getattr(mpu, "coat_mpu", False)
    asked = any(settings.asked for settings in read)
    if not (explicit or asked or in_use or _is_patched(model)):
        for settings in read:
            settings.check()
        request.passed_on = True
        return
    if model is None:
        refuse("model", "got None", "a torch.nn.Module")
    if len(read) != 1:
        ways = "`config`, `config_params`, `args.deepspeed_config`"
        refuse("config", f"got {len(read)} of {ways}", "exactly one of them")
    tp = bwc_tensor_model_parallel_world_size(mpu)
    object_given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    facts = request.facts = request.settings.check(
        optimizer=object_given,
        tp=tp,
        cp=_size(mpu, "get_context_parallel_world_size"),
        stages=stages(mpu),
        ep=_size(mpu, "get_expert_model_parallel_world_size"),
        pipeline=pipeline,
        frozen=not any(p.requires_grad for p in model.parameters()),
    )
    coat = facts.coat
    # Other models than Megatron's are not tensor-parallel.
    if not pipeline and (tp > 1 or (mpu is None and "megatron.core" in sys.modules)):
        check_replicated_grads(model, mpu, tp)
    if coat is not None:
        request.to_patch = _to_patch(model, coat)
    if object_given is not None:
        request.check_optimizer(object_given)
    elif optimizer is None and coat is not None:
        _check_type(facts, coat, given)
    if (parameters := given.get("model_parameters")) is not None:
        # Iterators, also those in groups, become lists that can be read again.
        given["model_parameters"] = own = [
            {**p, "params": listed(p["params"])} if isinstance(p, Mapping) else p
            for p in parameters
        ]
        if facts.compressed:
            given_groups = [one for one in own if isinstance(one, Mapping)]
            check_tied(given_groups, request.tied, "model_parameters")
    if optimizer is None and facts.compressed and not facts.only_evaluates:
        request.make, groups = build_coat_adamw(
            facts.values.get("optimizer.params") or {},
            coat or CoatConfig(),
            model,
            given.get("model_parameters"),
        )
        request.groups = tied_apart(groups, request.tied)


def given_configurations(given: Mapping[str, Any]) -> list[Any]:
    """What is given as configuration, in each of the ways that ``deepspeed.initialize`` knows;
    :class:`Settings` stand for what they were read from.
    """
    config = given.get("config")
    others = given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None)
    source = config.source if isinstance(config, Settings) else None
    return [way for way in (config, *others) if way is not None and way is not source]


def _check_type(facts: Facts, coat: CoatConfig, given: Mapping[str, Any]) -> None:
    """Refuse a block whose optimizer nothing makes."""
    name = facts.values.get("optimizer.type")
    if name is None:
        # The Trainer of transformers evaluates with ZeRO-3 by leaving the block and taking
        # "optimizer" out.
        evaluates = "optimizer" not in facts.values and "model_parameters" not in given
        if facts.block and not (facts.stage3 and evaluates):
            refuse("optimizer.type", "got null", '"CoatAdamW", or an optimizer argument')
    elif name != "CoatAdamW":
        _check_effect(coat, name)


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
        refuse("coat", given, accepted)


def _to_patch(model: torch.nn.Module, coat: CoatConfig) -> bool:
    """Whether a transformers model is to be patched; refuse a block that says another thing than
    the model does.
    """
    patched, key = _is_patched(model), "coat.activation.enabled"
    if coat.activation.enabled and not patched:
        from ..hf import is_transformers_model

        if is_transformers_model(model):
            return True
        if coat.activation.enabled == "auto":
            return False
        accepted = (
            "a transformers model, megatron_patches.initialize instead for a Megatron "
            "model, or false"
        )
        refuse(key, f"got true, but no module of {type(model).__name__} is patched", accepted)
    if patched and not coat.activation.enabled:
        refuse(key, "got false, but the model is patched", "true, or an unpatched model")
    check_settings(model, coat.activation)
    return False


def _is_patched(model: Any) -> bool:
    """Whether some module of a model runs the flow."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(getattr(type(m), "coat_patched", False) for m in modules)


def _size(mpu: Any, name: str) -> int:
    """Call the named method of an mpu; 1 where it has none."""
    return getattr(mpu, name)() if hasattr(mpu, name) else 1


def agree(request: Request) -> None:
    """Wait for all ranks, and raise where any has an error or they differ; starts torch.distributed
    if need be.

    Raises:
        Exception: ``request.error``.
        CoatConfigError: another rank's error; some ranks have a block or a CoatAdamW and others
            have not; or keys that differ, with the values and the ranks that have them.
    """
    try:
        _start(request)
    except Exception as error:
        request.error = request.error or error
    # The error that is on its way says more.
    with suppress(Exception) if request.error else nullcontext():
        _exchange(request)
    if request.error is not None:
        raise request.error
    if request.facts.ours and rank_and_world()[1] > 1:
        _compare(request)


def _start(request: Request) -> None:
    """Start torch.distributed as DeepSpeed would, where several ranks, or something of ours, are
    going to run.
    """
    import deepspeed
    from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

    given = request.given
    if not dist.is_initialized() and given.get("dist_init_required") is not False:
        right = request.error is None
        # A baseline starts as the run it is compared with; where nothing will run, a process of its
        # own stays as it is.
        prepare(request.facts.ours or not right or in_a_step(), alone=right)
        if (right and request.facts.ours) or int(os.environ.get("WORLD_SIZE", 1)) > 1:
            port = given.get("distributed_port", TORCH_DISTRIBUTED_DEFAULT_PORT)
            deepspeed.init_distributed(distributed_port=port)


def _exchange(request: Request) -> None:
    """Leave this rank's error, or whether it has a block, in the store; raise what the other
    ranks have left.
    """
    global _calls
    call, _calls = _calls, _calls + 1
    rank, world = rank_and_world()
    if world == 1:
        return
    store, error = dist.distributed_c10d._get_default_store(), request.error
    keys = [f"coat_dist/initialize/{call}/{one}" for one in range(world)]
    mine, patience = "without", PATIENCE
    if error:
        mine, patience = f"{_ERROR}{error}", HEARD
    elif request.facts.ours:
        mine, patience = "with", group_timeout()
    store.set(keys[rank], mine)
    wait_for(keys, patience)
    there = [one for one in range(world) if store.check([keys[one]])]
    left: dict[str, list[int]] = {}
    for one, text in zip(there, store.multi_get([keys[one] for one in there]), strict=True):
        left.setdefault(text.decode(), []).append(one)
    if error or len(left) > 1:
        time.sleep(1.0)  # until all have read: the store ends with the process of rank 0
        if not error:
            _raise(left)


def _raise(left: Mapping[str, list[int]]) -> NoReturn:
    """Raise what ranks have left in the store."""
    lines = []
    for text, ranks in left.items():
        if text.startswith(_ERROR):
            for line in text.removeprefix(_ERROR).splitlines():
                lines.append(f"{line} (on {say_ranks(ranks)})")
    if not lines:
        given = f"on {say_ranks(left['with'])}, neither on {say_ranks(left['without'])}"
        lines.append(
            f'ranks were started differently: a "coat" block or a CoatAdamW {given}; '
            "accepted: the same configuration on all ranks"
        )
    raise CoatConfigError(*lines)


def _compare(request: Request) -> None:
    """Compare what the ranks are going to run: ranks that step with other options, each on its own
    shards, would train on silently. Where ranks hold different parts of a model, as with pipelines,
    the configuration alone is compared.
    """
    from deepspeed import PipelineModule

    facts, given, model = request.facts, request.given, request.given["model"]
    _take_device(given.get("args"))
    compared: dict[str, Any] = {
        **request.settings.config,
        "coat": facts.coat and facts.coat.model_dump(),
    }
    if not isinstance(model, PipelineModule) and facts.stages == 1:
        compared["model.parameters"] = [  # ZeRO-3 keeps full shapes in ds_shape
            [
                name,
                list(getattr(p, "ds_shape", p.shape)),
                str(p.dtype),
                p.requires_grad,
                type(module).__name__,
            ]
            for name, module in model.named_modules()
            for p in module.parameters(recurse=False)
        ]
        names = {id(p): name for name, p in model.named_parameters()}
        groups = getattr(facts.optimizer, "param_groups", None)
        compared["model_parameters"] = _groups(given.get("model_parameters"), names)
        compared["optimizer.param_groups"] = _groups(groups, names)
    check_same_on_all_ranks(compared)


def _take_device(args: Any) -> None:
    """Choose the device that DeepSpeed's engine is going to choose, in the same way, before a
    collective needs one: NCCL would run it on the first GPU for every rank.
    """
    from deepspeed.accelerator import get_accelerator

    local = os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))
    rank = getattr(args, "device_rank", None if local is None else int(local))
    if rank is not None and rank >= 0:
        get_accelerator().set_device(rank)


def _groups(listed: Iterable[Any] | None, names: Mapping[int, str]) -> dict[str, Any]:
    """Plain options of parameter groups, or of a list of parameters as one group, and the names
    of what is in each.
    """
    groups = list(listed or [])
    if groups and not isinstance(groups[0], Mapping):
        groups = [{"params": groups}]
    plain = bool | int | float | str | list | tuple | torch.Tensor
    found = {}
    for i, group in enumerate(groups):
        params = [names.get(id(parameter_of(p)), "unknown") for p in group["params"]]
        found[str(i)] = {str(k): v for k, v in group.items() if isinstance(v, plain)} | {
            "params": params
        }
    return found
