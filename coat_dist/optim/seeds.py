"""Which noise a parameter draws: the number ``coat_seed`` in its state, for stochastic rounding.

It is chosen once, when a state is made, and travels in checkpoints. A parameter that has a name
gets the checksum of that name: the same alone and among others, whenever it is added, on every rank
and in every run. Nothing distinguishes a parameter without a name from identically shaped ones
after a restart. An object's identity ends with the process. Contents are equal where parameters
start at zero or one, differ between ranks and runs, and would have to be read from the device. A
position depends on the other parameters. So parameters without names get the smallest free number,
in the order of their first steps. Each optimizer counts from 0, so that two of them on copies of a
model draw the same.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

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


def new_seed(name: str | None, taken: set[int]) -> int:
    """A ``coat_seed`` that is not ``taken``, to which it is added.

    Two names in 2**32 have the same checksum (among 1000 names, one case in 10**4); the later one
    then takes another.
    """
    found = next(seed for seed in _candidates(name) if seed not in taken)
    taken.add(found)
    return found


def _candidates(name: str | None) -> Iterator[int]:
    if name is None:
        return itertools.count()
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
