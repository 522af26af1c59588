"""Sizes of a run over pipeline stages: checked, and told to Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.deepspeed.config.validate import check_parallel
from launch.model.config import ModelConfig
from launch.train.arguments import TrainingOptions
from launch.train.settings import STEPS, BatchSizes

__all__ = ["check_micro_batches", "check_stages", "groups"]


def check_stages(args: TrainingOptions, world: int, settings: Mapping[str, Any], model: ModelConfig) -> int:
    """The number of pipeline stages, checked against ranks, layers and the DeepSpeed configuration.

    Raises:
        CoatConfigError: names what cannot be used.
    """
    stages, virtual, tp = args.pipeline_parallel, args.virtual_stages, args.tensor_parallel
    if stages == 1:
        return 1
    if world % (tp * stages):
        raise CoatConfigError(
            f"--pipeline-parallel: got {stages}, accepted: a divisor of the number of ranks over --tensor-parallel "
            f"({world // tp})"
        )
    if args.expert_parallel > 1:
        raise CoatConfigError(f"--expert-parallel: got {args.expert_parallel}, accepted: 1 with --pipeline-parallel")
    if model.num_layers % stages:
        raise CoatConfigError(
            f"--pipeline-parallel: got {stages}, accepted: a divisor of the model's layers ({model.num_layers})"
        )
    if model.num_layers % (stages * virtual):
        raise CoatConfigError(
            f"--virtual-stages: got {virtual}, accepted: a divisor of the layers of a stage "
            f"({model.num_layers // stages})"
        )
    check_parallel(settings, stages=stages)
    return stages


def check_micro_batches(args: TrainingOptions, batch: BatchSizes) -> None:
    """Refuse numbers of micro-batches that the interleaved schedule cannot run.

    Raises:
        CoatConfigError: names the key or option.
    """
    stages = args.pipeline_parallel
    if args.virtual_stages == 1:
        return
    evaluated = {"--eval-steps": args.eval_steps} if args.eval_interval else {}
    for name, count in {STEPS: batch.accumulation, **evaluated}.items():
        if count % stages:
            raise CoatConfigError(
                f"{name}: got {count}, accepted: a multiple of --pipeline-parallel ({stages}) with --virtual-stages"
            )


def groups(args: TrainingOptions) -> dict[str, int]:
    """Arguments of ``initialize_model_parallel`` for the stages; none for one."""
    if args.pipeline_parallel == 1:
        return {}
    virtual = {"virtual_pipeline_model_parallel_size": args.virtual_stages} if args.virtual_stages > 1 else {}
    return {"pipeline_model_parallel_size": args.pipeline_parallel, **virtual}
