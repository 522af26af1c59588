"""``activation.cuda_graphs`` without a GPU: what is patched, what runs as it is, what is
refused.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, patched, unpatch_model

from .tiny import NARROW, OLMO2, assert_equal, gradients, state, tiny_batch, tiny_gpt, tiny_loss

GRAPHS = ActivationConfig(cuda_graphs=True)


@pytest.mark.parametrize("options", [{}, OLMO2], ids=["norms before", "norms after"])
def test_cuda_graphs_swap_layers_and_unpatch_model_restores(options):
    model = tiny_gpt(**NARROW, **options)
    before = state(model)
    report = patch_model(model, GRAPHS)
    assert "forward and backward of 2 layers run as CUDA graphs in training" in str(report)
    for layer in model.decoder.layers:
        assert type(layer) not in {cls for cls, _ in before} and isinstance(layer, TransformerLayer)
    unpatch_model(model)
    assert state(model) == before


def test_cuda_graphs_leave_layers_with_a_bf16_block():
    model = tiny_gpt(num_layers=3, **NARROW)
    model.decoder.layers[0].mlp.linear_fc2.register_forward_hook(lambda *_: None)
    report = patch_model(model, GRAPHS.model_copy(update={"bf16_layers": (1,)}))
    assert "of 1 layers run as CUDA graphs" in str(report)
    assert "decoder.layers.0 runs without CUDA graphs: a part of it stays BF16" in report.notes
    assert [type(layer) is TransformerLayer for layer in model.decoder.layers] == [
        True,
        True,
        False,
    ]


@pytest.mark.slow
def test_cuda_graphs_warn_in_a_compiled_model():
    model = tiny_gpt(**NARROW)
    patch_model(model, GRAPHS)
    torch._dynamo.reset()
    layer = torch.compile(model.decoder.layers[0], backend="eager")
    x = torch.randn(32, 2, 128, dtype=torch.bfloat16, requires_grad=True)
    with pytest.warns(UserWarning, match="activation.cuda_graphs: .*the model is compiled"):
        y, _ = layer(x, None)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/cuda_graphs has what runs on a GPU"
)
def test_cuda_graphs_warn_on_a_cpu():
    model = tiny_gpt(**NARROW)
    with patched(model, ActivationConfig()):
        expected = gradients(model, tiny_batch(0))
    with patched(model, GRAPHS):
        with pytest.warns(
            UserWarning, match="cuda_graphs: layers run without CUDA graphs: the model is on cpu"
        ):
            assert_equal(gradients(model, tiny_batch(0)), expected)
        with warnings.catch_warnings(), torch.no_grad():  # evaluation does not claim to be graphs
            warnings.simplefilter("error")
            assert tiny_loss(model, tiny_batch(0)).item() == expected[0]
