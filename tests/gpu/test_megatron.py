"""A patched Megatron model on GPUs: FP8 tensor cores, memory, and two ranks over NCCL."""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from tests.support import run_ranks
from tests.support.devices import two_gpus

SHAPE = dict(hidden_size=1024, num_attention_heads=8, ffn_hidden_size=2816, num_query_groups=8)
SEQ, BATCH, VOCAB = 1024, 2, 2048


def _model(tp=1, sp=False, layers=2, **changes):
    from tests.megatron_patches.tiny import tiny_gpt

    gpt = {"vocab_size": VOCAB, "max_sequence_length": SEQ}
    return tiny_gpt(
        num_layers=layers,
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        gpt=gpt,
        **SHAPE | changes,
    )


def _loss(model, seed=0):
    from coat_dist import flow
    from megatron_patches import tensor_parallel

    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator).cuda()
    logits = model(text[:, :-1], torch.arange(SEQ, device="cuda").expand(BATCH, -1), None)
    return flow.vocab_parallel_cross_entropy(
        logits, text[:, 1:], tensor_parallel(model.output_layer)
    ).mean()


def _activation_bytes(layers, patch):
    from megatron_patches import patch_model

    model = _model(layers=layers)
    if patch:
        patch_model(model, ActivationConfig())
    torch.cuda.synchronize()
    # A tensor counts with the whole of the cached block it happens to be given.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    loss = _loss(model)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held


def test_a_layer_holds_the_planned_bytes(one_rank):
    for patch in (False, True):
        # Libraries allocate their workspaces on first use, and keep them.
        _activation_bytes(1, patch)
    held = {
        patch: (_activation_bytes(3, patch) - _activation_bytes(1, patch)) / 2
        for patch in (False, True)
    }
    h, f, heads = SHAPE["hidden_size"], SHAPE["ffn_hidden_size"], SHAPE["num_attention_heads"]
    # both norm inputs; q, k, v and attention's output with its statistics; gate and up
    planned = 2 * (h + h // 32 + 4) + 4 * 2 * h + 4 * heads + 2 * f + 2 * f // 32
    assert planned <= held[True] / (BATCH * SEQ) < 1.1 * planned, (
        held
    )  # cosines and sines, and the allocator's rounding
    assert held[True] < 0.6 * held[False], held


def _two_ranks(rank, world, sp, scales):
    from megatron_patches import (
        check_replicas,
        initialize_model_parallel,
        install_replicated_grad_hooks,
        patch_model,
    )

    initialize_model_parallel(2)
    model = _model(2, sp, qk_layernorm=True)
    patch_model(model, ActivationConfig(forward_scales=scales))
    install_replicated_grad_hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, check_replicas(model)


@two_gpus
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_two_gpus(sp, scales):
    results = run_ranks(2, _two_ranks, sp, scales, backend="nccl")
    for losses, replicas in results:
        assert losses == results[0][0]
        assert losses[-1] < losses[0]
        assert not any(replicas.values()), replicas
