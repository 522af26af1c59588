"""One rank of ``whole.py``: a whole model, one variant, larger and larger micro-batches until
memory is out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.common import ROOT
from benchmarks.ranks import as_rank
from benchmarks.speed.te_train import RECIPES, te_layers
from benchmarks.timing import median
from coat_dist import CoatConfig
from coat_dist.flow.graphs.graph_pool import pool_bytes
from launch.common.settings import batch_sizes
from launch.model.gpt import ModelConfig, load_model_config
from launch.scale.timed_steps import random_batch
from launch.train import runtime, training_engine
from launch.train.memory_report import MemoryReport
from megatron_patches import initialize_model_parallel


class Variant(NamedTuple):
    """What is trained, as far as the DeepSpeed configuration says."""

    optimizer: str = "CoatAdamW"
    """Type of the optimizer."""
    activation: Mapping[str, Any] = {}
    """What the block's "activation" has besides that of the file."""
    file: str = "zero2"
    """Name of its file in ``configs/deepspeed``."""


VARIANTS = {
    "BF16": Variant("AdamW", {"enabled": False}),
    "optimizer only": Variant(activation={"enabled": False}),
    "flow only": Variant("AdamW"),
    "both": Variant(),
    "both, FP8 attention": Variant(activation={"attention": "fp8"}),
    "both, remainders": Variant(file="zero2-remainder"),
    "both, CUDA graphs": Variant(activation={"cuda_graphs": True}),
    **{name: Variant("AdamW", {"enabled": False}) for name in RECIPES},
}
WARM_UP, TIMED = 2, 3


def settings_of(variant: str, stage: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a variant."""
    optimizer, activation, file = VARIANTS[variant]
    settings = json.loads((ROOT / f"configs/deepspeed/{file}.json").read_text())
    settings["train_micro_batch_size_per_gpu"] = 1  # of the engine; what it is given may have more
    settings["zero_optimization"]["stage"] = stage
    settings["optimizer"]["type"] = optimizer
    settings["coat"]["activation"] |= activation
    if optimizer == "AdamW" and activation == {"enabled": False}:
        del settings["coat"]
    elif optimizer == "AdamW":
        del settings["coat"]["optimizer"]
    return settings


def plan_of(
    model: ModelConfig,
    settings: dict[str, Any],
    tp: int = 1,
    recompute: Mapping[str, Any] | None = None,
    ep: int = 1,
) -> Any:
    """What ``launch.train.training_engine.build_engine`` reads of `pretrain.py`'s plan."""
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(
            tensor_parallel=tp,
            expert_parallel=ep,
            pipeline_parallel=1,
            sequence_parallel=tp > 1,
            eval_only=False,
        ),
        batch=batch_sizes(settings, torch.distributed.get_world_size() // tp),
        settings=settings,
        coat=CoatConfig.from_deepspeed(settings),
        recompute=recompute or {},
    )


def engine_of(model: ModelConfig, variant: str, stage: int, tp: int = 1, ep: int = 1) -> Any:
    """The engine that `pretrain.py` would build for a variant. Process groups are set up before."""
    plan = plan_of(model, settings_of(variant, stage), tp, ep=ep)
    recipe = RECIPES.get(variant)
    with nullcontext() if recipe is None else te_layers(recipe):
        return training_engine.build_engine(plan, lambda text: None)


def steps(
    engine: Any, loss_of: Any, micro_batch: int, model: ModelConfig, accumulation: int = 1
) -> dict[str, Any]:
    """Times and peaks of steps with one micro-batch, and what the first one's report says they
    hold.
    """
    report = MemoryReport(engine, micro_batch * model.seq_length)
    gpu, batch, times = torch.cuda.is_available(), random_batch(model, micro_batch), []
    graphs = warm_up = 0
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
    for step in range(WARM_UP + TIMED):
        began = time.perf_counter()
        for index in range(accumulation):
            with report.forward() if step == index == 0 else nullcontext():
                loss = loss_of(engine, batch)
            engine.backward(loss)
            if step == 0 and index == accumulation - 1:
                report.backward_done()
            engine.step()
        if step == 0:
            report.step_done()
        float(engine.get_global_grad_norm())
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        if gpu and step == WARM_UP - 1:
            graphs = pool_bytes(torch.device("cuda", torch.cuda.current_device()))
            if graphs:
                # What is captured counts as allocated then, and not later.
                warm_up = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
    seconds = median(times[WARM_UP:])
    record = {
        "micro_batch": micro_batch,
        "step_ms": 1e3 * seconds,
        "tokens_per_second_per_gpu": accumulation * micro_batch * model.seq_length / seconds,
        "loss": float(loss),
        "held_bytes": {name: row["bytes"] for name, row in report.to_dict().items()},
    }
    if gpu:
        allocated = max(torch.cuda.max_memory_allocated() + graphs, warm_up)
        peaks = torch.tensor([allocated, torch.cuda.max_memory_reserved()], device="cuda")
        torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
        record["peak_bytes"], record["peak_reserved_bytes"] = peaks.tolist()
        record["allocator_retries"] = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    return record


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """A record of each micro-batch."""
    runtime.start(device.index or 0)
    ep = case.get("expert_parallel", 1)
    initialize_model_parallel(
        1, seed=1234, create_gloo_process_groups=False, expert_model_parallel_size=ep
    )
    model = load_model_config(case["model"], case["override"])
    engine = engine_of(model, case["variant"], case["stage"], ep=ep)
    loss_of = training_engine.language_model_loss(1, device)
    for micro_batch in case["micro_batches"]:
        yield steps(engine, loss_of, micro_batch, model)
    torch.distributed.barrier()


if __name__ == "__main__":
    as_rank(measure)
