"""What autograd keeps, counted by storage."""

from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from coat_dist.flow.saved import saved_for_backward
from launch.train.memory_report import MemoryReport


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.weight.t()


def test_parameters_do_not_count_and_a_storage_counts_once():
    model, x = Model(), torch.randn(4, 8, requires_grad=True)
    with saved_for_backward(model) as found:
        y = model(x) + model(x)  # keeps x twice and views of the weight
    assert sum(found.values()) == 4 * 8 * 4
    y.sum().backward()
    big = torch.randn(1000)
    with saved_for_backward(Model()) as found:
        (big[:2] * torch.ones(2, requires_grad=True)).sum()
    assert sum(found.values()) == 4000, "a view keeps all of its storage"
    gone = []
    with saved_for_backward(model):
        y = x * torch.ones(8)
        y.register_hook(lambda _: gone.append(saved.expired()))
        y = y.square()
    saved = StorageWeakRef(y.grad_fn._saved_self.untyped_storage())
    y.sum().backward()
    assert gone == [True], "backward frees one after the other"


def test_master_weights_that_share_the_memory_of_weights_count_their_remainders():
    model = torch.nn.Linear(64, 2, bias=False).bfloat16()
    shard = model.weight.data.view(-1)[:64]
    low = torch.zeros(1, 256, dtype=torch.uint8)
    state = {shard: {"step": 1, "coat_m_q": torch.zeros(64, dtype=torch.uint8), "coat_p_low": low}}
    inner = SimpleNamespace(state=state)
    for own, master in ((0, shard), (4 * 64, shard.float())):
        zero = SimpleNamespace(single_partition_of_fp32_groups=[master], optimizer=inner)
        report = MemoryReport(SimpleNamespace(module=model, optimizer=zero), 1)
        report.step_done()
        rows = report.to_dict()
        assert rows["master weights"] == {"bytes": own + low.nbytes, "elements": 64}
        assert rows["optimizer moments"] == {"bytes": 64, "elements": 64}
        assert rows["parameters"] == {"bytes": 2 * 128, "elements": 128}
