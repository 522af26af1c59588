"""Models with and without graphs, and how they train."""

from __future__ import annotations

import warnings

import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow.graphs import graph_pool
from megatron_patches import patch_model
from tests.megatron_patches.tiny import tiny_batch, tiny_gpt, tiny_loss
from tests.support import equal

GRAPHS = ActivationConfig(cuda_graphs=True)


def pair(settings: ActivationConfig = GRAPHS, **changes):
    """Two models with equal weights, patched: without and with graphs. ``changes`` are of
    Megatron's configuration.
    """
    plain, graphed = (tiny_gpt(num_layers=3, **changes) for _ in range(2))
    patch_model(plain, settings.model_copy(update={"cuda_graphs": False}))
    patch_model(graphed, settings)
    return plain, graphed


def batch(seed: int):
    return tiny_batch(seed, "cuda")


def loss_of(model, seed: int) -> torch.Tensor:
    return tiny_loss(model, batch(seed))


def hidden(tokens: int = 32) -> torch.Tensor:
    """What a layer of these models takes."""
    shape = tokens, 2, 256
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def through(layer, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    return layer(hidden_states=x, attention_mask=None, rotary_pos_emb=rope)[0]


def captured(model) -> list[int]:
    return [len(layer.coat.kind._graphs) for layer in model.decoder.layers]


def gradients(model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def same(left, right) -> bool:
    return equal(left, right)


def train(model, steps: int, seed: int = 0) -> list[float]:
    """Losses of steps of two micro-batches, evaluated in between."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(seed, seed + steps):
        for half in range(2):
            loss = loss_of(model, 2 * step + half)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, 1000 + step).item())
    return losses


def recorded() -> int:
    """How many graphs were ever captured in this process."""
    return sum(pool._recorded for pool in graph_pool._pools.values())


def heals(models) -> None:
    """Training is the same, all layers have graphs after a while, and no more are made."""
    assert train(models[0], 4, seed=40) == train(models[1], 4, seed=40)
    before = recorded()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cuda_graphs.*")
        assert train(models[0], 2, seed=50) == train(models[1], 2, seed=50)
    assert recorded() == before and min(captured(models[1])) > 0
    assert same(models[0].parameters(), models[1].parameters())
