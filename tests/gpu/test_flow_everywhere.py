"""What holds for every function of the flow, on a GPU: no tokens, outputs changed in place,
means of a LayerNorm.
"""

import pytest
import torch

from coat_dist.flow import TensorParallel
from tests.coat_dist.flow.catalogue import HEADS, NAMES, H, catalogue
from tests.coat_dist.flow.common import Layer
from tests.support import equal

ONE = TensorParallel()


def layer_for(name):
    layer = Layer.random(
        h=H, n=HEADS.width if "qkv" in name else 48, kind="layernorm", dtype=torch.bfloat16
    )
    return layer.copy("cuda")


def run(call, layer, x, change=lambda t: t):
    outs = [change(t) for t in call(x)]
    return outs, torch.autograd.grad(
        outs,
        [x, *layer.parameters().values()],
        [torch.ones_like(t) for t in outs],
        allow_unused=True,
    )


@pytest.mark.parametrize("shape", [(0, 2), (5, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name, shape):
    layer = layer_for(name)
    x = torch.randn(*shape, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outs, grads = run(catalogue(layer)[name], layer, x)
    assert all(t.shape[:2] == shape for t in outs) and grads[0].shape == x.shape
    assert not any(g.any() for g in grads[1:] if g is not None)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("sdpa", "attention")])
def test_outputs_can_be_changed_in_place(name, b):
    layer = layer_for(name)
    x = torch.randn(16, b, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    call = catalogue(layer)[name]
    outs, grads = run(call, layer, x, lambda t: t * 2)
    others, other_grads = run(call, layer, x, lambda t: t.mul_(2))
    assert equal(outs, others)
    assert equal(grads, other_grads)
