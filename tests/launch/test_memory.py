"""What autograd keeps, counted by storage."""

import torch

from launch.memory import saved_for_backward


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


def test_a_view_keeps_all_of_its_storage():
    big = torch.randn(1000)
    with saved_for_backward(Model()) as found:
        (big[:2] * torch.ones(2, requires_grad=True)).sum()
    assert big.untyped_storage().data_ptr() in found and sum(found.values()) == 4000


def test_nothing_is_kept_without_gradients():
    with torch.no_grad(), saved_for_backward(Model()) as found:
        Model()(torch.randn(4, 8))
    assert not found
