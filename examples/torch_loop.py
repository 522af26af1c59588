"""AdamW with FP8 moments in a plain torch training loop, alone or under DistributedDataParallel.

    python examples/torch_loop.py
    torchrun --nproc_per_node 2 examples/torch_loop.py

Only the optimizer differs from a loop with torch.optim.AdamW. A small model learns to continue
sequences of numbers, on GPUs where there are some. The last line says what the moments take:
torch's AdamW keeps 8 bytes a parameter.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import coat_dist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--local_rank", type=int, help="given by the deepspeed command")
parser.parse_args()
gpu = torch.cuda.is_available()
rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if "RANK" in os.environ:  # started by torchrun
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)

torch.manual_seed(0)  # the same weights on every rank
model = torch.nn.Sequential(
    torch.nn.Embedding(64, 256),
    torch.nn.Linear(256, 512),
    torch.nn.GELU(),
    torch.nn.LayerNorm(512),
    torch.nn.Linear(512, 64),
).to(device)
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)

optimizer = coat_dist.CoatAdamW(
    coat_dist.param_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95)
)

data = torch.Generator().manual_seed(1 + rank)
losses = []
for step in range(30):
    start = torch.randint(0, 64, (8, 1), generator=data)
    # [8, 33]: every number is 3 more than the one before.
    text = ((start + 3 * torch.arange(33)) % 64).to(device)
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if rank == 0 and step % 5 == 0:
        print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)

held = sum(
    t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)
)
if rank == 0:
    print(f"moments: {held / sum(p.numel() for p in model.parameters()):.3f} bytes a parameter")
if dist.is_initialized():
    dist.destroy_process_group()
