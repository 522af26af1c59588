"""Layers as CUDA graphs where a program changes parameters, hooks or shapes between calls."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import megatron_patches
from coat_dist.config import ActivationConfig
from megatron_patches import patch_model
from tests.gpu.cuda_graphs.models import (
    GRAPHS,
    captured,
    gradients,
    heals,
    loss_of,
    pair,
    same,
    train,
)
from tests.megatron_patches.tiny import tiny_gpt
from tests.support import run_ranks


@pytest.mark.parametrize("part", ["", "decoder.layers.1"])
def test_parameters_that_move(models, part):
    for model in models:
        train(model, 2)
        for p in model.get_submodule(part).parameters():
            p.data = p.data * 1.5
    heals(models)


def test_hooks_are_called(models):
    """Of parameters once; of modules in a layer, which then runs without graphs."""
    calls = []
    for model in models:
        train(model, 2)
        assert model is models[0] or captured(model) == [1, 1, 1]
        calls.append([])
        layer = model.decoder.layers[1]
        layer.mlp.linear_fc1.weight.register_hook(
            lambda grad, mine=calls[-1]: mine.append(grad.clone())
        )
        loss_of(model, 5).backward()
        layer.self_attention.register_forward_hook(
            lambda *_, mine=calls[-1]: mine.append(torch.zeros(1))
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss_of(model, 6).backward()
    assert any("layer.self_attention has a hook" in str(one.message) for one in found)
    assert len(calls[0]) == 3 and same(*calls)


def test_hooks_of_saved_tensors(models):
    """Offloading, for one: graphs save nothing that it could take, so they are neither made nor
    used.
    """
    plain, graphed = models
    for model in models:
        with torch.autograd.graph.save_on_cpu(), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for seed in range(3):
                loss_of(model, seed).backward()
        assert any("hooks of saved tensors" in str(one.message) for one in found) == (
            model is graphed
        )
    assert captured(graphed) == [0, 0, 0]
    for model in models:
        for seed in range(3):
            loss_of(model, seed).backward()
    assert captured(graphed) == [1, 1, 1]
    assert same(*(gradients(model) for model in models))


def test_parameters_that_always_move(models):
    """Captured some times, then no more; always the right numbers."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for model in models:
            for seed in range(50):
                loss_of(model, seed).backward()
                for p in model.parameters():
                    p.data = p.data * 1.001
    assert any("was captured 32 times" in str(one.message) for one in found)
    assert same(*(gradients(model) for model in models))


def test_a_parameter_that_changes_before_backward(models):
    for model in models:
        train(model, 2)
        assert model is models[0] or captured(model) == [1, 1, 1]
        loss = loss_of(model, 1)
        with torch.no_grad():
            model.decoder.layers[2].mlp.linear_fc1.weight.add_(0.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_parameter_that_moves_before_backward(models):
    _, model = models
    train(model, 2)
    assert captured(model) == [1, 1, 1]
    loss = loss_of(model, 1)
    weight = model.decoder.layers[2].mlp.linear_fc1.weight
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="activation.cuda_graphs: parameters of a layer moved"):
        loss.backward()


def test_a_norm_and_a_parameter_in_two_places():

    models = []
    for settings in (ActivationConfig(), GRAPHS):
        model = tiny_gpt(num_layers=2)
        first, second = model.decoder.layers
        first.pre_mlp_layernorm = first.input_layernorm
        second.pre_mlp_layernorm.weight = second.input_layernorm.weight
        patch_model(model, settings)
        models.append(model)
    heals(models)
    first, second = models[1].decoder.layers
    assert first.pre_mlp_layernorm is first.input_layernorm
    assert second.pre_mlp_layernorm.weight is second.input_layernorm.weight


def _fully_sharded(rank, world, parts):

    megatron_patches.initialize_model_parallel(1)
    found = []
    for model in pair():
        for layer in model.decoder.layers if parts else ():
            fully_shard(layer)
        fully_shard(model)
        found.append([])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(6):
                loss = loss_of(model, seed)
                loss.backward()
                found[-1].append(loss.item())
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
    return found


@pytest.mark.parametrize("parts", [True, False])
def test_fully_shard_on_one_rank(parts):
    ((plain, graphed),) = run_ranks(1, _fully_sharded, parts, backend="nccl")
    assert plain == graphed


def test_unfreezing_a_layer(models):
    """Its graphs cannot be made beside those of the layers below; nothing is overwritten."""
    losses = []
    for model in models:
        model.decoder.layers[1].requires_grad_(False)
        losses.append(train(model, 3))
        model.decoder.layers[1].requires_grad_(True)
        losses[-1] += train(model, 4)
    assert losses[0] == losses[1]
    heals(models)
