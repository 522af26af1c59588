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


def called(rank, world, configs, late, words, folder):
    """Each rank's call raises the same, after an engine of a plain program on all of them; ranks
    stay alive.
    """
    deepspeed = quiet_deepspeed()
    import coat_dist

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
    with pytest.raises(coat_dist.CoatConfigError) as error:
        deepspeed.initialize(
            model=net,
            config=config,
            optimizer=None if named else torch.optim.AdamW(net.parameters(), lr=1e-2),
        )
    assert words in str(error.value) and time.monotonic() - started < 20
    dist.barrier()


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
    run_ranks(2, called, configs, late, words, tmp_path)


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
