"""Many steps in which ranks' gradients are of wildly different scale: what ranks replicate stays equal to the bit."""

from __future__ import annotations

import zlib

import pytest
import torch

from tests.support import run_ranks

from .tiny import SMALL, tiny_batch, tiny_gpt, tiny_loss

ONE_LAYER = SMALL | {"num_layers": 1, "qk_layernorm": True}


def _train(rank, world, tp, stage, steps, octaves=8):
    """Checksums of all parameters, names of those that tensor-parallel ranks replicate, losses, gradient norms.

    Of tensor-parallel ranks, all but the first hold MLP weights that are ``2**octaves`` larger and smaller; of
    data-parallel ranks, each multiplies its loss by a factor of its own in every step, from 1e-6 to 1e6.
    """
    from megatron.core import parallel_state

    import megatron_patches

    megatron_patches.initialize_model_parallel(tp)
    model = tiny_gpt(tensor_model_parallel_size=tp, sequence_parallel=tp > 1, **ONE_LAYER)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dp_rank, dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_fc" in name and tp_rank:
                parameter.mul_(2.0 ** (octaves * tp_rank * (1 if "fc1" in name else -2)))  # gate times up: twice
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 3e-3}},
        "coat": {"optimizer": {}, "activation": {}},
    }
    engine, *_ = megatron_patches.initialize(model=model, config=config)
    losses, norms = [], []
    for step in range(steps):
        loss = tiny_loss(engine, _batch(dp * step + dp_rank))
        engine.backward(loss * 10.0 ** ((-1) ** dp_rank * (step % 7 - 3) * 2))
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    whole = {n: p.detach().contiguous().view(torch.uint8) for n, p in model.named_parameters()}
    sums = {n: zlib.crc32(data.numpy().tobytes()) for n, data in whole.items()}
    replicated = [n for n, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False)]
    return (tp_rank, dp_rank), sums, replicated, losses, norms


def _batch(seed):
    tokens, labels, positions = tiny_batch(seed)
    return tokens % 64, labels % 64, positions


def check(world, tp, stage, steps):
    found = run_ranks(world, _train, tp, stage, steps)
    everyone = {place: sums for place, sums, *_ in found}
    _, first, replicated, _, norms = found[0]
    assert len(replicated) == 5
    assert torch.tensor([loss for *_, losses, _ in found for loss in losses]).isfinite().all()
    assert max(norms) > 1e5 * min(norms), "gradients were of different scales"
    for (tp_rank, _), sums in everyone.items():
        assert sums == everyone[tp_rank, 0], "data-parallel ranks have the same weights"
        assert {n: sums[n] for n in replicated} == {n: first[n] for n in replicated}
    if tp > 1:
        assert any(everyone[0, 0][n] != everyone[1, 0][n] for n in first), "the others are different parts"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp", "stage"), [(2, 2, 2), (2, 1, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2), (4, 4, 2)])
def test_replicas_stay_equal_for_50_steps(world, tp, stage):
    check(world, tp, stage, 50)
