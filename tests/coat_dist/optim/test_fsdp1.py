"""FSDP1 is refused: before anything is built, or at the first step if the model was wrapped
after the optimizer.
"""

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from coat_dist.optim import CoatAdamW
from tests.support import run_ranks

WORDS = r"got a parameter of FullyShardedDataParallel \(FSDP1\), .*fully_shard"


def refused(rank, world, orig):
    inner = torch.nn.Linear(16, 8)
    early = CoatAdamW(inner.parameters())
    model = FullyShardedDataParallel(inner, use_orig_params=orig, device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match=WORDS):
        CoatAdamW(model.parameters())
    # Otherwise the optimizer's parameters are no longer the model's, and get no gradient.
    if orig:
        model(torch.randn(4, 16)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(TypeError, match=WORDS):
            early.step()
        assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("orig", [False, True])
def test_fsdp1_is_refused_by_name(orig):
    run_ranks(2, refused, orig)
