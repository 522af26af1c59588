"""What holds for every function of the flow: autocast changes nothing, no tokens are a number of
tokens, and ``torch.compile`` traces them whole.
"""

import importlib
import pkgutil

import pytest
import torch

from coat_dist import flow
from coat_dist.flow import function
from tests.support import equal

from .catalogue import NAMES, H, catalogue, layer_for_all, leaves

CASES = [
    ({}, torch.float32),
    ({"forward": "quantized", "forward_scales": "tensor"}, torch.bfloat16),
    ({"tp_invariant": True}, torch.float32),
]


EDGES = ("_Enter", "_GradientEdge", "_InPlaceOf")
"""Those whose backward autograd never runs, or which only pass a gradient on."""


def autograd_functions():
    pages = [
        importlib.import_module(page.name)
        for page in pkgutil.walk_packages(flow.__path__, "coat_dist.flow.")
    ]
    values = [value for page in pages for value in vars(page).values() if isinstance(value, type)]
    found = {v for v in values if issubclass(v, torch.autograd.Function)}
    return sorted(found - {function.Function}, key=str)


def run(call, layer, x, around=None):
    """Outputs and gradients; ``around``: where forward runs, "both" for backward too."""
    amp = torch.autocast("cpu", torch.bfloat16)
    with amp if around else torch.enable_grad():
        outs = call(x)
    weightings = [torch.sin(torch.arange(t.numel())).view(t.shape).to(t.dtype) for t in outs]
    with amp if around == "both" else torch.enable_grad():
        return outs, torch.autograd.grad(outs, leaves(layer, x), weightings, allow_unused=True)


@pytest.mark.parametrize(("changes", "dtype"), CASES)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "sdpa"])
def test_functions_under_autocast(name, dtype, changes):
    layer, x = layer_for_all(dtype), torch.randn(6, 2, H, dtype=dtype, requires_grad=True)
    call = catalogue(layer, **changes)[name]
    outs, grads = run(call, layer, x)
    for around in ("forward", "both"):
        others, other_grads = run(call, layer, x, around)
        assert [t.dtype for t in others] == [t.dtype for t in outs]
        assert equal((*others, *other_grads), (*outs, *grads))


@pytest.mark.parametrize(("changes", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(0, 2), (5, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_functions_of_no_tokens(name, shape, dtype, changes):
    layer, x = layer_for_all(dtype), torch.randn(*shape, H, dtype=dtype, requires_grad=True)
    some = torch.randn(4, 2, H, dtype=dtype, requires_grad=True)
    call = catalogue(layer, **changes)[name]
    outs, grads = run(call, layer, x)
    expected, expected_grads = run(call, layer, some)
    for got, wanted in zip(outs, expected, strict=True):
        assert got.shape == (*shape, *wanted.shape[2:]) and got.dtype == wanted.dtype
    assert grads[0].shape == x.shape
    for got, wanted in zip(grads[1:], expected_grads[1:], strict=True):
        assert (got is None) == (wanted is None)
        assert (
            got is None or got.shape == wanted.shape and got.dtype == wanted.dtype and not got.any()
        )


@pytest.mark.parametrize("function", [f for f in autograd_functions() if f.__name__ not in EDGES])
def test_backward_of_every_function_refuses_create_graph(function):
    with torch.enable_grad(), pytest.raises(RuntimeError, match="create_graph: got True"):
        function.backward(None, None)


TRACED = (
    "norm",
    "norm_linear",
    "norm_qkv",
    "linear",
    "norm_mlp",
    "mlp",
    "scale_rows",
    "invariant_linear",
)


def compiled_is_the_same(call, layer, x, backend):
    """Of one graph, outputs and gradients are those without compilation; the first output is
    changed in place.
    """

    def changed(t):
        first, *others = call(t)
        return [first.mul_(2), *others]

    torch.compiler.reset()
    # An error where the graph breaks.
    compiled = torch.compile(changed, backend=backend, fullgraph=True)
    assert equal(run(compiled, layer, x), run(changed, layer, x))


@pytest.mark.long
@pytest.mark.parametrize("name", TRACED)
def test_functions_compiled_without_a_graph_break(name):
    layer, x = layer_for_all(), torch.randn(6, 2, H, requires_grad=True)
    compiled_is_the_same(catalogue(layer)[name], layer, x, "eager")


@pytest.mark.long
def test_norm_mlp_with_a_residual_compiled_through_aot_autograd():
    layer, x = layer_for_all(), torch.randn(6, 2, H, requires_grad=True)
    compiled_is_the_same(catalogue(layer, residual=True)["norm_mlp"], layer, x, "aot_eager")
