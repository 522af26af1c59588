"""A Megatron-core GPT whose layers run the FP8 precision flow, driven by DeepSpeed with FP8
moments.

    deepspeed --num_gpus 2 examples/megatron_deepspeed.py
    python examples/megatron_deepspeed.py

All ranks are one tensor-parallel group, with sequence parallelism where there are several. The
report says which layers run the flow. The model learns to continue sequences of numbers, on GPUs
where there are some.
"""

import os

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

import megatron_patches
from coat_dist.deepspeed.without_launcher import prepare
from megatron_patches import gpt_layer_spec, initialize_model_parallel

# `python megatron_deepspeed.py` is the only rank, with a LOCAL_RANK; without a GPU nothing is
# compiled first.
prepare()
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)  # where Megatron builds the model
deepspeed.init_distributed()
rank, ranks = dist.get_rank(), dist.get_world_size()
initialize_model_parallel(tp=ranks, seed=1234)

sizes = dict(num_layers=2, hidden_size=128, num_attention_heads=4, ffn_hidden_size=256)
llama = dict(
    gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm"
)
parallel = dict(
    tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1, use_cpu_initialization=not gpu
)
types = dict(bf16=True, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0)
layers = TransformerConfig(**sizes, **llama, **parallel, **types)
model = GPTModel(
    layers,
    gpt_layer_spec(layers),
    vocab_size=64,
    max_sequence_length=32,
    position_embedding_type="rope",
).to(device, torch.bfloat16)

config = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {
        "type": "CoatAdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
    "coat": {},
}
# Patches the layers, sums gradients that DeepSpeed does not, hands over Megatron's process groups.
engine, optimizer, _, scheduler = megatron_patches.initialize(model=model, config=config)
report = engine.coat_patch_report
if rank == 0:
    print(report)  # which layers run the flow, which stay BF16, and why

# The ranks of a tensor-parallel group train on the same text.
data = torch.Generator().manual_seed(1)
positions = torch.arange(32, device=engine.device).expand(8, -1)
losses = []
for step in range(30):
    start = torch.randint(0, 64, (8, 1), generator=data)
    # [8, 33]: every number is 3 more than the last.
    text = ((start + 3 * torch.arange(33)) % 64).to(engine.device)
    # The causal mask is built in.
    loss = engine(text[:, :-1], positions, None, labels=text[:, 1:]).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if rank == 0 and step % 5 == 0:
        print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
dist.destroy_process_group()
