"""Timed steps of pretraining: pretrain.py's engine and loss on random tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import torch

from launch.common.settings import MICRO, STEPS, TOTAL, load_settings
from launch.model.model_config import ModelConfig, described_model
from launch.train import runtime, training_engine
from launch.train.plan import Plan, assemble
from launch.train.pretrain_options import PretrainOptions
from launch.train.steps import MicroBatches, steps_of

__all__ = ["measure", "plan_of"]


def plan_of(job: Mapping[str, Any], world: int) -> Plan:
    """The plan of a run on ``world`` ranks; touches no device. Errors are those of
    :func:`assemble`.

    Args:
        job: ``variant``, ``accumulations``, and the ``identity`` of
            :func:`launch.scale.measuring.identity_of`.
    """
    identity = job["identity"]
    settings = {
        key: value for key, value in identity["settings"][job["variant"]].items() if key != TOTAL
    }
    settings |= {MICRO: identity["micro_batch"], STEPS: max(job["accumulations"])}
    args = PretrainOptions(deepspeed_config="", data=[], train_steps=1, **identity["options"])
    model = described_model(identity["model"])
    return assemble(args, world, *load_settings(settings, tp=args.tensor_parallel), model)


def measure(job: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Seconds of each step, for each of ``accumulations`` with one engine.

    Args:
        job: as :func:`plan_of`; ``warmup`` and ``steps`` that are timed.
    """
    from megatron.core import parallel_state

    from megatron_patches import initialize_model_parallel

    p = plan_of(job, torch.distributed.get_world_size())
    runtime.seed_python_and_numpy(p.args.seed)
    initialize_model_parallel(
        p.args.tensor_parallel, seed=p.args.seed, create_gloo_process_groups=False
    )
    engine = training_engine.build_engine(p, lambda text: None)
    generator = torch.Generator().manual_seed(p.args.seed + parallel_state.get_data_parallel_rank())
    batch = {
        name: drawn.to(device)
        for name, drawn in random_batch(p.model, p.batch.micro, generator).items()
    }
    batches, steps = itertools.repeat(batch), steps_of(p, engine, device)
    assert isinstance(steps, MicroBatches)  # pipelines are not measured
    measured, losses = [], []
    for accumulation in job["accumulations"]:
        engine.set_train_batch_size(p.batch.micro * accumulation * p.dp)
        steps.accumulation = accumulation
        seconds = []
        for step in range(job["warmup"] + job["steps"]):
            began = time.perf_counter()
            loss = steps.step(batches)
            # Waits for the device and for every rank.
            losses += runtime.mean_over_ranks([loss], device)
            if step >= job["warmup"]:
                seconds.append(time.perf_counter() - began)
        measured.append({"accumulation": accumulation, "seconds": seconds})
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"steps": measured, "peak_memory_bytes": peak, "first_loss": losses[0]}


def random_batch(
    model: ModelConfig, micro: int, generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """A micro-batch of random tokens: ``[micro, seq]`` int64, on the CPU."""
    shape = (micro, model.seq_length)
    assert model.vocab_size is not None
    drawn = torch.randint(0, model.vocab_size, (micro, model.seq_length + 1), generator=generator)
    return {
        "tokens": drawn[:, :-1].contiguous(),
        "labels": drawn[:, 1:].contiguous(),
        "loss_mask": torch.ones(shape),
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
    }
