"""DeepSpeed settings that CoatAdamW or the flow cannot honour: refused by key before anything is built.

Here is the order of the checks and what concerns no single key of the configuration; the rules are the table in
``refusal_rules.py``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..config import CoatConfig, CoatConfigError
from ..optim import CoatAdamW
from .json_types import as_read, wrong_types
from .known_keys import unknown_keys
from .monitors import missing_packages
from .near_misses import check_names, wrong_names
from .optimizer_from_json import check_params
from .refusal_facts import Facts
from .refusal_rules import RULES

__all__ = ["check_deepspeed", "read_block"]


def check_deepspeed(
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    cp: int = 1,
    pipeline: bool = False,
    mpu: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    coat: CoatConfig | None = None,
) -> None:
    """Refuse DeepSpeed settings that CoatAdamW or the flow cannot honour; warn of the doubtful ones.

    Args:
        config: the whole DeepSpeed configuration; nothing is checked beyond names that are nearly ours where it has
            neither a ``"coat"`` block nor ``"optimizer": {"type": "CoatAdamW"}``, and ``optimizer`` is no CoatAdamW.
        tp, cp: Megatron tensor- and context-parallel sizes.
        pipeline: the model is a ``deepspeed.pipe.PipelineModule``.
        mpu: a Megatron mpu is handed to DeepSpeed.
        optimizer: handed to DeepSpeed, or what a callable that was handed to it made.
        coat: the ``"coat"`` block where it has been parsed already; else it is parsed here.

    Raises:
        CoatConfigError: names each offending key, its value and what is accepted.
    """
    if coat is None:
        coat = read_block(config, optimizer)
    if coat is not None:
        config = {**config, "coat": coat.model_dump()}
    facts = Facts(as_read(config), coat, optimizer, tp, cp, pipeline, mpu)
    if coat is None and not facts.compressed:
        return check_names(config, optimizer)
    _raise(_unreadable(config, optimizer))  # rules look into values
    problems = [
        f"{facts.fill(rule.key)}: got {json.dumps(facts[rule.key], default=str)}, accepted: {facts.fill(rule.accepted)}"
        for rule in RULES
        if rule.refused(facts)
    ]
    problems += missing_packages(facts.config)
    if facts.ours is not None:
        problems += _against(coat, facts.ours)
    elif facts.compressed and optimizer is None:
        problems += check_params(facts["optimizer.params"] or {}, coat)
    if facts.stage and cp > 1:
        problems.append(
            f"context_parallel_size: got {cp}, accepted: 1 with ZeRO (gradients are not reduced over CP ranks)"
        )
    if pipeline and facts.stage > 1:  # DeepSpeed asserts, and names no key
        problems.append(
            f"zero_optimization.stage: got {facts.stage} with a PipelineModule, accepted: 1 (gradients stay on a "
            "stage until all micro-batches have come back through it)"
        )
    if pipeline and mpu:
        problems.append(
            "mpu: got an mpu with a PipelineModule, accepted: one of the two (the PipelineModule has its own grid)"
        )
    if facts.compressed and facts["compile.deepcompile"] and facts["compile.offload_opt_states"]:
        warnings.warn(
            "compile.offload_opt_states: DeepCompile does not know CoatAdamW's state and will not offload it",
            stacklevel=2,
        )
    _raise(problems)


def read_block(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> CoatConfig | None:
    """The ``"coat"`` block, as ``CoatConfig.from_deepspeed`` reads it.

    Args:
        config: the whole DeepSpeed configuration.
        optimizer: as in :func:`check_deepspeed`.

    Raises:
        CoatConfigError: the block is wrong; with what is wrong elsewhere whatever the block says, so that nobody mends
            a file line by line.
    """
    try:
        return CoatConfig.from_deepspeed(config)
    except CoatConfigError as error:
        raise CoatConfigError("\n".join(_unreadable(config, optimizer, str(error).splitlines()))) from None


def _unreadable(
    config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, found: Sequence[str] = ()
) -> list[str]:
    """Lines on names that are nearly right, values of a wrong kind and unknown keys outside of the block, after those
    that were ``found`` before. The first on a key says best what was meant."""
    rest = as_read(config)
    of_key: dict[str, str] = {}
    for line in (*wrong_names(config, optimizer), *wrong_types(rest), *unknown_keys(rest)):
        of_key.setdefault(line.partition(":")[0], line)
    for line in found:
        of_key.pop(line.partition(":")[0], None)
    return [*found, *of_key.values()]


def _raise(problems: list[str]) -> None:
    if problems:
        raise CoatConfigError("\n".join(problems))


def _against(coat: CoatConfig | None, optimizer: CoatAdamW) -> list[str]:
    """The block's options, where it has some, that the given optimizer does not have."""
    if coat is None or "optimizer" not in coat.model_fields_set:
        return []
    others = {
        name: [group[name] for group in optimizer.param_groups if group[name] != value]
        for name, value in coat.optimizer.model_dump(exclude_unset=True).items()
    }
    return [
        f"coat.optimizer.{name}: got {json.dumps(getattr(coat.optimizer, name))} beside a CoatAdamW that has "
        f"{json.dumps(has[0])}, accepted: its options, or none"
        for name, has in others.items()
        if has
    ]
