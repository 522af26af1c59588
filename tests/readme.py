"""README.md's programs, word for word, with the least that they take for granted around them.

The CPU tests run them on ranks that they have; on a GPU machine ``torchrun -m tests.readme NAME FOLDER`` and
``deepspeed --module tests.readme NAME FOLDER`` start them as a reader would.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def snippet(words: str) -> str:
    """The one block, or else the one piece of code in a line, that holds ``words``."""
    blocks = [b for _, b in re.findall(r"^```(python|json)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL) if words in b]
    found = blocks or [c for c in re.findall(r"`([^`\n]+)`", TEXT) if words in c]
    assert len(found) == 1, f"README has {len(found)} snippets with {words!r}"
    return found[0]


CONFIG = snippet('"train_micro_batch_size_per_gpu"')


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def losses_of(model: Any, device: torch.device, dtype: torch.dtype, update: Any, steps: int = 6) -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, 64, generator=generator).to(device, dtype)
    losses = []
    for _ in range(steps):
        loss = (model(x).float() - x.float()).square().mean()
        update(loss)
        losses.append(loss.item())
    return losses


def through_deepspeed() -> list[float]:
    """Nothing is set up before: no process group, no device."""
    Path("ds_config.json").write_text(CONFIG)
    names: dict[str, Any] = {"model": small_model()}
    exec(snippet('config="ds_config.json"'), names)
    engine, optimizer = names["engine"], names["optimizer"]
    assert type(optimizer.optimizer).__name__ == "CoatAdamW" and names["scheduler"] is None
    losses = losses_of(engine, engine.device, torch.bfloat16, lambda loss: (engine.backward(loss), engine.step()))
    assert any("coat_m_q" in s for s in optimizer.optimizer.state.values())
    return losses


def in_a_torch_loop() -> list[float]:
    device = _start()
    model = small_model().to(device)
    if dist.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    import coat_dist

    names: dict[str, Any] = {"model": model, "coat_dist": coat_dist}
    exec(snippet("optimizer = coat_dist.CoatAdamW("), names)
    optimizer = names["optimizer"]

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    losses = losses_of(model, device, torch.float32, update)
    assert any("coat_m_q" in s for s in optimizer.state.values())
    return losses


def with_megatron() -> list[float]:
    """All ranks as one tensor-parallel group, with sequence parallelism where there are several."""
    device = _start()
    import coat_dist
    from megatron_patches import initialize_model_parallel
    from tests.megatron_patches.tiny import tiny_batch, tiny_gpt, tiny_loss

    world = dist.get_world_size()
    initialize_model_parallel(world)
    config = json.loads(CONFIG) | {"coat": {}}
    model = tiny_gpt(tensor_model_parallel_size=world, sequence_parallel=world > 1)
    names: dict[str, Any] = {"model": model, "config": config, "coat_dist": coat_dist}
    exec(snippet("patch_model(model, CoatConfig"), names)
    assert names["report"].patched and not names["report"].left
    engine, losses = names["engine"], []
    for step in range(6):
        loss = tiny_loss(engine, tiny_batch(step, device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


PROGRAMS = {"deepspeed": through_deepspeed, "torch": in_a_torch_loop, "megatron": with_megatron}


def _start() -> torch.device:
    """What a program does before its model is built."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    return device


def check(name: str) -> list[float]:
    """Run a program: it learns, and a rank's memory is on its own GPU only."""
    losses = PROGRAMS[name]()
    assert losses[-1] < losses[0], losses
    for i in range(torch.cuda.device_count()):
        mine = i == int(os.environ["LOCAL_RANK"])
        assert (torch.cuda.max_memory_reserved(i) > 0) == mine, f"rank {dist.get_rank()} and GPU {i}"
    return losses


if __name__ == "__main__":
    name, folder = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    own = Path(folder, os.environ["RANK"])
    own.mkdir()
    os.chdir(own)
    Path("losses.json").write_text(json.dumps(check(name)))
    dist.destroy_process_group()
