"""Weight gradients of the flow into main_grad: products in fp32, added to what is there."""

import pytest
import torch

from coat_dist.flow import linear
from coat_dist.flow.core import main_grad
from coat_dist.reference.gemm import scaled_mm

from .common import ONE, Layer, settings
from .microbatches import WEIGHTS, backward, batches, with_main_grad


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_against_the_definition(products, dtype, main_dtype, invariant):
    """Products in fp32, each added and rounded once: to the bit, over several micro-batches."""
    layer = with_main_grad(Layer.random(dtype=dtype), main_dtype)
    config = settings(wgrad="main_grad", tp_invariant=invariant)
    order = ("fc2", "fc1", "back", "weight")  # of backward
    expected = {name: torch.zeros_like(getattr(layer, name).main_grad) for name in WEIGHTS}
    for x in batches(3, dtype):
        products.clear()
        backward(layer, x, config)
        # Four products of forward; dgrad and wgrad of each in turns.
        for name, (a, b, out) in zip(order, products[5::2], strict=True):
            assert out == torch.float32
            expected[name] = (expected[name].float() + scaled_mm(a, b, torch.float32)).to(
                main_dtype
            )
    for name, want in expected.items():
        got = getattr(layer, name).main_grad
        assert want.any() and got.dtype == main_dtype and torch.equal(got, want), name


@pytest.mark.parametrize("rows", [128, 300, 512])
def test_main_grad_by_blocks_of_rows(monkeypatch, rows):
    """A gradient that passes through several temporaries, the last one short."""
    monkeypatch.setattr(main_grad, "_CHUNK", 1)
    weight, x = torch.randn(rows, 48, requires_grad=True), torch.randn(20, 48)
    linear(x, weight, ONE, settings()).square().sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones_like(weight)
    linear(x, weight, ONE, settings(wgrad="main_grad")).square().sum().backward()
    assert torch.equal(weight.main_grad, 1 + expected) and weight.grad is None


def test_main_grad_and_what_autograd_is_given():
    x, config = torch.randn(20, 48), settings(wgrad="main_grad")

    def run(**attributes):
        weight = torch.nn.Parameter(torch.randn(64, 48))
        weight.main_grad = torch.ones(64, 48)
        for name, value in attributes.items():
            setattr(weight, name, value)
        linear(x, weight, ONE, config).sum().backward()
        return weight

    plain = run()
    assert plain.grad is None and not hasattr(plain, "grad_added_to_main_grad")
    ddp = run(grad_added_to_main_grad=False)
    assert (
        ddp.grad.shape == ddp.shape
        and ddp.grad.dtype == ddp.dtype
        and ddp.grad_added_to_main_grad is True
    )
    zeroed = run(grad_added_to_main_grad=False, zero_out_wgrad=True)
    assert not zeroed.grad.any() and zeroed.grad_added_to_main_grad is True


@pytest.mark.parametrize("said", ["overwrite_main_grad", "coat_zeroed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_overwritten(said, dtype):
    """Always, or the first time."""
    weight, x = torch.nn.Parameter(torch.randn(64, 48)), torch.randn(20, 48)
    linear(x, weight, ONE, settings()).sum().backward()
    weight.main_grad = torch.full((64, 48), torch.nan, dtype=dtype)
    setattr(weight, said, True)
    for times in (1, 1 if said == "overwrite_main_grad" else 2):
        linear(x, weight, ONE, settings(wgrad="main_grad")).sum().backward()
        assert torch.equal(weight.main_grad, times * weight.grad.to(dtype))


@pytest.mark.parametrize(
    ("buffer", "given"),
    [
        (None, "none"),
        (torch.zeros(64, 47), r"torch.float32 \[64, 47\]"),
        (torch.zeros(64, 48, dtype=torch.float16), r"torch.float16 \[64, 48\]"),
    ],
)
def test_main_grad_missing(buffer, given):
    weight = torch.nn.Parameter(torch.randn(64, 48))
    if buffer is not None:
        weight.main_grad = buffer
    # Forward alone needs none.
    out = linear(torch.randn(20, 48), weight, ONE, settings(wgrad="main_grad"))
    with pytest.raises(
        ValueError, match=f"weight.main_grad: got {given}, accepted .* as Megatron's"
    ):
        out.sum().backward()
