"""Rows sorted by expert and back, against sorting and indexing by torch."""

import pytest
import torch

from coat_dist.flow import permute, token_order, unpermute


@pytest.mark.parametrize(
    ("tokens", "experts", "topk"), [(37, 5, 2), (8, 4, 4), (6, 9, 1), (0, 3, 2)]
)
def test_permute_order_rows_and_gradients(tokens, experts, topk):
    chosen = torch.rand(tokens, experts).topk(topk).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    expert, token = routing_map.t().nonzero().unbind(1)
    order = token_order(routing_map, topk)
    assert torch.equal(order.chosen, expert * tokens + token)
    x = torch.randn(tokens, 16, requires_grad=True)
    y = torch.randn(tokens * topk, 16, requires_grad=True)
    there, back = permute(x, order), unpermute(y, order)
    assert torch.equal(there, x[token])
    expected = torch.zeros(tokens, 16).index_add(0, token, y)
    torch.testing.assert_close(back, expected, rtol=1e-6, atol=1e-6)
    (dx,) = torch.autograd.grad(there, x, y.detach())
    torch.testing.assert_close(dx, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.autograd.grad(back, y, x.detach())[0], x.detach()[token])
