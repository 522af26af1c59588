"""`engine.step()` of DeepSpeed: clip, update, cast and gather, with torch's fused AdamW and with
CoatAdamW.

    torchrun --nproc_per_node 2 -m benchmarks.speed.engine_step [--stage 2] [--layers 8] \\
        [--output DIR]

Layers of Llama-2-7B in BF16; sequences are short, since a step does not depend on them. Times are
by the host's clock until the GPU is done: medians of 12 steps after 3 to warm up, and the ratio to
torch's fused AdamW in the same run.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import argument_parser
from benchmarks.common import show, write_result
from benchmarks.timing import median, wall_ms
from launch.model.gpt import build_model, load_model_config
from launch.train.runtime import start
from launch.train.training_engine import torch_adamw


def settings(block: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with torch's AdamW, or with CoatAdamW and the "coat" ``block``."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}},
        **more,
    }
    if block is not None:
        config["optimizer"]["type"] = "CoatAdamW"
        config["coat"] = block
    return config


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import coat_dist
    from coat_dist.deepspeed.step import step as coat_step
    from megatron_patches import MPUAdapter

    coat = name != "torch fused AdamW"
    allowed = coat_step.may_leave_out_passes
    if name == "CoatAdamW, every pass of ZeRO's":
        coat_step.may_leave_out_passes = lambda zero: False
    sizes = load_model_config(arguments.model, [f"num_layers={arguments.layers}"])
    model = build_model(sizes.with_vocab(32000))
    zero = {"stage": arguments.stage, "overlap_comm": True, "contiguous_gradients": True}
    config = settings(
        {"activation": {"enabled": False}} if coat else None,
        zero_optimization=zero,
        data_types={"grad_accum_dtype": "fp32" if arguments.stage > 1 else "bf16"},
    )
    engine, *_ = coat_dist.initialize(
        model=model,
        optimizer=None if coat else torch_adamw(model, config),
        mpu=MPUAdapter(),
        config=config,
    )
    coat_step.may_leave_out_passes = allowed
    tokens = torch.randint(0, 32000, (1, 512), device="cuda")
    positions = torch.arange(512, device="cuda")[None]
    times = []
    for _ in range(15):
        engine.backward(engine(tokens, positions, None).float().square().mean())
        torch.cuda.synchronize()
        dist.barrier()
        times.append(wall_ms(engine.step, synchronize=True))
    elements = sum(p.numel() for g in engine.basic_optimizer.param_groups for p in g["params"])
    engine.destroy()
    del engine, model
    gc.collect()
    torch.cuda.empty_cache()
    return {"optimizer": name, "step_ms": median(times[3:]), "parameters_per_rank": elements}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__, layers=8, model="llama2-7b")
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    start(int(os.environ["LOCAL_RANK"]))
    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(1)
    rows: list[dict[str, Any]] = []
    for name in ("torch fused AdamW", "CoatAdamW, every pass of ZeRO's", "CoatAdamW"):
        row = measure(name, arguments)
        row["ratio"] = row["step_ms"] / rows[0]["step_ms"] if rows else 1.0
        rows.append(row)
        if dist.get_rank() == 0:
            show(name, row, step_ms=".2f", ratio=".3f")
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        name = f"speed/engine-step-zero{arguments.stage}-{world}-rank{'s' * (world > 1)}"
        result = {
            "ranks": world,
            "stage": arguments.stage,
            "layers": arguments.layers,
            "steps": rows,
        }
        print("wrote", write_result(name, result, arguments.output))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
