"""A vision-language model in the FP8 flow: a vision transformer, a projector and a GPT (LLaVA's
way), under DeepSpeed.

    python examples/vision_language.py --block coat

That takes seconds and learns little. Without `--block` it trains in BF16 first. With `--size small`
it trains until it captions the pictures that it draws: two coloured shapes, in pairs that never
occur in training. That takes minutes on two CPU cores; `--size large` is for a GPU. `deepspeed
--num_gpus 2 examples/vision_language.py --tp 2` divides layers over ranks; without `--tp` the ranks
divide the data.

`--vision frozen` trains a model first, or loads it from `--checkpoint`. It then trains a new
projector and GPT behind the frozen tower. docs/vision-language.md has results, and how to use
another tower.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# First: `launch` suppresses Megatron's warnings about its imports.
from launch.common.command_line import Parser

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("importing torch, DeepSpeed and Megatron-core", flush=True)  # it takes seconds

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from vision import shapes
from vision.captions import evaluate, make_batch, text_length
from vision.model import VisionLanguageModel, VisionTower

import coat_dist
import megatron_patches
from coat_dist.deepspeed.without_launcher import prepare
from megatron_patches import gpt_layer_spec, initialize_model_parallel, rng_state, set_rng_state

# Layers, width and heads of the tower and the GPT; pixels of a picture's and a patch's side;
# pictures of a step.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        vision=(2, 64, 4), language=(2, 64, 4), side=28, patch=4, batch=6, steps=30, lr=4e-3
    ),
    "small": dict(
        vision=(2, 64, 4), language=(2, 64, 4), side=28, patch=7, batch=32, steps=1000, lr=2.5e-3
    ),
    "large": dict(
        vision=(12, 384, 6), language=(12, 512, 8), side=56, patch=8, batch=256, steps=500, lr=5e-4
    ),
}
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")


def options() -> argparse.Namespace:
    parser = Parser(description=(__doc__ or "").splitlines()[0])  # its errors come from one rank
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="tiny: seconds; small: minutes; large: a GPU")
    add(
        "--block",
        choices=("coat", "bf16", "both"),
        default="both",
        help='with the "coat" block, in BF16, or both',
    )
    add(
        "--vision",
        choices=("trained", "frozen"),
        default="trained",
        help="frozen: behind a tower trained before",
    )
    add(
        "--attention",
        choices=("bf16", "fp8"),
        default="bf16",
        help="what attention keeps for backward, with coat",
    )
    add("--steps", type=int, help="optimizer steps of a run (default: the size's)")
    add("--zero", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add(
        "--checkpoint",
        type=Path,
        help="folder: a run saves there when it ends, and goes on from what it finds",
    )
    add("--output", type=Path, help="JSON file for the results")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # from the deepspeed launcher
    args = parser.parse_args()
    size, ranks = SIZES[args.size], int(os.environ.get("WORLD_SIZE", 1))
    args.steps = size["steps"] if args.steps is None else args.steps
    if args.steps < 1:
        parser.error(f"--steps: got {args.steps}, accepted: 1 or more")
    if args.attention == "fp8" and args.block == "bf16":
        parser.error(
            "--attention: got fp8 with --block bf16, accepted: bf16, as only the block keeps FP8"
        )
    if args.tp < 1 or any(n % args.tp for n in (ranks, size["vision"][2], size["language"][2])):
        parser.error(
            f"--tp: got {args.tp}, accepted: a divisor of the number of ranks, {ranks}, and of "
            "heads"
        )
    if size["batch"] % (ranks // args.tp):
        parser.error(
            f"{ranks // args.tp} data-parallel ranks: accepted: a divisor of the batch, "
            f"{size['batch']}"
        )
    for name, folder in (
        ("--checkpoint", args.checkpoint),
        ("--output", args.output and args.output.parent),
    ):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)  # now, not when everything is trained
        except OSError as problem:
            parser.error(
                f"{name}: got {getattr(args, name[2:])}, accepted: a place to write to ({problem})"
            )
    if args.output is not None and args.output.is_dir():
        parser.error(f"--output: got {args.output}, a folder, accepted: a JSON file")
    return args


def build(args: argparse.Namespace) -> VisionLanguageModel:
    size = SIZES[args.size]

    def config(part: str, **changes: Any) -> TransformerConfig:
        layers, width, heads = size[part]
        sizes = dict(num_layers=layers, hidden_size=width, num_attention_heads=heads)
        types = dict(
            bf16=True, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0
        )
        start = dict(init_method_std=0.5 * width**-0.5, use_cpu_initialization=not gpu)
        return TransformerConfig(
            **sizes, **types, **start, tensor_model_parallel_size=args.tp, **changes
        )

    vit = dict(
        normalization="LayerNorm", activation_func=F.gelu, ffn_hidden_size=4 * size["vision"][1]
    )
    tower = VisionTower(config("vision", **vit), size["side"], size["patch"])
    llama = dict(
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
    )
    llama |= dict(ffn_hidden_size=2 * size["language"][1], sequence_parallel=args.tp > 1)
    layers = config("language", **llama)
    language = GPTModel(
        layers,
        gpt_layer_spec(layers),
        vocab_size=shapes.VOCABULARY,
        max_sequence_length=text_length(tower.tokens, args.tp),
        position_embedding_type="rope",
        scatter_embedding_sequence_parallel=False,  # the picture comes first
    )
    return VisionLanguageModel(tower, size["vision"][1], language, shapes.IMAGE).to(
        device, torch.bfloat16
    )


def configuration(args: argparse.Namespace, block: str) -> dict[str, Any]:
    size = SIZES[args.size]
    schedule = {
        "total_num_steps": args.steps,
        "warmup_num_steps": max(args.steps // 10, 2),
        "warmup_type": "linear",
    }
    config = {
        "train_micro_batch_size_per_gpu": size["batch"] * args.tp // dist.get_world_size(),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.zero},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
    }
    if block == "coat":
        adamw = {"lr": size["lr"], "betas": [0.9, 0.95], "weight_decay": 0.05}
        config["optimizer"] = {"type": "CoatAdamW", "params": adamw}
        config["coat"] = {"activation": {"attention": args.attention}}
    return config


def train(
    args: argparse.Namespace,
    block: str,
    folder: Path | None,
    tower: list[torch.Tensor] | None = None,
) -> tuple[Any, list[float], float]:
    """Train a model; ``tower`` gives the weights of a frozen vision tower in front of it.

    Returns:
        The engine, the losses of its steps, and the seconds that they took.
    """
    size, model = SIZES[args.size], build(args)
    if tower is not None:
        model.vision.requires_grad_(False)
        for parameter, trained in zip(model.vision.parameters(), tower, strict=True):
            parameter.copy_(trained)
    optimizer = None
    if block == "bf16":  # the baseline: torch's AdamW over the same parameter groups
        groups = coat_dist.param_groups(model, weight_decay=0.05)
        optimizer = torch.optim.AdamW(groups, lr=size["lr"], betas=(0.9, 0.95), fused=gpu)
    config = configuration(args, block)
    engine, *_ = megatron_patches.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    if engine.coat_patch_report is not None:
        note(engine.coat_patch_report)  # both stacks of layers, the tower's and the GPT's
    if folder is not None and (folder / "latest").exists():
        try:
            engine.load_checkpoint(str(folder))
        # Of another --size, --zero or --tp, or damaged.
        except (ValueError, AssertionError, RuntimeError) as problem:
            if dist.get_rank() == 0:  # DeepSpeed alone asserts, often without words
                line = (
                    "; ".join(str(problem).split("\n"))
                    or "DeepSpeed loads only what the same --zero has saved"
                )
                print(
                    f"error: --checkpoint: got {args.checkpoint}, which does not fit: {line}",
                    file=sys.stderr,
                )
            sys.exit(2)
        note(f"{folder}: has {engine.global_steps} of {args.steps} steps")
    losses, began = [], time.perf_counter()
    rank, features = parallel_state.get_data_parallel_rank(), model.vision.tokens
    for step in range(engine.global_steps, args.steps):
        # Other data-parallel ranks draw other pictures.
        generator = torch.Generator().manual_seed(1000 * step + rank)
        scenes = shapes.sample(engine.train_micro_batch_size_per_gpu(), generator)
        images, tokens, labels, mask = make_batch(
            scenes, size["side"], features, args.tp, generator, device
        )
        # Of the caption's tokens alone.
        loss = (engine(images, tokens, labels) * mask).sum() / mask.sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % max(args.steps // 24, 5) == 0:
            note(f"step {step + 1}: loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - began
    if folder is not None and losses:
        engine.save_checkpoint(str(folder))
    return engine, losses, seconds


def run(args: argparse.Namespace, block: str) -> dict[str, Any]:
    """One variant, from random weights to the accuracy of its captions."""
    note(f"{block}: --size {args.size}, {args.steps} steps")
    if gpu:
        gc.collect()  # the variant before
        torch.cuda.reset_peak_memory_stats()
    folder, tower = None if args.checkpoint is None else args.checkpoint / block, None
    if args.vision == "frozen":
        engine, *_ = train(args, block, folder)
        vision = engine.module.vision
        # ZeRO-3 holds parts of them.
        with deepspeed.zero.GatheredParameters(list(vision.parameters())):
            tower = [p.detach().clone() for p in vision.parameters()]
        engine.destroy()
        del engine, vision
        folder = None if args.checkpoint is None else args.checkpoint / f"{block}_frozen"
        note(f"{block}: a new projector and GPT behind this tower, which is frozen")
    engine, losses, seconds = train(args, block, folder, tower)
    common = dict(side=SIZES[args.size]["side"], features=engine.module.vision.tokens, tp=args.tp)
    pictures = 16 if args.size == "tiny" else 256
    result = {
        "losses": losses,
        "seconds": seconds,
        "held_out": evaluate(engine, pictures, **common, held_out=True, examples=3),
        "trained": evaluate(engine, pictures // 4, **common, held_out=False),
    }
    for wanted, said in result["held_out"]["examples"]:
        note(f'  picture: "{wanted}", caption: "{said}"')
    if (report := engine.coat_patch_report) is not None:
        result |= {"patched": report.patched, "left": report.left}
    if gpu:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    engine.destroy()
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            "",
            "right, held-out pairs",
            "right, other pairs",
            "words, held-out pairs",
            "last loss",
            "seconds",
        ]
    ]
    for block, r in results.items():
        last = f"{sum(r['losses'][-20:]) / len(r['losses'][-20:]):.4f}" if r["losses"] else "-"
        shares = r["held_out"]["captions"], r["trained"]["captions"], r["held_out"]["words"]
        rows.append([block, *(f"{share:.1%}" for share in shares), last, f"{r['seconds']:.0f}"])
    widths = [4, *map(len, rows[0][1:])]
    return "\n".join(
        "  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows
    )


def note(text: object) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> dict[str, dict[str, Any]]:
    args = options()
    if gpu:
        torch.cuda.set_device(device)  # where Megatron builds the model
    elif "OMP_NUM_THREADS" not in os.environ:
        # Matrices are small, and threads on cores that are busy wait for one another.
        torch.set_num_threads(1)
    # `python vision_language.py` is the only rank; without a GPU nothing is compiled first.
    prepare()
    deepspeed.init_distributed()
    initialize_model_parallel(tp=args.tp, seed=1234)
    start, results = rng_state(), {}
    for block in ("bf16", "coat") if args.block == "both" else (args.block,):
        set_rng_state(start)  # both start from the same weights
        results[block] = run(args, block)
    note(f"\ncaptions of pictures that are new\n{table(results)}")
    if args.output is not None and dist.get_rank() == 0:
        about = {
            "command": sys.argv,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if gpu else "CPU",
        }
        unfinished = args.output.with_name(f"{args.output.name}.new")
        unfinished.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
        unfinished.replace(args.output)
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    results = main()
