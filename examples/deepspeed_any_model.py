"""Any model under DeepSpeed ZeRO with FP8 moments: a DeepSpeed program with one more import.

    deepspeed --num_gpus 2 examples/deepspeed_any_model.py

Start it from the root of this repository: examples/deepspeed.json, which names the optimizer and
has the "coat" block, is read from there. A small model learns to continue sequences of numbers, on
GPUs where there are some. The last line says what the moments take; torch's AdamW keeps 8 bytes of
them a parameter.
"""

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F

import coat_dist  # noqa: F401  from here on, deepspeed.initialize honours the "coat" block

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(64, 256),
    torch.nn.Linear(256, 512),
    torch.nn.GELU(),
    torch.nn.LayerNorm(512),
    torch.nn.Linear(512, 64),
)
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model, config="examples/deepspeed.json"
)

rank = dist.get_rank()
data = torch.Generator().manual_seed(1 + rank)
losses = []
for step in range(30):
    start = torch.randint(0, 64, (8, 1), generator=data)
    # [8, 33]: every number is 3 more than the last.
    text = ((start + 3 * torch.arange(33)) % 64).to(engine.device)
    loss = F.cross_entropy(engine(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if rank == 0 and step % 5 == 0:
        print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)

# Of this rank's shards: optimizer is ZeRO's, which holds the CoatAdamW.
states = optimizer.optimizer.state
held = sum(t.nbytes for state in states.values() for t in state.values() if torch.is_tensor(t))
if rank == 0:
    print(f"moments: {held / sum(p.numel() for p in states):.3f} bytes a parameter")
dist.destroy_process_group()
