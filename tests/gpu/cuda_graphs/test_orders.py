"""Layers as CUDA graphs where forward and backward passes come in other orders than one after
the other.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cuda_graphs.models import (
    captured,
    gradients,
    heals,
    hidden,
    loss_of,
    same,
    through,
    train,
)


def test_two_passes_in_flight(models):
    """The second one runs without graphs, as both have saved something."""
    plain, graphed = models
    train(graphed, 2), train(plain, 2)
    assert captured(graphed) == [1, 1, 1]
    for order in ((0, 1), (1, 0)):
        results = []
        for model in models:
            model.zero_grad()
            losses = [loss_of(model, 50), loss_of(model, 51)]
            for i in order:
                losses[i].backward()
            results.append(gradients(model))
        assert same(*results)
    train(graphed, 1), train(plain, 1)
    assert same(plain.parameters(), graphed.parameters())


def test_passes_without_backward(models):
    """A loss that is kept while others go their way, and one that is dropped."""
    plain, graphed = models
    train(graphed, 2), train(plain, 2)
    assert captured(graphed) == [1, 1, 1]
    for model in models:
        kept = loss_of(model, 7)
        loss_of(model, 8)
        loss_of(model, 9).backward()
        kept.backward()
        loss_of(model, 10).backward()
    assert same(*(gradients(model) for model in models))


def test_no_second_backward(models):
    plain, graphed = models
    assert train(plain, 2) == train(graphed, 2)
    loss = loss_of(graphed, 3)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"activation.cuda_graphs: a layer's backward ran twice"):
        loss.backward()
    graphed.zero_grad()
    heals(models)


def test_backward_in_another_order(models):
    """Two losses of the same layers: the first layer's backward runs before the last one's.
    Never other numbers.
    """
    _, model = models
    rope, layers = model.rotary_pos_emb(32), list(model.decoder.layers)

    def call():
        x = hidden()
        first = through(layers[0], x, rope)
        return first, through(layers[1], first.detach().requires_grad_(), rope)

    for _ in range(3):
        first, second = call()
        second.sum().backward()
        first.sum().backward()
    first, second = call()
    assert captured(model)[:2] == [1, 1]
    first.sum().backward()
    with pytest.raises(RuntimeError, match="overwritten"):
        second.sum().backward()


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_an_exception_between_layers(models, when):
    for model in models:
        for seed in range(when):
            loss_of(model, seed).backward()
        layer = model.decoder.layers[1]
        whole = layer.forward

        def fails(*args, **kwargs):
            raise OSError("in the middle")

        layer.forward = fails
        with pytest.raises(OSError, match="in the middle"):
            loss_of(model, 9)
        layer.forward = whole
        del layer.forward
        model.zero_grad()
    heals(models)


def test_a_backward_that_was_not_wanted_at_first(models):
    """The loss of some steps reads the first layer alone, whose backward is captured before the
    second one's.
    """
    found = []
    for model in models:
        rope, layers = model.rotary_pos_emb(32), list(model.decoder.layers)[:2]
        torch.manual_seed(0)
        found.append([])
        for step in range(6):
            x = hidden()
            first = through(layers[0], x, rope)
            last = through(layers[1], first, rope)
            out = first if step in (1, 2) else last
            del last, first
            parameters = (
                layers[0].parameters()
                if step in (1, 2)
                else [p for one in layers for p in one.parameters()]
            )
            found[-1] += torch.autograd.grad(out, [x, *parameters], torch.randn_like(out))
            del out
    assert same(*found) and min(captured(models[1])[:2]) > 0


def test_losses_of_parts(models):
    """Of two layers that no gradient connects, first the one, then the other, then both: a backward
    that is captured while the layer below waits for none may not take that one's memory.
    """
    found = []
    for model in models:
        rope, (lower, upper) = model.rotary_pos_emb(32), list(model.decoder.layers)[:2]
        torch.manual_seed(0)
        found.append([])
        for part in (*["lower"] * 3, *["upper"] * 2, *["both"] * 4):
            x = hidden()
            first = through(lower, x, rope)
            second = through(upper, first.detach(), rope)
            losses = {"lower": first.float().sin().sum(), "upper": second.float().sin().sum()}
            del first, second
            loss = losses["lower"] + losses["upper"] if part == "both" else losses[part]
            del losses
            model.zero_grad()
            loss.backward()
            found[-1] += [
                p.grad.clone()
                for layer in (lower, upper)
                for p in layer.parameters()
                if p.grad is not None
            ]
    assert same(*found) and min(captured(models[1])[:2]) > 0


@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_optimizer_step_between_a_forward_and_the_next(models, when):
    """The loss of a call is dropped, perhaps of the one that captures; weights change; training
    goes on.
    """
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(4):
            loss = loss_of(model, seed)
            if seed != when:
                loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    heals(models)
