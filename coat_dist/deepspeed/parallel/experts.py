"""Experts that ranks divide (Megatron's expert parallelism) under ZeRO-1 and 2, by DeepSpeed's own
support for them.

DeepSpeed knows experts by ``param.allreduce = False`` and ``param.group_name``, finds the ranks
that hold the same ones in dicts of ``deepspeed.utils.groups``, and turns its support on where the
model holds a ``deepspeed.moe.layer.MoE``. While the engine is built a module of that class, without
parameters, stands in the model. ZeRO then reduces and divides experts over the ranks that hold the
same ones, and everything else over all data-parallel ranks. Gradients of both are divided by the
number of all data-parallel ranks: an expert has met the tokens of all ranks that share it out.

Afterwards the engine is told that it has no such layers: it would save and load experts by names of
DeepSpeed's own layers. With BF16_Optimizer the engine reduces gradients, and would leave out
experts then: :func:`reduce_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...config import refuse

_MARKER = "coat_experts"


def mark_experts(model: torch.nn.Module, size: int) -> list[torch.nn.Parameter]:
    """Name, on each parameter of an expert (``allreduce = False``, as Megatron sets it), the group
    of ``size`` ranks that divide the experts, before the optimizer is made; these parameters.
    """
    from deepspeed.moe.utils import is_moe_param

    found = [p for p in model.parameters() if is_moe_param(p)]
    for p in found:
        p.group_name = f"ep_size_{size}"  # type: ignore[attr-defined]
    return found


def reduce_experts(engine: Any, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
    """In place of the engine's ``buffered_allreduce_fallback``, which would leave out experts:
    their sums over the ranks that hold them, divided by the number of all data-parallel ranks.
    """
    type(engine).buffered_allreduce_fallback(engine, grads, elements_per_buffer)
    engine._reduce_expert_gradients(engine.optimizer.expert_gradients, elements_per_buffer)


def refuse_single_file(engine: Any, *_: Any, **__: Any) -> None:
    """In place of methods of the engine that write one rank's weights as those of the model."""
    raise ValueError(
        "save_16bit_model: got a model whose layers or experts are divided over ranks, accepted: "
        "save_checkpoint, and launch/convert_hf.py or coat_dist.convert_to_universal for its folder"
    )


@contextmanager
def announced_experts(model: torch.nn.Module, mpu: Any, size: int) -> Iterator[None]:
    """Let ``deepspeed.initialize``, called inside, know the experts of a model that ``size`` ranks
    divide; nothing where the model has none.

    Raises:
        CoatConfigError: a frozen expert; names it. The model's file has one rank's, and the
            optimizer's files none.
    """
    if size == 1 or not mark_experts(model, size):
        yield
        return
    for name, p in model.named_parameters():
        if not p.requires_grad and not getattr(p, "allreduce", True):
            accepted = (
                "True with expert parallelism (no checkpoint would hold the frozen experts "
                "of all ranks)"
            )
            refuse(name, "got requires_grad False", accepted)
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class Marker(MoE):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.num_experts = size

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """There are groups already."""

    name = f"ep_size_{size}"
    groups._EXPERT_PARALLEL_GROUP[name] = mpu.get_expert_model_parallel_group()
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = mpu.get_expert_data_parallel_group()
    model.add_module(_MARKER, Marker())
    try:
        yield
    finally:
        delattr(model, _MARKER)
