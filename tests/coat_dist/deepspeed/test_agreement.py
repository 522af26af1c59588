"""Ranks that were called differently: every rank raises what one has found, and none waits in a
collective.
"""

import time

import pytest
import torch
import torch.distributed as dist

from tests.support import run_ranks

from .small_engine import CONFIG, PLAIN, model, quiet_deepspeed, train

CUT = '{"coat": {'


def called(rank, world, configs, late, folder):
    """What each rank's call raises, after an engine of a plain program on all of them; ranks
    stay alive.
    """
    deepspeed = quiet_deepspeed()
    import coat_dist  # noqa: F401

    net, config = model(), configs[rank]
    if late is not None:
        train(
            deepspeed.initialize(
                model=net, optimizer=torch.optim.AdamW(net.parameters()), config=PLAIN
            )[0],
            rank,
        )
        time.sleep(1.0 if rank == late else 0.0)
    if config == CUT:
        (folder / "ds.json").write_text(CUT)
        config = str(folder / "ds.json")
    started, named = time.monotonic(), isinstance(config, dict) and "optimizer" in config
    try:
        deepspeed.initialize(
            model=net,
            config=config,
            optimizer=None if named else torch.optim.AdamW(net.parameters(), lr=1e-2),
        )
    except ValueError as error:
        took = time.monotonic() - started
        dist.barrier()
        return type(error).__name__, str(error), took
    return None


@pytest.mark.parametrize(
    ("configs", "late", "words"),
    [
        *(
            ([CONFIG, PLAIN], late, 'a "coat" block or a CoatAdamW on rank 0, neither on rank 1')
            for late in (0, 1)
        ),
        *(([other, CUT], None, "ds.json is not JSON") for other in (CONFIG, PLAIN)),
        (
            [CONFIG, {**CONFIG, "gradient_clipping": "1"}],
            None,
            'gradient_clipping: got "1", accepted: a number >= 0',
        ),
    ],
)
def test_agree_raises_on_every_rank_what_one_has_found(configs, late, words, tmp_path):
    for name, text, took in run_ranks(2, called, configs, late, tmp_path):
        assert name == "CoatConfigError" and words in text and took < 20


def alone(rank, world):
    """One rank builds an engine that the other does not build."""
    from coat_dist.deepspeed import request

    request.PATIENCE = 0.2
    started = time.monotonic()
    if rank == 1:
        request.agree(request.Request({}, passed_on=True))
    waited = time.monotonic() - started
    dist.barrier()
    return waited


def test_agree_without_a_block_waits_briefly():
    at_once, some = run_ranks(2, alone)
    assert at_once < 0.1 and 0.2 <= some < 5.0
