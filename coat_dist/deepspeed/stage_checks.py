"""What would train a pipeline stage wrongly without a word: steps that nothing has reduced, noise that differs.

``engine.backward`` reduces gradients elsewhere. A stage's gradients are left by a schedule, and
``pipeline.reduce_gradients`` sums them over data-parallel ranks. Without it each replica would step with its own, or
with none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from ..checkpoint.zero_partitions import members
from .pipeline import stages

__all__ = ["check_noise_of_tied", "refuse_unreduced_steps"]


def refuse_unreduced_steps(engine: Any, owner: Any, name: str) -> None:
    """Let ``engine.step`` raise RuntimeError where ``owner.name``, which reduces, was not called before it."""
    reduce, step, reduced = getattr(owner, name), engine.step, [False]

    @functools.wraps(reduce)
    def reduce_and_note(*args: Any, **kwargs: Any) -> Any:
        reduced[0] = True
        return reduce(*args, **kwargs)

    @functools.wraps(step)
    def checked_step(*args: Any, **kwargs: Any) -> Any:
        if not reduced[0]:
            raise RuntimeError(
                f"engine.step: called on stage {engine.mpu.get_pipeline_model_parallel_rank()} of "
                f"{stages(engine.mpu)} pipeline stages, whose gradients nothing has reduced; accepted: "
                "megatron_patches.train_batch(engine, data_iterator, forward_step), which runs the schedule, reduces "
                "and steps"
            )
        reduced[0] = False
        return step(*args, **kwargs)

    setattr(owner, name, reduce_and_note)
    engine.step = checked_step


def check_noise_of_tied(engine: Any) -> None:
    """Refuse a tied embedding whose copies would draw other noise; collective over stages.

    A shard draws by the number of shards with FP8 moments before it. A last stage without a layer of its own, or with
    frozen ones, has none before its copy, where the first stage has one.

    Raises:
        ValueError: on every stage.
    """
    zero = engine.optimizer
    drawing = [
        any(getattr(p, "shared_embedding", False) for p in params)
        for params, group in zip(members(zero), zero.optimizer.param_groups, strict=True)
        if group.get("moments") == "fp8" and group.get("stochastic_rounding") is not False
    ]
    stage_group = engine.mpu.get_pipeline_model_parallel_group()
    places: list[Any] = [None] * stage_group.size()
    dist.all_gather_object(places, drawing.index(True) if True in drawing else None, group=stage_group)
    if len(places_of_copies := {place for place in places if place is not None}) > 1:
        raise ValueError(
            "model_parameters: got a tied embedding behind another number of groups with FP8 moments on the first "
            f"pipeline stage than on the last ({', '.join(map(str, sorted(places_of_copies)))}), so that its copies "
            'would draw other noise and drift apart; accepted: layers to train on both stages, "moments": "fp32" for '
            'the embedding, or "stochastic_rounding": false'
        )
