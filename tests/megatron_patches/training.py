"""Training steps of a tiny model at some tensor-parallel size, by a plain AdamW, and its parameters put together."""

from __future__ import annotations

import torch

from coat_dist.config import ActivationConfig

__all__ = ["INVARIANT", "MasterAdamW", "train", "whole_parameters"]

INVARIANT = ActivationConfig(tp_invariant=True)


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
    from megatron.core import parallel_state

    from megatron_patches import check_replicas, initialize_model_parallel, install_replicated_grad_hooks, patch_model
    from tests.megatron_patches.tiny import NARROW, tiny_batch, tiny_gpt, tiny_loss

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    initialize_model_parallel(tp)
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
