"""Late logits are like any tensor, whatever a program does with them."""

import random
import weakref
from contextlib import suppress
from operator import methodcaller

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from coat_dist.hf import late, late_answers

WORDS = 7


class Doubled(torch.autograd.Function):
    forward = staticmethod(lambda _, x: x.detach())
    backward = staticmethod(lambda _, grad: grad * 2)


NAMES = {
    (): ("unbind", "contiguous", "clone", "double", "detach", "requires_grad_", "tanh", "exp"),
    (-1,): ("softmax", "log_softmax", "sum", "logsumexp", "argmax"),
    (0.7,): ("mul", "div", "mul_", "div_", "fill_"),
    (0,): ("__getitem__", "squeeze", "softmax"),
    (0, 1): ("transpose", "flatten"),
    (-1, WORDS): ("reshape",),
}
OPERATIONS = (
    *(methodcaller(name, *given) for given, names in NAMES.items() for name in names),
    lambda x: x[:, 1:],
    lambda x: x.softmax(-1) * x.log_softmax(-1),
    lambda x: x.gather(-1, ids(x)[..., None]),
    lambda x: F.cross_entropy(x.reshape(-1, WORDS), ids(x).flatten(), ignore_index=2),
    lambda x: F.cross_entropy(x.reshape(-1, WORDS), ids(x).flatten(), reduce=False),
    lambda x: checkpoint(torch.logsumexp, x, -1, use_reentrant=True),
    Doubled.apply,
)
OF_TWO = torch.mul, torch.Tensor.copy_, lambda x, y: x.detach() * y


def ids(x):
    return torch.arange(x[..., 0].numel()).view(x.shape[:-1]) % x.shape[-1]


def made(is_late, dtype=torch.float32):
    """Logits, and what they are made of."""
    head = torch.nn.Linear(4, WORDS, dtype=dtype)
    hidden = torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)
    if is_late:
        return late.MakeLate.apply(hidden * 1, head.weight, head.bias, head), hidden, head
    return head(hidden * 1).clone(), hidden, head


def outcome(seed, is_late):
    """What a random program leaves; nothing where its gradients are an error."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits, hidden, head = made(is_late)
    live = [logits]
    for _ in range(7):
        operation = rng.choice(OPERATIONS + OF_TWO * 3)
        given = [rng.choice(live) for _ in range(1 + (operation in OF_TWO))]
        has_graph = torch.set_grad_enabled(rng.random() < 0.8)
        with has_graph, suppress(RuntimeError, IndexError, ValueError):
            out = operation(*given)
            live += out if isinstance(out, tuple) else [out]
    try:
        parts = [(t.double() * torch.randn(t.shape)).sum() for t in live if t.requires_grad]
        sum(parts, hidden.sum()).backward()
    except RuntimeError:
        return ()
    storages = [t.untyped_storage().data_ptr() for t in live]
    about = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in live]
    leaves = [t.grad for t in (hidden, *head.parameters(), *live) if t.is_leaf]
    return about, [*map(storages.index, storages)], [t.detach() + 0 for t in live], leaves


def test_random_programs(monkeypatch):
    monkeypatch.setattr(late_answers, "_PART", 2 * WORDS)
    for seed in range(500):
        wanted = outcome(seed, False)
        found = outcome(seed, True)[: len(wanted)]
        assert found[:2] == wanted[:2], seed
        torch.testing.assert_close(found[2:], wanted[2:], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_hooks_on_logits_are_called_or_refused():
    logits, hidden, _ = made(True)
    logits.register_hook(torch.zeros_like)
    logits.logsumexp(-1).sum().backward()
    assert not hidden.grad.any()
    logits, *_ = made(True)
    logits.logsumexp(-1)
    with pytest.raises(RuntimeError, match="logits: got a look at their gradient .* accepted"):
        logits.retain_grad()


def test_detached_logits_hold_no_graph_and_no_copy_of_the_weight():
    logits, *_ = made(True, torch.bfloat16)
    logits.logsumexp(-1).sum().backward()
    graph, kept = weakref.ref(logits.grad_fn.hidden), logits.detach()
    del logits
    assert graph() is None and kept.late.product.wide() is None
