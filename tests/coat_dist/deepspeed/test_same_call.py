"""A rank whose call is passed on to DeepSpeed, beside one that compares what ranks run, is named and not waited for."""

import time

import pytest

from coat_dist.config import CoatConfigError
from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed
from tests.support import run_ranks

PLAIN = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
del PLAIN["coat"]


def calls(rank, world):
    """Who is named, by what rank 0 does while rank 1 waits for it."""
    deepspeed = quiet_deepspeed()
    import torch.distributed as dist

    import coat_dist  # noqa: F401
    from coat_dist.deepspeed import same_call

    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=PLAIN)
    noted = same_call._store().get(f"coat_dist/passed_on/{rank}")
    deepspeed.initialize(model=model(), config=CONFIG)  # engines of both kinds, in the same order on all ranks
    same_call.PATIENCE, named = 0.2, []
    if rank == 0:
        time.sleep(1)
    same_call.wait_for_the_others()  # a late rank is waited for
    if rank == 0:
        same_call.leave_note({})
    else:
        with pytest.raises(CoatConfigError) as error:
            same_call.wait_for_the_others()
        named.append(str(error.value))
    dist.barrier()
    return hasattr(engine, "coat_attached"), noted, named


def test_a_rank_that_goes_elsewhere_is_named():
    (attached, noted, _), (_, _, named) = run_ranks(2, calls)
    assert not attached and noted == b"1"
    assert named == ['ranks were started differently: "coat" or "CoatAdamW" on rank 1, neither of them on rank 0']
