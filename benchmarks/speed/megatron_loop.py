"""Megatron-core's own loop: FP8 layers and moments beside Transformer Engine's, and a checkpoint
for other ranks.

    python -m benchmarks.speed.megatron_loop --ranks 2 --peers DIR
    python -m benchmarks.speed.megatron_loop --ranks 2 --tensor-parallel 2 --micro-batch 4 \\
        --peers DIR --name NAME

Each variant has processes of its own, one a GPU: 8 layers of Llama-2-7B with Megatron's overlapped
reductions and gathers, distributed optimizer, fp32 gradients and schedule. "coat" adds what
``examples/megatron_loop.py`` adds. Peers have Transformer Engine's layers, which add to
``main_grad``, and its AdamW; "TE fp8" has 16-bit remainders and BF16 moments, Megatron's
precision-aware optimizer. Ratios are to "TE fp8", gaps to "bf16", else to the first variant. A
smaller model then saves a ``torch_dist`` checkpoint half-way, which ``--resume-ranks`` ranks load;
they take the same steps as the run that goes on. Writes ``speed/megatron-loop-N-ranks.json``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import argument_parser, check_peers, one_line, positive_int
from benchmarks.common import loss_gaps, options, show, write_result
from benchmarks.ranks import as_rank, run_variant
from benchmarks.speed.hf import noisy_text, timed_steps
from benchmarks.speed.te_layer import unpack
from benchmarks.speed.te_train import peer_environment, te_layers
from launch.model.model_config import load_model_config

WARM_UP = 10
PROGRAM = "benchmarks.speed.megatron_loop"
PEERS = {  # recipe of the layers, and type of the moments
    "TE bf16": ("none", torch.float32),
    "TE fp8": ("delayed", torch.bfloat16),
    "TE fp8, fp8 moments": ("delayed", torch.uint8),  # Megatron's name for FP8 there
}
BLOCKS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "coat, bf16 layers": {"coat": {"activation": {"enabled": False}}},
    "coat": {"coat": {"activation": {"wgrad": "main_grad"}}},
    "coat, logits kept": {"coat": {"activation": {"wgrad": "main_grad", "loss": "kept"}}},
}


def build(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, optimizer and schedule of a variant."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    import megatron_patches
    from launch.model.gpt import build_model

    recipe, moments = PEERS.get(case["variant"], ("", torch.float32))
    coat, precision = BLOCKS.get(case["variant"]), {}
    if moments != torch.float32:
        precision = {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": moments,
            "exp_avg_sq_dtype": moments,
        }
    shape = load_model_config(case["model"], case["model_override"])
    tp = case["tensor_parallel"]
    with te_layers(recipe) if recipe else nullcontext():
        model: Any = build_model(shape, tp=tp, sequence_parallel=tp > 1)
    for module in model.modules():
        # Asked for before, Megatron's output layer would need Apex.
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    if coat is not None and coat["coat"]["activation"].get("enabled", True):
        megatron_patches.patch_model(model, coat)
    both = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, **both)
    chunk = DistributedDataParallel(model.config, ddp, model)
    model.config.no_sync_func = chunk.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    adam = {
        "optimizer": "adam",
        "lr": case["lr"],
        "min_lr": 0.0,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
    }
    settings = OptimizerConfig(
        **adam, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16, **both, **precision
    )
    if coat is None:
        optimizer = get_megatron_optimizer(settings, [chunk])
    else:
        optimizer = megatron_patches.get_megatron_optimizer(settings, [chunk], coat=coat)
    rate = {"init_lr": 0.0, "max_lr": case["lr"], "min_lr": 0.0, "lr_decay_style": "constant"}
    rate |= {"lr_warmup_steps": case["steps"] // 2, "lr_decay_steps": case["steps"] + 1}
    decay = {
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": case["steps"],
        "wd_incr_style": "constant",
    }
    return chunk, optimizer, OptimizerParamScheduler(optimizer, **rate, **decay)


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The record of a variant; with a folder it saves there before the step ``save_at``, or goes
    on from there.
    """
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from examples import megatron_loop as example
    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(case["tensor_parallel"])
    model, optimizer, schedule = build(case)
    first = 0
    if case.get("resume"):
        first = example.resume(Path(case["folder"]), model, optimizer, schedule)
    shape = load_model_config(case["model"], case["model_override"])
    rank = parallel_state.get_data_parallel_rank()
    own = case["global_micro_batches"] // parallel_state.get_data_parallel_world_size()
    micro_batch, length = case["micro_batch"], shape.seq_length
    positions = torch.arange(length, device=device).expand(micro_batch, -1)
    sizes = {"num_microbatches": own, "seq_length": length, "micro_batch_size": micro_batch}
    forward_backward = get_forward_backward_func()

    def texts(step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """This rank's micro-batches; those of all ranks are the same for any number of them."""
        for i in range(own):
            seed = case["global_micro_batches"] * step + rank * own + i
            text = noisy_text(seed, micro_batch, length + 1, shape.padded_vocab).to(device)
            yield text[:, :-1].contiguous(), positions, text[:, 1:].contiguous()

    def step(batch: tuple[int, list[tuple[torch.Tensor, ...]]]) -> torch.Tensor:
        if batch[0] == case.get("save_at") and not case["resume"]:
            # Gathers what the last step updated: weights are saved by one rank.
            model.disable_forward_pre_hook()
            example.save(Path(case["folder"]), batch[0], model, optimizer, schedule)
            model.enable_forward_pre_hook()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        done = forward_backward(
            forward_step_func=example.forward_step,
            data_iterator=iter(batch[1]),
            model=[model],
            forward_only=False,
            **sizes,
        )
        optimizer.step()
        schedule.step(1)
        return torch.stack([micro["loss"] for micro in done]).mean()

    tokens = case["global_micro_batches"] * micro_batch * length / case["ranks"]
    batches = ((n, list(texts(n))) for n in range(first, case["steps"]))
    yield timed_steps(step, batches, tokens, WARM_UP, device)


def compare(variants: Sequence[dict[str, Any]]) -> None:
    """Add ratios to Transformer Engine's FP8, and gaps of losses to BF16's, and print all."""
    ran = {one["variant"]: one["steps"][0] for one in variants if one["steps"]}
    for one in variants:
        for step in one["steps"]:
            base, bf16 = (ran.get(name, next(iter(ran.values()))) for name in ("TE fp8", "bf16"))
            speed = step["tokens_per_second_per_gpu"]
            step["tokens_per_second_ratio"] = speed / base["tokens_per_second_per_gpu"]
            step["peak_ratio"] = step["peak_gib"] / base["peak_gib"] if base["peak_gib"] else 1.0
            step |= loss_gaps(step["losses"], bf16["losses"])
            show(
                one["variant"],
                step,
                step_ms=".1f",
                tokens_per_second_per_gpu=",.0f",
                tokens_per_second_ratio=".3f",
                peak_gib=".1f",
                peak_ratio=".3f",
                largest_loss_gap=".2%",
                last_ten_loss_gap="+.2%",
            )
        if ends := {k: v for k, v in one.items() if k not in ("variant", "steps")}:
            print(f"{one['variant']:<20} {ends}", flush=True)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        peers=None,
        ranks=1,
        tensor_parallel=1,
        model="llama2-7b",
        model_override=[],
        layers=8,
        micro_batch=2,
        steps=50,
        lr=1e-5,
        resume_layers=2,
        limit=240.0,
        name=None,
    )
    parser.add_argument(
        "--variants", nargs="+", choices=[*PEERS, *BLOCKS], default=None, metavar="NAME"
    )
    parser.add_argument(
        "--resume-ranks", type=positive_int, nargs="*", metavar="N", help="default: 1 and --ranks"
    )
    arguments = parser.parse_args(given)
    arguments.variants = arguments.variants or [*(PEERS if arguments.peers else ()), *BLOCKS]
    if not arguments.peers and (named := [v for v in arguments.variants if v in PEERS]):
        parser.error(
            f"--variants: got {named[0]!r} without --peers, accepted: with a folder of Transformer "
            "Engine"
        )
    if arguments.resume_ranks is None:
        arguments.resume_ranks = sorted({1, arguments.ranks})
    if arguments.name is None:
        plural = "s" if arguments.ranks > 1 else ""
        arguments.name = f"megatron-loop-{arguments.ranks}-rank{plural}"
    return arguments


def resumed(case: dict[str, Any], ranks: Sequence[int], limit: float) -> list[dict[str, Any]]:
    """Losses of a whole run, and of those that go on from its checkpoint on other ranks, beside
    its own.
    """
    half, found = case["steps"] // 2, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for number in (case["ranks"], *ranks):
            own = case | {"folder": folder, "save_at": half, "resume": bool(found), "ranks": number}
            own["tensor_parallel"] = min(case["tensor_parallel"], number)
            one = run_variant(own, limit, PROGRAM)
            losses = [loss for step in one.pop("steps") for loss in step["losses"]]
            one |= {"ranks": number, "losses": losses}
            if losses and found and (rest := found[0]["losses"][half:]):
                one |= {"same": losses == rest, **loss_gaps(losses, rest)}
            found.append(one)
            print("resumed:" if found[1:] else "whole:", one, flush=True)
    return found


def main() -> None:
    arguments = parse()
    case = options(arguments, "variants", "limit", "resume_ranks", "resume_layers", "layers")
    data_parallel = arguments.ranks // arguments.tensor_parallel
    case |= {"sizes": [arguments.micro_batch], "global_micro_batches": data_parallel}
    small = case | {"variant": "coat", "steps": 12, "lr": 10 * arguments.lr}
    for one, layers in ((case, arguments.layers), (small, arguments.resume_layers)):
        one["model_override"] = [*arguments.model_override, f"num_layers={layers}"]
    with one_line():
        load_model_config(case["model"], case["model_override"])
        if arguments.peers is not None:
            check_peers(arguments.peers)
    found: dict[str, Any] = {"settings": options(arguments), "variants": [], "resumed": []}
    with tempfile.TemporaryDirectory() as folder:
        te = unpack(arguments.peers, folder) if arguments.peers else None
        for variant in arguments.variants:
            print(f"== {variant}", flush=True)
            variables: dict[str, str] = {}
            if variant in PEERS:
                variables = peer_environment(te, arguments.tensor_parallel)
            one = run_variant(case | {"variant": variant}, arguments.limit, PROGRAM, variables)
            found["variants"].append(one)
            compare(found["variants"])
            write_result(f"speed/{arguments.name}", found, arguments.output, nan=True)
    if arguments.resume_ranks:
        found["resumed"] = resumed(small, arguments.resume_ranks, arguments.limit)
        write_result(f"speed/{arguments.name}", found, arguments.output, nan=True)


if __name__ == "__main__":
    as_rank(measure)
    main()
