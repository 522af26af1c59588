"""Which forward passes hold memory of the graphs' pool; on a GPU: ``tests/gpu/cuda_graphs``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from coat_dist.flow.graphs.cuda_graphs import GraphedFunction
from coat_dist.flow.graphs.graph_pool import Pass, Waiting, without_filling


def begin(waiting: Waiting, *owners: int) -> list[Pass]:
    passes = [Pass(owner) for owner in owners]
    for one in passes:
        waiting.add(one)
    return passes


def test_waiting_backward_out_of_turn():
    waiting = Waiting()
    first, second, third = begin(waiting, 1, 2, 3)
    waiting.finish(second)
    assert waiting.now() == (1,)
    with pytest.raises(RuntimeError, match=r"activation.cuda_graphs: .*overwritten"):
        waiting.finish(third)
    waiting.finish(first)
    with pytest.raises(RuntimeError, match="ran twice"):
        waiting.finish(first)
    (again,) = begin(waiting, 1)
    waiting.finish(again)


def test_graphed_function_without_gradients():
    graphs = GraphedFunction()
    x, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert graphs(lambda x, p: x + p[0], x, (weight,)).tolist() == [2, 2]
    assert graphs(lambda x, p: x + p[0], x, (weight.detach(),)).tolist() == [2, 2]
    assert not graphs._graphs


def test_graphed_function_copies_have_no_graphs():
    graphs = GraphedFunction()
    graphs._graphs["key"] = object()  # type: ignore[assignment]
    assert not copy.deepcopy(graphs)._graphs and not pickle.loads(pickle.dumps(graphs))._graphs


def test_without_filling_leaves_memory():
    """Deterministic algorithms want it; a graph would repeat it after inputs were copied there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(64).isnan().all()
        with without_filling():
            kept = [torch.empty(64) for _ in range(8)]
        assert not all(one.isnan().all() for one in kept)
        assert torch.empty(64).isnan().all()
    finally:
        torch.use_deterministic_algorithms(before)
