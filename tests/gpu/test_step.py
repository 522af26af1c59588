"""ZeRO's steps on GPUs with fewer waits of the host: the same bits as with all of them."""

from __future__ import annotations

import pytest
import torch

from tests.support import equal, run_ranks
from tests.support.devices import two_gpus

pytestmark = two_gpus


def train(rank, world, stage, overlap, contiguous, plain=False, clip=0.5):
    """Losses, norms and weights of steps in which gradients of several sizes are reduced in many
    small buckets.
    """
    from coat_dist import initialize
    from coat_dist.deepspeed.step import step as passes
    from coat_dist.deepspeed.step.step import norm_known

    if plain:
        passes.may_leave_out_passes = lambda zero: False

    torch.manual_seed(0)
    layers = [torch.nn.Linear(n, m) for n, m in ((512, 2048), (2048, 64), (64, 3000), (3000, 512))]
    net = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlap,
            "contiguous_gradients": contiguous,
        }
        | {"reduce_bucket_size": 200_000},
        "data_types": {"grad_accum_dtype": "fp32" if stage == 2 else "bf16"},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
        "coat": {"activation": {"enabled": False}},
    }
    engine, *_ = initialize(model=net.cuda(), config=config)
    left_out = "step: the host does not wait for reductions" in engine.coat_attached
    generator, found, aside = torch.Generator().manual_seed(rank), [], torch.cuda.Stream()
    for step in range(24):
        x = torch.randn(4, 512, generator=generator).cuda().bfloat16()
        loss = (engine(x).float() - x.float()).square().mean()
        if step in (9, 15) and rank == 1:
            loss = loss * torch.nan
        engine.backward(loss)
        engine.step()
        if step % 2:  # read as the training loop reads them
            known = norm_known(engine)
            assert (known is None) == (plain or not engine.was_step_applied())
            if known is not None:
                aside.wait_event(known)
            with torch.cuda.stream(aside if known is not None else torch.cuda.current_stream()):
                norm = float(engine.get_global_grad_norm())
            torch.cuda.synchronize()
            found.append(
                (float(loss), norm, float(engine.get_global_grad_norm()), engine.was_step_applied())
            )
    return left_out, found, [p.detach().float().cpu() for p in net.parameters()]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_same_bits_without_the_waits(stage, contiguous):
    runs = [
        run_ranks(2, train, stage, overlap, contiguous, backend="nccl") for overlap in (True, False)
    ]
    for (left_out, found, weights), (none, expected, wanted) in zip(*runs, strict=True):
        assert left_out == contiguous and not none
        assert repr(found) == repr(expected)
        assert [one[3] for one in found].count(False) == 2
        assert all(one[1] == one[2] for one in found), "read beside the optimizer, and after it"
        assert equal(weights, wanted)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_same_bits_as_deepspeed(stage):
    """Buckets reduced in place. Without clipping: the norm's sums have another order."""
    runs = [
        run_ranks(2, train, stage, True, True, plain, 0.0, backend="nccl")
        for plain in (False, True)
    ]
    for (_, found, weights), (_, expected, wanted) in zip(*runs, strict=True):
        assert [one[3] for one in found] == [one[3] for one in expected]
        assert repr([one[0] for one in found]) == repr([one[0] for one in expected])
        assert equal(weights, wanted)
