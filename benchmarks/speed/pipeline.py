"""Pipeline schedules against their ideal: the same layers on each GPU with and without a pipeline,
in one run.

    torchrun --nproc_per_node 2 -m benchmarks.speed.pipeline [--layers 8] [--micro-batch 1] \\
        [--output DIR]

Every rank first runs the micro-batches through its stage alone, without communication: `work`,
milliseconds a micro-batch and stage. Then Megatron's schedule runs the same stages as a pipeline
(`megatron_patches.train_batch` without and with DeepSpeed's step). With m micro-batches on P stages
of V parts, work t and the slowest stage's t_max, the schedule's ideal is m * t_max + (sum of the
other stages' t) / V; for equal stages that is m * t / (1 - bubble). The ratio is ideal to measured,
so 1 is perfect.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import argument_parser
from benchmarks.common import options, show, write_result
from benchmarks.speed.engine_step import settings
from benchmarks.timing import median
from launch.model.gpt import build_model, load_model_config
from launch.scale.timed_steps import random_batch
from launch.train.runtime import start
from launch.train.training_engine import language_model_loss, torch_adamw


def milliseconds(work: Callable[[], Any], repeats: int, slowest: bool = True) -> float:
    """Median time of ``work``, started on all ranks together, on the slowest rank of each call or
    on this one; two more calls to warm up.
    """
    found = []
    for _ in range(repeats + 2):
        synchronize()
        dist.barrier()
        began = time.perf_counter()
        work()
        synchronize()
        took = torch.tensor([1e3 * (time.perf_counter() - began)], device=device())
        if slowest:
            dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(float(took))
    return median(found[2:])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def of_every_rank(value: float) -> list[float]:
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def alone(
    chunks: Sequence[Any], batch: dict[str, torch.Tensor], hidden: int, count: int, repeats: int
) -> float:
    """Milliseconds of a micro-batch through all parts of this rank's stage, forward and
    backward.
    """
    loss_of = language_model_loss(1, device())
    samples, tokens = batch["tokens"].shape
    received = torch.randn(tokens, samples, hidden, device=device(), dtype=torch.bfloat16)
    gradient = torch.randn_like(received) * 1e-3

    def work() -> None:
        for _ in range(count):
            for chunk in chunks:
                if not chunk.pre_process:
                    chunk.set_input_tensor(received.detach().requires_grad_())
                output = loss_of(chunk, batch if chunk.pre_process or chunk.post_process else None)
                if chunk.post_process:
                    (output / count).backward()
                else:
                    output.backward(gradient)
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)

    return milliseconds(work, repeats, slowest=False) / count


def measure(arguments: argparse.Namespace, coat: bool, virtual: int) -> list[dict[str, Any]]:
    """A row for each number of micro-batches, with one kind of layers and one number of parts."""
    from megatron_patches import initialize, initialize_model_parallel, train_batch
    from megatron_patches.parallel.pipeline import Losses, chunks_of, run_schedule

    stages = dist.get_world_size()
    interleaved = {"virtual_pipeline_model_parallel_size": virtual} if virtual > 1 else {}
    initialize_model_parallel(
        1,
        seed=1,
        create_gloo_process_groups=False,
        pipeline_model_parallel_size=stages,
        **interleaved,
    )
    overrides = [
        f"num_layers={arguments.layers}",
        f"seq_length={arguments.seq_length}",
        *arguments.model_override,
    ]
    model_config = load_model_config(arguments.model, overrides).with_vocab(arguments.vocabulary)
    model, rows = build_model(model_config), []
    config = settings(
        {"optimizer": {}, "activation": {}} if coat else None,
        train_micro_batch_size_per_gpu=arguments.micro_batch,
        gradient_accumulation_steps=min(arguments.micro_batches),
        zero_optimization={"stage": 1},
    )
    engine, *_ = initialize(
        model=model, optimizer=None if coat else torch_adamw(model, config), config=config
    )
    chunks = chunks_of(engine.module)
    batch = {
        name: drawn.to(device())
        for name, drawn in random_batch(model_config, arguments.micro_batch).items()
    }
    loss_of = language_model_loss(1, device())

    def step(batches: Any, chunk: Any) -> Any:
        needed = chunk.pre_process or chunk.post_process
        return loss_of(chunk, batch if needed else None), lambda output: output

    for count in arguments.micro_batches:
        engine.set_train_batch_size(arguments.micro_batch * count)

        def schedule(count: int = count) -> None:
            run_schedule(engine, chunks, None, Losses(step, count), None, None, forward_only=False)
            engine.module.zero_grad(set_to_none=True)

        mine = alone(chunks, batch, model_config.hidden_size, count, arguments.repeats)
        work = of_every_rank(mine)
        took = milliseconds(schedule, arguments.repeats)
        whole = milliseconds(lambda: train_batch(engine, None, step), arguments.repeats)
        slowest = max(work)
        ideal = count * slowest + (sum(work) - slowest) / virtual
        rows.append(
            {
                "layers": "coat" if coat else "BF16",
                "virtual_stages": virtual,
                "micro_batches": count,
                "work_ms": work,
                "ideal_ms": ideal,
                "schedule_ms": took,
                "step_ms": whole,
                "bubble": (stages - 1) / (count * virtual + stages - 1),
                "ratio": ideal / took,
            }
        )
        if dist.get_rank() == 0:
            show(
                f"{rows[-1]['layers']}, {virtual} parts, {count} micro-batches",
                rows[-1],
                work_ms="",
                ideal_ms=".1f",
                schedule_ms=".1f",
                step_ms=".1f",
                ratio=".3f",
            )
    engine.destroy()
    return rows


def forget() -> None:
    """Free what the last measurement held, and Megatron's groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        model="llama2-7b",
        model_override=[],
        layers=8,
        seq_length=4096,
        vocabulary=32000,
        micro_batch=1,
        micro_batches=[4, 8, 16],
        virtual_stages=[1, 2],
        repeats=5,
        name=None,
    )
    parser.add_argument("--kinds", nargs="+", default=["bf16", "coat"], choices=["bf16", "coat"])
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    start(int(os.environ["LOCAL_RANK"]))
    rows: list[dict[str, Any]] = []
    for kind in arguments.kinds:
        for virtual in arguments.virtual_stages:
            rows += measure(arguments, kind == "coat", virtual)
            forget()
    if dist.get_rank() == 0:
        result = {"ranks": dist.get_world_size(), "settings": options(arguments), "runs": rows}
        name = arguments.name or f"pipeline-{dist.get_world_size()}-stages"
        print("wrote", write_result(f"speed/{name}", result, arguments.output))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
