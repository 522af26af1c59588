"""The configurations of ``planner_check.py`` (models, DeepSpeed files, options), and what the
planner says of them.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import ROOT

SEVEN = {"model": "llama2-7b", "override": ["num_layers=4"]}
EIGHT = {"model": "llama3-8b", "override": ["num_layers=2"]}
OLMO = {"model": "olmo-1b", "override": []}
OLMO2 = {"model": "olmo2-7b", "override": ["num_layers=4"]}
QWEN3 = {"model": "qwen3-8b", "override": ["num_layers=2"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEVEN_8 = {"model": "llama2-7b", "override": ["num_layers=8"]}


def case(model: dict[str, Any], config: str, micro: int | str, **more: Any) -> dict[str, Any]:
    """A configuration: its model, file of ``configs/deepspeed``, micro-batch, and what else
    differs.
    """
    return {**model, "config": config, "micro": micro, **more}


CASES: dict[str, dict[str, Any]] = {
    "7b-zero2-coat-mb2": case(SEVEN, "zero2", 2),
    "7b-zero2-bf16-mb2": case(SEVEN, "zero2-bf16", 2),
    "7b-zero2-coat-mb8": case(SEVEN, "zero2", 8),
    "7b-zero3-coat-mb4": case(SEVEN, "zero3", 4),
    "7b-zero1-coat-mb4": case(SEVEN, "zero1", 4),
    "8b-zero2-coat-mb2": case(EIGHT, "zero2", 2),
    "olmo-zero2-coat-mb8": case(OLMO, "zero2", 8),
    "7b-zero2-coat-fp8-attention-mb8": case(SEVEN, "zero2", 8, activation={"attention": "fp8"}),
    "7b-zero2-coat-plain-loss-mb4": case(SEVEN, "zero2", 4, activation={"loss": "plain"}),
    "7b-zero3-bf16-mb2": case(SEVEN, "zero3-bf16", 2),
    "8b-zero2-bf16-mb1": case(EIGHT, "zero2-bf16", 1),
    "7b-zero2-coat-full-recompute-mb8": case(SEVEN, "zero2", 8, recompute=FULL),
    "olmo-zero1-bf16-mb4": case(OLMO, "zero1-bf16", 4),
    "7b-zero2-coat-mb2-accumulation": case(SEVEN, "zero2", 2, accumulation=3),
    "7b-zero2-bf16-full-recompute-mb4": case(SEVEN, "zero2-bf16", 4, recompute=FULL),
    "7b-zero2-coat-remainder-mb2": case(SEVEN, "zero2", 2, remainder=True),
    "7b-zero1-fp32-sums-mb2": case(SEVEN, "zero1", 2, fp32_sums=True),
    "7b-zero1-fp32-sums-mb2-accumulation": case(SEVEN, "zero1", 2, fp32_sums=True, accumulation=3),
    "7b-zero2-bf16-core-attn-mb4": case(
        SEVEN,
        "zero2-bf16",
        4,
        recompute={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ),
    "7b-zero2-coat-mlp-recompute-mb4": case(
        SEVEN,
        "zero2",
        4,
        recompute={"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ),
}
VERIFY: dict[str, dict[str, Any]] = {
    "7b-8-layers-zero2-coat-largest": case(SEVEN_8, "zero2", "largest"),
    "7b-8-layers-zero2-bf16-largest": case(SEVEN_8, "zero2-bf16", "largest"),
    "13b-zero2-coat-mb3": case({"model": "llama2-13b", "override": ["num_layers=3"]}, "zero2", 3),
    "8b-zero3-coat-mb2": case(EIGHT, "zero3", 2),
    "7b-zero2-coat-remainder-mb2": CASES["7b-zero2-coat-remainder-mb2"],
    "7b-zero2-bf16-full-recompute-mb4": CASES["7b-zero2-bf16-full-recompute-mb4"],
    "7b-zero2-coat-mlp-recompute-mb4": CASES["7b-zero2-coat-mlp-recompute-mb4"],
    "olmo-zero1-coat-mb16": case(OLMO, "zero1", 16),
    "olmo2-zero2-coat-mb4": case(OLMO2, "zero2", 4),
    "olmo2-zero2-bf16-mb2": case(OLMO2, "zero2-bf16", 2),
    "qwen3-zero2-coat-mb4": case(QWEN3, "zero2", 4),
}
"""The first two are the planner's largest micro-batches on this GPU: they have to run."""


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed configuration of a case."""
    settings = json.loads((ROOT / f"configs/deepspeed/{case['config']}.json").read_text())
    settings["train_micro_batch_size_per_gpu"] = case["micro"]
    settings["gradient_accumulation_steps"] = case.get("accumulation", 1)
    if "coat" in settings:
        settings["coat"]["activation"] |= case.get("activation", {})
    if case.get("fp32_sums"):
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if case.get("remainder"):
        settings["coat"]["optimizer"]["master_weights"] = "bf16_remainder"
        settings["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        settings.pop("data_types", None)
    return settings


def planned(case: dict[str, Any], ranks: int) -> Any:
    """The planner's run of a case."""
    from coat_dist import CoatConfig
    from launch.memory.run import Run
    from launch.model.gpt import load_model_config

    settings, tp = settings_of(case), case.get("tp", 1)
    return Run(
        model=load_model_config(case["model"], case["override"]),
        settings=settings,
        coat=CoatConfig.from_deepspeed(settings),
        dp=ranks // tp,
        tp=tp,
        sequence_parallel=tp > 1,
        micro=case["micro"],
        accumulation=case.get("accumulation", 1),
        recompute=case.get("recompute", {}),
    )


def largest(case: dict[str, Any]) -> int:
    """The largest micro-batch that the planner says fits on this GPU as it is."""
    import torch

    from launch.memory.fit import GPU, largest_micro_batch, not_torchs

    free, total = torch.cuda.mem_get_info()
    run = planned({**case, "micro": 1}, torch.distributed.get_world_size())
    other = max(total - free - torch.cuda.memory_reserved() + 2**30, not_torchs(run))
    return largest_micro_batch(run, GPU("this one", total, other))


def predict(case: dict[str, Any], ranks: int) -> dict[str, int]:
    """The planner's bytes of a case."""
    from launch.memory.peak import peak_of

    peak = peak_of(planned(case, ranks))
    return {"allocated": peak.allocated, "reserved": peak.reserved}
