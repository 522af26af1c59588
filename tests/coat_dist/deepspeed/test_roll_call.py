"""Ranks of which some have a block and others have not: both are told, and nobody waits in a collective."""

import time

import torch

from tests.support import run_ranks

from .small_engine import CONFIG, model, quiet_deepspeed, train

SAID = (
    'ranks were started differently: a "coat" block or a CoatAdamW on rank 0, neither on rank 1; accepted: the same '
    "configuration on all ranks"
)


def one_without(rank, world, plain_first):
    deepspeed = quiet_deepspeed()
    import coat_dist  # noqa: F401
    from coat_dist.deepspeed import roll_call

    config = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}
    net = model()
    plain = {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-2), "config": config}
    train(deepspeed.initialize(**plain)[0], rank)  # by all: an earlier engine is nobody's mistake
    try:
        if rank == 0:
            time.sleep(1.0 if plain_first else 0.0)
            deepspeed.initialize(model=model(), config=CONFIG)
        elif plain_first:
            roll_call.answer(False, plain)  # all that its call would do before DeepSpeed's collectives
        else:
            time.sleep(1.0)
            deepspeed.initialize(**plain)
    except ValueError as error:
        return str(error)
    return None


def test_a_rank_without_a_block_is_named_before_ranks_would_wait_for_each_other():
    assert run_ranks(2, one_without, False) == [SAID, SAID]
    assert run_ranks(2, one_without, True) == [SAID, None]
