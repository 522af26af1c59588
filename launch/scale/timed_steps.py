"""Timed steps of pretraining: pretrain.py's engine and loss on random tokens."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from coat_dist import CoatConfigError
from launch.common.command_line import RunOptions
from launch.common.settings import MICRO, STEPS, TOTAL, load_settings
from launch.model.model_config import ModelConfig, load_model_config
from launch.scale.scaling_options import ScalingOptions
from launch.train import runtime, training_engine
from launch.train.plan import Plan, assemble
from launch.train.pretrain_options import PretrainOptions
from launch.train.steps import MicroBatches, steps_of

_VOCABULARY = 32_000  # Llama 2's, of a model that names none: its tokens are random anyway


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One configuration of one model on the ranks that are here."""

    args: ScalingOptions
    plan: Plan
    variant: str
    """Name of the configuration."""
    accumulation: int
    """Micro-batches of a step in weak scaling."""
    passes: list[int]
    """Micro-batches of the steps that are timed, in weak and in strong scaling."""
    device: str

    @property
    def settings(self) -> dict[str, Any]:
        """The DeepSpeed file without batch sizes, which follow the number of ranks."""
        sizes = (MICRO, STEPS, TOTAL)
        return {key: value for key, value in self.plan.settings.items() if key not in sizes}

    def identity(self) -> dict[str, Any]:
        """What all measurements of a table have in common, as plain values."""
        p = self.plan
        return {
            "model_name": self.args.model,
            "model": p.model.model_dump(exclude_defaults=True, mode="json"),
            "tensor_parallel": p.args.tensor_parallel,
            "micro_batch": p.batch.micro,
            "accumulation": self.accumulation,
            "device": self.device,
            "versions": {"torch": torch.__version__},
        }

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Seconds of each step, for each number of micro-batches, with one engine; collective."""
        from megatron.core import parallel_state

        from megatron_patches import initialize_model_parallel

        p, args = self.plan, self.args
        runtime.seed_python_and_numpy(p.args.seed)
        initialize_model_parallel(
            p.args.tensor_parallel, seed=p.args.seed, create_gloo_process_groups=False
        )
        engine = training_engine.build_engine(p, lambda text: None)
        steps = steps_of(p, engine, device)
        assert isinstance(steps, MicroBatches)  # pipelines are not measured
        rank = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(p.args.seed + rank)
        batch = random_batch(p.model, p.batch.micro, generator)
        batches = itertools.repeat({name: drawn.to(device) for name, drawn in batch.items()})
        measured, losses = [], []
        for accumulation in self.passes:
            engine.set_train_batch_size(p.batch.micro * accumulation * p.dp)
            steps.accumulation = accumulation
            seconds = []
            for step in range(args.warmup + args.steps):
                began = time.perf_counter()
                loss = steps.step(batches)
                # Waits for the device and for every rank.
                losses += runtime.mean_over_ranks([loss], device)
                if step >= args.warmup:
                    seconds.append(time.perf_counter() - began)
            measured.append({"accumulation": accumulation, "seconds": seconds})
        world = torch.distributed.get_world_size()
        strong = args.strong is not None
        return {
            "key": {"variant": self.variant, "strong": strong, "most": args.strong},
            "ranks": world,
            "a_node": int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            "steps": measured,
            "peak_memory_bytes": None
            if device.type == "cpu"
            else torch.cuda.max_memory_allocated(),
            "first_loss": losses[0],
        }


def plan_of(args: ScalingOptions, device: torch.device) -> Measurement:
    """What the command line asks for on these ranks; CoatConfigError names what cannot be used."""
    world = torch.distributed.get_world_size()
    model = load_model_config(str(args.model), args.model_override)
    if args.vocab_size is not None or model.vocab_size is None:
        model = model.with_vocab(args.vocab_size or _VOCABULARY)
    settings, coat = load_settings(args.deepspeed_config, tp=args.tensor_parallel)
    micro = args.micro_batch or settings.get(MICRO)
    if not isinstance(micro, int):
        raise CoatConfigError(
            f"{MICRO}: got {micro!r}, accepted: an integer >= 1, or --micro-batch"
        )
    accumulation = args.accumulation or settings.get(STEPS) or 1
    passes = {accumulation}
    if args.strong is not None:
        strong, rest = divmod(accumulation * args.strong, world)
        if rest or not strong:
            raise CoatConfigError(
                f"--strong: got {args.strong}, accepted: a number of which {accumulation} times is "
                f"a multiple of the ranks ({world})"
            )
        passes.add(strong)
    # DeepSpeed allocates for the most micro-batches; fewer are set later.
    settings = {key: value for key, value in settings.items() if key != TOTAL}
    settings |= {MICRO: micro, STEPS: max(passes)}
    shared = {one.name: getattr(args, one.name) for one in fields(RunOptions)}
    options = PretrainOptions(deepspeed_config="", data=[], train_steps=1, **shared)
    return Measurement(
        args=args,
        plan=assemble(options, world, settings, coat, model),
        variant=Path(args.deepspeed_config).stem,
        accumulation=accumulation,
        passes=sorted(passes),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    )


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
