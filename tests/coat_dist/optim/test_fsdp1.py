"""FSDP1 is refused: before anything is built, or at the first step if the model was wrapped
after the optimizer.
"""

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from coat_dist.optim import CoatAdamW, param_groups
from tests.support import run_ranks

WORDS = "CoatAdamW params: got a parameter of FullyShardedDataParallel (FSDP1), "


def wrapped(model, orig):
    return FullyShardedDataParallel(model, use_orig_params=orig, device_id=torch.device("cpu"))


def build(rank, world, orig, late):
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8))
    messages = []
    if late:
        optimizer = CoatAdamW(param_groups(inner, 0.1))
        model = wrapped(inner, orig)
        model(torch.randn(4, 16)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        calls = [optimizer.step]
    else:
        model = wrapped(inner, orig)
        before = [p.detach().clone() for p in model.parameters()]
        plain = CoatAdamW([torch.nn.Parameter(torch.ones(3))])
        calls = [
            lambda: CoatAdamW(model.parameters()),
            lambda: CoatAdamW(param_groups(model, 0.1)),
            lambda: plain.add_param_group({"params": list(model.parameters())}),
        ]
    for call in calls:
        try:
            call()
            messages.append("no error")
        except TypeError as error:
            messages.append(str(error))
    return messages, all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# Without use_orig_params the optimizer's parameters are no longer the model's: they get no
# gradient, as with any other.
@pytest.mark.parametrize(("orig", "late"), [(False, False), (True, False), (True, True)])
def test_fsdp1_is_refused_by_name(orig, late):
    for messages, unchanged in run_ranks(2, build, orig, late):
        assert all(WORDS in m and "fully_shard" in m for m in messages) and len(messages) == (
            1 if late else 3
        )
        assert unchanged
