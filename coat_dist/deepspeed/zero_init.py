"""Build a model in shards: with ZeRO-3 no rank ever holds more than one module's own parameters
whole.

``deepspeed.zero.Init`` would change a model's numbers in two ways, which :func:`zero_init` leaves
out: it creates every floating-point tensor in the model's dtype, also tables of rotary embeddings,
and it divides parameters in the dtype in which a module made them, which a later
``model.to(dtype)`` does not reach.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..checkpoint.zero_partitions import copy_into
from ..settings import Settings

__all__ = ["copy_into", "zero_init"]


@contextlib.contextmanager
def zero_init(
    config: Any, mpu: Any = None, dtype: torch.dtype | None = torch.bfloat16
) -> Iterator[bool]:
    """Divide the parameters of modules that are built inside over data-parallel ranks, at ZeRO
    stage 3; yields whether.

    Random numbers are drawn as without it, so weights are those that any other stage starts with,
    to the bit. Call it on every rank, after the process groups exist, and hand the same
    configuration to ``initialize``.

    Args:
        config: what ``initialize`` takes: a dict, the path of a JSON file, base64 of JSON, or
            :class:`Settings`.
        mpu: whose data-parallel group divides the parameters; None = all ranks do.
        dtype: of floating-point parameters, as ``model.to(dtype)`` would leave them; None = as they
            are built.

    Raises:
        CoatConfigError: the configuration cannot be read, or has what ``initialize`` refuses.
    """
    settings = Settings.read(config)
    if settings.values.get("zero_optimization.stage") != 3:
        yield False
        return
    settings.check(tp=1 if mpu is None else mpu.get_model_parallel_world_size())
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    class InitAs(Init):
        """DeepSpeed's, which converts parameters before it divides them."""

        def _zero_init_param(self, param: Any) -> None:
            if dtype is not None and param.is_floating_point():
                param.data = param.data.to(dtype)
            super()._zero_init_param(param)

    group = None if mpu is None else mpu.get_data_parallel_group()
    # Two engines may be built in one process: DeepSpeed makes hpZ's groups once.
    second = groups._get_zero_param_intra_parallel_group()
    divided = {"mpu": mpu, "data_parallel_group": group, "zero_param_parallel_group": second}
    with InitAs(tensor_overrides=[], config_dict_or_path=settings.for_deepspeed(), **divided):
        yield True
