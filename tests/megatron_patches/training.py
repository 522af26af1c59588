"""Training steps of tiny models in ranks: by engines, or at some tensor-parallel size by a plain
AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from coat_dist.config import ActivationConfig
from tests.coat_dist.deepspeed.small_engine import FP32, settings

from .tiny import NARROW, tiny_batch, tiny_gpt, tiny_loss

INVARIANT = ActivationConfig(tp_invariant=True)


def start(tp: int = 1, **options: Any) -> None:
    """Make Megatron's process groups, in place of any that there are."""
    from megatron.core import parallel_state

    from megatron_patches import initialize_model_parallel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    initialize_model_parallel(tp, **options)


def engine_config(stage: int, **more: Any) -> dict[str, Any]:
    return settings(stage, **{**FP32, "coat": {}, **more})


def drive(
    engine: Any, batches: Iterable[Any], loss_of: Callable[..., torch.Tensor] = tiny_loss
) -> list[float]:
    """Losses of a step for each batch."""
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class MasterAdamW:
    """AdamW over fp32 copies of bf16 parameters."""

    def __init__(self, model: torch.nn.Module, lr: float = 3e-3) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.1)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def whole_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters put together over tensor-parallel ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    whole = {}
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            whole[name] = parameter.detach().clone()
            continue
        shards = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(shards, parameter.detach(), group=group)
        if "linear_fc1" in name:  # [gate; up] on each rank
            halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
            whole[name] = torch.cat([torch.cat(half) for half in halves])
        else:
            whole[name] = torch.cat(shards, parameter.partition_dim)
    return whole


def train(tp, sp, steps, settings, hooks=True, **changes):
    """Losses, initial and final whole parameters, and how far replicas are apart."""
    from megatron_patches import check_replicas, install_replicated_grad_hooks, patch_model

    start(tp)
    model = tiny_gpt(tensor_model_parallel_size=tp, sequence_parallel=sp, **NARROW | changes)
    first = whole_parameters(model)
    if settings is not None:
        patch_model(model, settings)
    hooked = install_replicated_grad_hooks(model) if hooks else []
    optimizer = MasterAdamW(model)
    losses = []
    for step in range(steps):
        loss = tiny_loss(model, tiny_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, first, whole_parameters(model), check_replicas(model), hooked
