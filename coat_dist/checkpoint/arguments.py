"""Arguments of ``engine.save_checkpoint`` and ``load_checkpoint`` that DeepSpeed would misread instead of refusing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ..ranks import attempt
from .manifest import CheckpointError

__all__ = ["check_client_state", "check_flags", "check_folder", "on_all_ranks", "values_of_the_program"]

_INFO = "universal_checkpoint_info"
"""Not among the keys below: Megatron-DeepSpeed saves it as a part of its client_state."""
_DEEPSPEEDS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
    }
)
"""What DeepSpeed writes into the model's file. client_state comes last: such a key would replace DeepSpeed's value."""
_OF_EXPERTS = frozenset({"num_experts", "ds_autoep_layers", "autoep_layers", "folding"})
"""The same, where DeepSpeed itself divides experts over ranks."""
_HANDED_BACK = frozenset({"buffer_names", "param_shapes", "ds_config", "ds_version"})
"""``load_checkpoint`` returns these beside the program's own values, whatever it is asked for."""


def on_all_ranks(check: Callable[[], None]) -> None:
    """Call ``check`` on each rank; collective.

    Raises:
        CheckpointError: on every rank, what any raises.
    """
    _, problems = attempt(check)
    if problems:
        raise CheckpointError("\n".join(dict.fromkeys(problems.values())))


def check_client_state(client_state: Any, engine: Any) -> None:
    """Refuse what is no dict, and keys that would replace what DeepSpeed loads a checkpoint by.

    Raises:
        CheckpointError: names the keys.
    """
    if not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state: got {type(client_state).__name__}, accepted: a dict")
    info = client_state.get(_INFO, {})
    if not isinstance(info, Mapping):  # DeepSpeed reads it as one when it loads
        raise CheckpointError(f"client_state: {_INFO}: got {type(info).__name__}, accepted: a dict, or another name")
    keys = sorted(values_of_the_program(client_state, engine).keys() & _keys_of_deepspeed(engine))
    if keys:
        raise CheckpointError(
            f"client_state: got keys {', '.join(keys)}, which DeepSpeed writes itself; accepted: other names"
        )


def values_of_the_program(client_state: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
    """``client_state`` without what DeepSpeed put there itself, where it is one that ``load_checkpoint`` returned.

    DeepSpeed's tutorial hands that back to the next save. The old run's values in it (its steps, say) would replace
    those of now.
    """
    if not client_state.keys() >= _HANDED_BACK:
        return client_state
    old = _keys_of_deepspeed(engine)
    if isinstance(getattr(engine.module, _INFO, None), Mapping):  # DeepSpeed writes the model's
        old |= {_INFO}
    return {key: value for key, value in client_state.items() if key not in old}


def _keys_of_deepspeed(engine: Any) -> frozenset[str]:
    return _DEEPSPEEDS | (_OF_EXPERTS if getattr(engine, "has_moe_layers", False) else frozenset())


def check_flags(deepspeeds: Mapping[str, Any], **ours: Any) -> None:
    """Refuse what is neither true nor false: a text, such as "no", would count as true.

    Args:
        deepspeeds: DeepSpeed's arguments by name. None is false there.
        ours: arguments that it has not got.

    Raises:
        CheckpointError: names the argument.
    """
    for name, value in {**deepspeeds, **ours}.items():
        if isinstance(value, str) or value not in (True, False, *([None] if name in deepspeeds else [])):
            raise CheckpointError(f"{name}: got {value!r}, accepted: True or False")


def check_folder(name: str, value: Any) -> None:
    """Whether this can be the path of a folder.

    Raises:
        CheckpointError: names the argument.
    """
    if not value or not isinstance(value, str | os.PathLike):
        raise CheckpointError(f"{name}: got {value!r}, accepted: the path of a folder")
