"""Ranks of which some have a block and others have not: both are told, and nobody waits in a collective."""

import tempfile
import time

import torch

from tests.support import run_ranks

from .small_engine import CONFIG, model, quiet_deepspeed, train

SAID = (
    'ranks were started differently: a "coat" block or a CoatAdamW on rank 0, neither on rank 1; accepted: the same '
    "configuration on all ranks"
)


def one_without(rank, world, late):
    deepspeed = quiet_deepspeed()
    import coat_dist  # noqa: F401

    config = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}
    net = model()
    plain = {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-2), "config": config}
    train(deepspeed.initialize(**plain)[0], rank)  # by all: an earlier engine is nobody's mistake
    time.sleep(1.0 if rank == late else 0.0)
    try:
        deepspeed.initialize(**({"model": model(), "config": CONFIG} if rank == 0 else plain))
    except ValueError as error:
        return str(error)
    return None


def test_a_rank_without_a_block_is_named_before_ranks_would_wait_for_each_other():
    for late in (0, 1):
        assert run_ranks(2, one_without, late) == [SAID, SAID]


REFUSED = (
    "ranks were started differently: {} on rank 0, one that is refused there on rank 1; accepted: the same "
    "configuration on all ranks"
)


def one_refused(rank, world, ours):
    """Rank 1's file is cut off; it stays alive after its error."""
    from torch import distributed as dist

    deepspeed = quiet_deepspeed()
    import coat_dist  # noqa: F401

    net, started = model(), time.monotonic()
    plain = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}
    with open(cut := f"{tempfile.mkdtemp()}/ds.json", "w") as file:
        file.write('{"coat": {')
    try:
        if ours:
            deepspeed.initialize(model=net, config=CONFIG if rank == 0 else cut)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            deepspeed.initialize(model=net, optimizer=optimizer, config=plain if rank == 0 else cut)
    except ValueError as error:
        took = time.monotonic() - started
        dist.barrier()
        return str(error), took
    return None


def test_a_rank_whose_configuration_is_refused_is_named_by_the_others():
    for ours, had in ((True, 'a "coat" block or a CoatAdamW'), (False, "neither")):
        (of_0, took), (of_1, _) = run_ranks(2, one_refused, ours)
        assert of_0 == REFUSED.format(had) and "ds.json is not JSON" in of_1 and took < 20


def alone(rank, world):
    """One rank builds an engine that the other does not build."""
    from torch import distributed as dist

    from coat_dist.deepspeed import roll_call

    roll_call.PATIENCE = 0.2
    started = time.monotonic()
    if rank == 1:
        roll_call.answer(False, {})
    waited = time.monotonic() - started
    dist.barrier()
    return waited


def test_a_rank_without_a_block_does_not_wait_for_long():
    at_once, some = run_ranks(2, alone)
    assert at_once < 0.1 and 0.2 <= some < 5.0
