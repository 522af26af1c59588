"""Steps of pretraining on the ranks that are here, timed: pretrain.py's engine and loss, random tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from launch.train import arguments, build, runtime
from launch.train.plan import Plan, assemble
from launch.train.settings import MICRO, STEPS, TOTAL

__all__ = ["measure", "plan_of"]


def plan_of(spec: Mapping[str, Any], world: int) -> Plan:
    """The plan of a run on ``world`` ranks; touches no device.

    Args:
        spec: ``options``, of pretrain.py; ``model``, ``settings``, ``micro`` and ``accumulations``.

    Raises:
        CoatConfigError: as :func:`launch.train.plan.assemble`.
    """
    from coat_dist import CoatConfig
    from launch.model.config import described_model

    settings = {k: v for k, v in spec["settings"].items() if k != TOTAL}
    settings |= {MICRO: spec["micro"], STEPS: max(spec["accumulations"])}
    required = ["--deepspeed_config", "-", "--model", "-", "--data", "-", "--train-steps", "1"]
    args = arguments.parse([*required, *spec["options"]])
    coat = CoatConfig.from_deepspeed(settings)
    return assemble(args, world, settings, coat, described_model(spec["model"], []))


def measure(spec: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Seconds of each step, for each of ``accumulations`` with one engine.

    Args:
        spec: as :func:`plan_of`; ``warmup`` and ``steps`` that are timed.
    """
    from megatron.core import parallel_state

    from megatron_patches import initialize_model_parallel

    world = torch.distributed.get_world_size()
    p = plan_of(spec, world)
    runtime.seed_python_and_numpy(p.args.seed)
    initialize_model_parallel(p.args.tensor_parallel, seed=p.args.seed, create_gloo_process_groups=False)
    engine = build.build_engine(p, lambda text: None)
    loss = build.language_model_loss(p.args.tensor_parallel, device)
    batch = _random_batch(p, parallel_state.get_data_parallel_rank(), device)
    measured, values = [], []
    for accumulation in spec["accumulations"]:
        engine.set_train_batch_size(p.batch.micro * accumulation * p.dp)
        seconds = []
        for step in range(spec["warmup"] + spec["steps"]):
            began = time.perf_counter()
            for _ in range(accumulation):
                value = loss(engine, batch)
                engine.backward(value)
                engine.step()
            values += runtime.mean_over_ranks([value.detach()], device)  # waits for the device and for every rank
            if step >= spec["warmup"]:
                seconds.append(time.perf_counter() - began)
        measured.append({"accumulation": accumulation, "seconds": seconds})
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"steps": measured, "micro": p.batch.micro, "peak_memory_bytes": peak, "first_loss": values[0]}


def _random_batch(p: Plan, dp_rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Tokens ``[micro, seq]`` int64, other ones on each data-parallel rank."""
    generator = torch.Generator().manual_seed(p.args.seed + dp_rank)
    shape = (p.batch.micro, p.model.seq_length + 1)
    tokens = torch.randint(p.model.vocab_size or 1, shape, generator=generator)
    positions = torch.arange(p.model.seq_length).expand(p.batch.micro, -1)
    made = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": positions,
        "loss_mask": torch.ones(p.batch.micro, p.model.seq_length),
    }
    return {key: value.to(device).contiguous() for key, value in made.items()}
