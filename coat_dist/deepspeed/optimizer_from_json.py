"""The CoatAdamW that a DeepSpeed configuration asks for by ``"optimizer": {"type":
"CoatAdamW"}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..config import CoatConfig, refuse
from ..known_keys import OF_ADAM
from ..optim import CoatAdamW, param_groups, split_groups
from ..optim.groups import parameter_of


def build_coat_adamw(
    params: Mapping[str, Any],
    coat: CoatConfig,
    model: torch.nn.Module,
    given: list[Any] | None,
) -> tuple[Callable[[list[dict[str, Any]]], CoatAdamW], list[dict[str, Any]]]:
    """The optimizer as a callable for DeepSpeed, and the parameter groups it will be called with.
    ``params``: those of the configuration's "optimizer".

    Groups are those of :func:`coat_dist.optim.param_groups` for the model, or for the ``given``
    parameters of it, with or without names; of a list of groups those of
    :func:`coat_dist.optim.split_groups`. All are lists.

    Raises:
        CoatConfigError: some of the ``given`` are not the model's, and would silently not be
            trained.
    """
    options = {**coat.optimizer.model_dump(), **params}
    for name in OF_ADAM:
        options.pop(name, None)
    if "betas" in options:
        options["betas"] = tuple(options["betas"])

    def make(groups: list[dict[str, Any]]) -> CoatAdamW:
        return CoatAdamW(experts_apart(groups), **options)

    if given and isinstance(given[0], Mapping):
        return make, [group for group in split_groups(given) if _works(group)]
    # A tied weight may be listed twice.
    chosen = None if given is None else {id(parameter_of(p)) for p in given}
    named = [(n, p) for n, p in model.named_parameters() if chosen is None or id(p) in chosen]
    if strange := len((chosen or set()) - {id(p) for _, p in named}):
        why = f"got {strange} that are not parameters of the model"
        refuse("model_parameters", why, "its parameters, or groups of them")
    groups = param_groups(named, weight_decay=options.get("weight_decay", 0.01))
    for group in groups:
        del group["names"]  # ZeRO puts shards in the parameters' place
    return make, groups


def _works(group: Mapping[str, Any]) -> bool:
    """Whether a group has something to train. ZeRO-1 and 2 cannot hold one that has not, as that of
    a model's norms where only its matrices are trained.
    """
    return any(parameter_of(p).requires_grad for p in group["params"])


def experts_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put parameters of experts that ranks divide in separate groups: they are sharded over other
    ranks. DeepSpeed does so for the optimizers that it builds from JSON, and not for
    callables like ours.
    """
    from deepspeed.moe.utils import configure_moe_param_groups, is_moe_param

    if not any(is_moe_param(p) for group in groups for p in group["params"]):
        return groups
    named = [{"name": f"group {i}", **group} for i, group in enumerate(groups)]
    return [group for group in configure_moe_param_groups(named) if group["params"]]
