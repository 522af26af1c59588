"""A Megatron-core GPT whose layers run the FP8 precision flow, in Megatron's own loop, with FP8
moments; no DeepSpeed.

    torchrun --nproc_per_node 2 examples/megatron_loop.py

DistributedDataParallel, distributed optimizer, schedule, forward and backward, and checkpoints are
Megatron's own. This program adds patch_model, and replaces Megatron's get_megatron_optimizer. Ranks
are data-parallel. The model learns to continue sequences of numbers, on GPUs where there are some.
With a folder behind the command it saves there every ten steps, and goes on from the last save,
also on another number of ranks.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from megatron_patches import (
    get_megatron_optimizer,
    gpt_layer_spec,
    initialize_model_parallel,
    patch_model,
)

STEPS, MICRO_BATCHES, MICRO_BATCH, SEQUENCE = 30, 2, 4, 32
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")


def build():
    """Patched model, optimizer, schedule, and the report of what was patched."""
    sizes = dict(num_layers=2, hidden_size=128, num_attention_heads=4, ffn_hidden_size=256)
    llama = dict(
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
    )
    types = dict(
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=not gpu,
    )
    layers = TransformerConfig(**sizes, **llama, **types, hidden_dropout=0.0, attention_dropout=0.0)
    model = GPTModel(
        layers,
        gpt_layer_spec(layers),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    ).to(device, torch.bfloat16)
    # Or a DeepSpeed configuration with a block.
    coat = {"coat": {"activation": {"wgrad": "main_grad"}}}
    report = patch_model(model, coat)  # before DistributedDataParallel wraps the model
    if dist.get_rank() == 0:
        print(report)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(layers, ddp, model)
    layers.no_sync_func, layers.finalize_model_grads_func = model.no_sync, finalize_model_grads
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(options, [model], coat=coat)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=STEPS,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler, report


def batches(step):
    """This rank's micro-batches of a step: every number of a text is 3 more than the one before."""
    data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    positions = torch.arange(SEQUENCE, device=device).expand(MICRO_BATCH, -1)
    for _ in range(MICRO_BATCHES):
        start = torch.randint(0, 64, (MICRO_BATCH, 1), generator=data)
        text = ((start + 3 * torch.arange(SEQUENCE + 1)) % 64).to(device)
        yield text[:, :-1], positions, text[:, 1:]


def forward_step(iterator, model):
    tokens, positions, labels = next(iterator)
    # [b, s] fp32; the causal mask is built in.
    losses = model(tokens, positions, None, labels=labels)
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def state(model, optimizer, loading, codes=True):
    """What a checkpoint holds: on saving its content, on loading the places for it."""
    weights = model.module.sharded_state_dict()
    kind = {"distrib_optim_sharding_type": "fully_reshardable", "coat_codes": codes}
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, loading, metadata=kind),
    }


def save(folder, step, model, optimizer, scheduler):
    target = folder / f"step{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)  # of a save that did not end
        target.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        {
            **state(model, optimizer, False),
            "scheduler": scheduler.state_dict(),
            "step": step,
            "ranks": dist.get_world_size(),
        },
        str(target),
    )
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(target.name)
        (folder / "latest.new").replace(folder / "latest")
    dist.barrier()


def resume(folder, model, optimizer, scheduler):
    """Load the last checkpoint; the steps that it has behind it."""
    if not (folder / "latest").exists():
        return 0
    last = str(folder / (folder / "latest").read_text())
    ranks = dist_checkpointing.load_common_state_dict(last).get("ranks")
    # On another number of ranks, moments are rounded anew from fp32.
    codes = ranks == dist.get_world_size()
    loaded = dist_checkpointing.load(state(model, optimizer, True, codes), last)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    return loaded["step"]


def train(folder):
    if gpu:
        torch.cuda.set_device(device)
    # With device_id each group of Megatron's takes memory at once.
    dist.init_process_group("nccl" if gpu else "gloo")
    initialize_model_parallel()  # where there is no GPU, Megatron finds the CPU from here on
    model, optimizer, scheduler, report = build()
    forward_backward = get_forward_backward_func()
    losses = []
    for step in range(resume(folder, model, optimizer, scheduler) if folder else 0, STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        done = forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(1)
        losses.append(torch.stack([micro["loss"] for micro in done]).mean().item())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
        if folder and (step + 1) % 10 == 0:
            save(folder, step + 1, model, optimizer, scheduler)
    dist.destroy_process_group()
    return report, optimizer, losses


if __name__ == "__main__":  # dist_checkpointing starts a process that imports this file
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="for checkpoints")
    folder = parser.parse_args().folder
    if "RANK" not in os.environ:
        sys.exit("no ranks: start this with torchrun --nproc_per_node N examples/megatron_loop.py")
    report, optimizer, losses = train(folder)
