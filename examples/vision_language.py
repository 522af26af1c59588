"""A vision-language model, LLaVA's way, in the FP8 flow: a vision transformer, a projector and a GPT, under DeepSpeed.

    python examples/vision_language.py --size tiny --block coat

That takes seconds and learns little. Without options, `python examples/vision_language.py` trains from scratch in BF16 and then
with the "coat" block until captions of pictures are right: pictures of two coloured shapes, drawn by vision/shapes.py, of pairs
that never occurred in training. It takes minutes on two CPU cores. `--size large` is for a GPU. With several ranks, `deepspeed
--num_gpus 2 examples/vision_language.py --tp 2`, ranks share layers (`--tp`) or data. `--vision frozen` trains a tower first,
and then a new projector and GPT behind it while it stays as it is. docs/vision-language.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from vision import shapes
from vision.model import VisionLanguageModel, VisionTower

import coat_dist
import megatron_patches
from coat_dist.deepspeed.without_launcher import prepare
from megatron_patches import gpt_layer_spec, initialize_model_parallel, rng_state, set_rng_state

SIZES = {  # layers, width and heads of tower and GPT; pixels of a picture's and a patch's side; batch, steps, rate
    "tiny": dict(vision=(2, 64, 2), language=(2, 64, 2), side=28, patch=7, batch=8, steps=30, lr=3e-3, test=16),
    "small": dict(vision=(3, 64, 4), language=(3, 96, 4), side=28, patch=4, batch=32, steps=1200, lr=2e-3, test=256),
    "large": dict(vision=(12, 384, 6), language=(12, 512, 8), side=56, patch=8, batch=256, steps=1500, lr=5e-4, test=1024),
}
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--size", choices=SIZES, default="small", help="tiny: seconds; small: two CPU cores; large: a GPU")
    add("--block", choices=("coat", "bf16", "both"), default="both", help='train with the "coat" block, in BF16, or both')
    add("--vision", choices=("trained", "frozen"), default="trained", help="frozen: the tower is trained in a first run")
    add("--attention", choices=("bf16", "fp8"), default="bf16", help="what attention keeps for backward, with the block")
    add("--steps", type=int, help="optimizer steps of a run (default: the size's)")
    add("--zero", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--checkpoint", type=Path, help="folder: runs save there when they end, and go on from what they find")
    add("--output", type=Path, help="JSON file for the results")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # from the deepspeed launcher
    args = parser.parse_args()
    args.steps = SIZES[args.size]["steps"] if args.steps is None else args.steps
    if args.steps < 1:
        parser.error(f"--steps: got {args.steps}, accepted: 1 or more")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.tp < 1 or ranks % args.tp or any(SIZES[args.size][part][2] % args.tp for part in ("vision", "language")):
        parser.error(f"--tp: got {args.tp}, accepted: a divisor of the {ranks} ranks and of the heads of --size {args.size}")
    if SIZES[args.size]["batch"] % (ranks // args.tp):
        parser.error(f"--size {args.size}: got {ranks // args.tp} data-parallel ranks, accepted: a divisor of the batch, "
                     f"{SIZES[args.size]['batch']}")
    return args


def build(args: argparse.Namespace) -> VisionLanguageModel:
    size = SIZES[args.size]

    def config(part: str, **changes) -> TransformerConfig:
        layers, width, heads = size[part]
        return TransformerConfig(
            num_layers=layers, hidden_size=width, num_attention_heads=heads, init_method_std=width**-0.5 / 2,
            tensor_model_parallel_size=args.tp, use_cpu_initialization=not gpu, bf16=True, params_dtype=torch.bfloat16,
            hidden_dropout=0.0, attention_dropout=0.0, **changes,
        )  # fmt: skip

    tower = VisionTower(
        config("vision", ffn_hidden_size=4 * size["vision"][1], normalization="LayerNorm", activation_func=F.gelu),
        size["side"], size["patch"],
    )  # fmt: skip
    llama = dict(gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm")
    decoder = config("language", ffn_hidden_size=2 * size["language"][1], sequence_parallel=args.tp > 1, **llama)
    language = GPTModel(
        decoder, gpt_layer_spec(decoder), vocab_size=shapes.VOCABULARY, max_sequence_length=length(args, tower.tokens),
        position_embedding_type="rope", scatter_embedding_sequence_parallel=False,
    )  # fmt: skip
    return VisionLanguageModel(tower, size["vision"][1], language, shapes.IMAGE).to(device, torch.bfloat16)


def length(args: argparse.Namespace, features: int) -> int:
    """Tokens of a text: <start>, the picture's, the caption; and filling, as sequence parallelism divides them."""
    return -(-(1 + features + shapes.CAPTION) // args.tp) * args.tp


def batch(args: argparse.Namespace, features: int, scenes: torch.Tensor, generator: torch.Generator):
    """Pictures, tokens, labels, and the mask of tokens whose labels are the caption's."""
    words = shapes.captions(scenes)
    text = torch.full((len(scenes), length(args, features) + 1), shapes.PAD)
    text[:, 0] = shapes.START
    text[:, 1 : 1 + features] = shapes.IMAGE
    text[:, 1 + features : 1 + features + shapes.CAPTION] = words
    tokens, labels = text[:, :-1], text[:, 1:]
    mask = (labels != shapes.PAD) & (labels != shapes.IMAGE)
    return [t.to(device) for t in (shapes.draw(scenes, SIZES[args.size]["side"], generator), tokens, labels, mask)]


def configuration(args: argparse.Namespace, block: str) -> dict:
    size, ranks = SIZES[args.size], dist.get_world_size() // args.tp
    warmup = {"total_num_steps": args.steps, "warmup_num_steps": max(args.steps // 10, 2), "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": size["batch"] // ranks,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.zero},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupCosineLR", "params": warmup},
    }
    if block == "coat":
        moments = {"lr": size["lr"], "betas": [0.9, 0.95], "weight_decay": 0.05}
        config["optimizer"] = {"type": "CoatAdamW", "params": moments}
        config["coat"] = {"activation": {"attention": args.attention}}
    return config


def train(args: argparse.Namespace, block: str, folder: Path | None, tower: dict | None = None):
    """Train a model from scratch; with ``tower``, the weights of a vision tower, behind that one, which is frozen."""
    model = build(args)
    if tower is not None:
        model.vision.load_state_dict(tower)
        model.vision.requires_grad_(False)
    optimizer = None
    if block == "bf16":  # the baseline: torch's AdamW over the same parameter groups
        groups = coat_dist.param_groups(model, weight_decay=0.05)
        optimizer = torch.optim.AdamW(groups, lr=SIZES[args.size]["lr"], betas=(0.9, 0.95))
    engine, *_ = megatron_patches.initialize(
        model=model, optimizer=optimizer, config=configuration(args, block), dist_init_required=False
    )
    if engine.coat_patch_report is not None:
        say(engine.coat_patch_report)  # both stacks of layers, the tower's and the GPT's
    if folder is not None and (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
    start, losses, began = engine.global_steps, [], time.perf_counter()
    per_rank, features = engine.train_micro_batch_size_per_gpu(), model.vision.tokens
    for step in range(start, args.steps):
        generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
        images, tokens, labels, mask = batch(args, features, shapes.sample(per_rank, generator), generator)
        loss = (engine(images, tokens, labels) * mask).sum() / mask.sum()  # the caption's tokens alone
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % max(args.steps // 24, 5) == 0:
            say(f"step {step + 1}: loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - began
    if folder is not None:
        engine.save_checkpoint(str(folder))
    return engine, losses, seconds


@torch.no_grad()
def caption(engine, args: argparse.Namespace, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Captions ``[b, CAPTION]``, word by word, each the likeliest. ``tokens`` end with places for them."""
    first = 1 + engine.module.vision.tokens
    tokens = tokens.clone()
    tokens[:, first:] = shapes.PAD
    for place in range(first, first + shapes.CAPTION):
        logits = gather_from_tensor_model_parallel_region(engine(images, tokens)[:, place - 1])
        if place < tokens.shape[1]:
            tokens[:, place] = logits.argmax(-1)
    return tokens[:, first : first + shapes.CAPTION]


def evaluate(engine, args: argparse.Namespace, held_out: bool) -> dict:
    """The share of captions that are right in every word, and of words, for pictures that are new."""
    engine.eval()
    right = words = total = 0
    generator = torch.Generator().manual_seed(999 + held_out)
    for _ in range(0, SIZES[args.size]["test"], 64):
        scenes = shapes.sample(min(64, SIZES[args.size]["test"]), generator, held_out)
        images, tokens, *_ = batch(args, engine.module.vision.tokens, scenes, generator)
        wanted = shapes.captions(scenes).to(device)
        said = caption(engine, args, images, tokens)
        same = (said == wanted) | (wanted == shapes.PAD)  # what follows <end> is nobody's
        right, total = right + int(same.all(1).sum()), total + len(scenes)
        words += float(same[wanted != shapes.PAD].float().mean()) * len(scenes)
    engine.train()
    if held_out:
        for want, got in zip(wanted[:3], said[:3], strict=True):
            say(f"  {shapes.sentence(want.cpu())!r}: said {shapes.sentence(got.cpu())!r}")
    return {"captions": right / total, "words": words / total, "pictures": total}


def say(text: object) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(args: argparse.Namespace, block: str, start: dict) -> dict:
    """One variant, from its weights at random to the accuracy of its captions."""
    say(f"{block}: {args.size}, {args.steps} steps")
    set_rng_state(start)  # both variants start from the same weights
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    folder = None if args.checkpoint is None else args.checkpoint / block
    tower = None
    if args.vision == "frozen":
        engine, *_ = train(args, block, None if folder is None else folder / "tower")
        with deepspeed.zero.GatheredParameters(list(engine.module.vision.parameters())):
            tower = {name: p.detach().clone() for name, p in engine.module.vision.state_dict().items()}
        engine.destroy()
        folder = None if folder is None else folder / "behind"
        say(f"{block}: the tower is frozen now")
    engine, losses, seconds = train(args, block, folder, tower)
    result = {
        "losses": losses,
        "seconds": seconds,
        "held_out": evaluate(engine, args, held_out=True),
        "trained": evaluate(engine, args, held_out=False),
    }
    if engine.coat_patch_report is not None:
        result["patched"] = engine.coat_patch_report.patched
        result["left"] = engine.coat_patch_report.left
    if gpu:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    engine.destroy()
    return result


def main() -> dict:
    args = options()
    if gpu:
        torch.cuda.set_device(device)  # where Megatron builds the model
    prepare()  # `python vision_language.py` is the only rank, and without a GPU nothing is compiled first
    deepspeed.init_distributed()
    initialize_model_parallel(tp=args.tp, seed=1234)
    start = rng_state()
    blocks = ("bf16", "coat") if args.block == "both" else (args.block,)
    results = {block: run(args, block, start) for block in blocks}
    say("\ncaptions that are right   held-out pairs   pairs of training   words, held out   last loss   seconds")
    for block, r in results.items():
        last = sum(r["losses"][-20:]) / len(r["losses"][-20:])
        new, known = r["held_out"], r["trained"]
        say(f"{block:<23} {new['captions']:>16.1%} {known['captions']:>19.1%} {new['words']:>17.1%} {last:>11.4f} {r['seconds']:>9.0f}")
    if args.output is not None and dist.get_rank() == 0:
        about = {"command": sys.argv, "torch": torch.__version__, "device": torch.cuda.get_device_name() if gpu else "cpu"}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    results = main()
