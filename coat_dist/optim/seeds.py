"""Which noise a parameter draws: the number ``coat_seed`` in its state, for stochastic rounding.

It is chosen once, when a state is made, and travels in checkpoints. A parameter that has a name
gets the checksum of that name: the same alone and among others, whenever it is added, on every rank
and in every run. Nothing distinguishes a parameter without a name from identically shaped ones
after a restart. An object's identity ends with the process. Contents are equal where parameters
start at zero or one, differ between ranks and runs, and would have to be read from the device. A
position depends on the other parameters. So parameters without names get the smallest free number,
in the order of their first steps.

A program that steps in backward has an optimizer for each parameter. There ordinals start at
``first_ordinal``, which goes by the order in which optimizers were built: the same on replicas and
after a restart. The order starts again when a parameter has taken its first step, so that a second
run in the same process draws what the first one drew. Optimizers that step elsewhere count from 0,
so that two of them on copies of a model draw the same.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["first_ordinal", "name_of", "new_seed", "noise_seed", "steps_in_backward", "taken_seeds"]

_PARAMETERS = 1 << 16
"""Ordinals of one optimizer."""
_built = itertools.count()

_WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_forward_module|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
_LEADING = re.compile(r"^(?:module\.)+")
"""What torch.compile, Fabric, checkpointing, FSDP and DistributedDataParallel add to the names
of what they wrap.
"""


def noise_seed(seed: int) -> int:
    """uint32 of a ``coat_seed``, far from that of its neighbours: the step is added to it.

    Ordinals come to lie apart. Checksums lie as they fall: a parameter may draw what another one
    drew some steps ago, which correlates no two roundings of one step, nor of one parameter.
    """
    return (seed * 0x9E3779B9) & 0xFFFFFFFF


def taken_seeds(states: Mapping[Any, Any]) -> set[int]:
    """The values of ``coat_seed`` that states have."""
    return {
        state["coat_seed"]
        for state in states.values()
        if isinstance(state, Mapping) and "coat_seed" in state
    }


def first_ordinal() -> int:
    """Where a new optimizer starts to count parameters without names."""
    return next(_built) * _PARAMETERS


def steps_in_backward(param: torch.Tensor) -> bool:
    """Whether a parameter's optimizer is one of many, each of which steps as soon as its
    gradient is there.
    """
    running = torch._C._current_graph_task_id() != -1
    return running or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def new_seed(name: str | None, taken: set[int], first: int = 0) -> int:
    """A ``coat_seed`` that is not ``taken``, to which it is added; without a name from ``first``
    on.

    Two names in 2**32 have the same checksum (among 1000 names, one case in 10**4); the later one
    then takes another.
    """
    global _built
    _built = itertools.count()
    found = next(seed for seed in _candidates(name, first) if seed not in taken)
    taken.add(found)
    return found


def _candidates(name: str | None, first: int) -> Iterator[int]:
    if name is None:
        return itertools.count(first)
    plain = _LEADING.sub("", _WRAPPERS.sub("", name))
    return (zlib.crc32(f"{plain}{'#' * i}".encode()) for i in itertools.count())


def name_of(group: Mapping[str, Any], i: int) -> str | None:
    """Name of a group's parameter, as torch keeps it or as :func:`coat_dist.optim.param_groups`
    gives it.

    None where it has none, as where DeepSpeed has put one shard for all parameters.
    """
    names = group.get("param_names", group.get("names"))
    if not isinstance(names, list) or len(names) != len(group["params"]):
        return None
    return names[i] if isinstance(names[i], str) else None
