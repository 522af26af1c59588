"""On a GPU: CUDA graphs of layers, experts without tokens, Megatron's own optimizer over a
patched model.
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, mlp, norm_mlp
from tests.coat_dist.flow.common import Layer
from tests.support import equal, run_ranks
from tests.support.devices import captured

ONE = TensorParallel()


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("forward", "scales"), [("exact", "tensor"), ("quantized", "tensor"), ("exact", "row")]
)
def test_a_layer_in_a_cuda_graph(forward, scales, activation):
    """Forward and backward captured once; replayed on new inputs they give the bits of eager
    execution.
    """
    layer = Layer.random(
        h=128, n=192, f=256, dtype=torch.bfloat16, activation=activation, biased=True
    ).copy("cuda")
    config = ActivationConfig(forward=forward, forward_scales=scales)
    x = torch.randn(64, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weighting = torch.randn_like(x)
    leaves = [x, *layer.parameters().values()]

    def step():
        out = layer.flow(x, config, activation)
        return [out.detach(), *torch.autograd.grad(out, leaves, weighting)]

    graph, found = captured(step)
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
            weighting.normal_()
            layer.fc1.mul_(1.1)  # a weight that changed is quantized anew
        graph.replay()
        assert equal(found, step())


class Block(torch.nn.Module):
    def __init__(self, layer: Layer, settings: ActivationConfig) -> None:
        super().__init__()
        for name in ("norm_weight", "fc1", "fc2"):
            setattr(self, name, torch.nn.Parameter(getattr(layer, name).detach().clone()))
        self.layer, self.settings = layer, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = Layer(**vars(self.layer) | {"norm_weight": self.norm_weight}).norm
        y, x = norm_mlp(x, norm, self.fc1, self.fc2, "swiglu", ONE, self.settings, residual=True)
        return x + y


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_graphed_callables(scales):
    """torch.cuda.make_graphed_callables captures forward and backward apart; both give the bits
    of eager execution.
    """
    layer = Layer.random(h=128, f=256, dtype=torch.bfloat16).copy("cuda")
    eager, graphed = (Block(layer, ActivationConfig(forward_scales=scales)) for _ in range(2))
    x = torch.randn(64, 4, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.make_graphed_callables(graphed, (x.clone().requires_grad_(),))
    for _ in range(2):
        x, weighting = torch.randn_like(x), torch.randn_like(x)
        results = []
        for block in (eager, graphed):
            leaf = x.clone().requires_grad_()
            out = block(leaf)
            grads = torch.autograd.grad(out, [leaf, *block.parameters()], weighting)
            results.append([out.detach().clone(), *(g.clone() for g in grads)])
        assert equal(*results)


@pytest.mark.parametrize("tokens", [0, 1, 17, 130])
@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_experts_take_any_number_of_tokens(tokens, activation, scales):
    layer = Layer.random(h=128, f=256, activation=activation, biased=True).copy("cuda")
    x = torch.randn(tokens, 128, device="cuda", requires_grad=True)
    config = ActivationConfig(forward_scales=scales)
    out = mlp(x, layer.fc1, layer.fc2, activation, ONE, config, layer.fc1_bias)
    leaves = [x, layer.fc1, layer.fc1_bias, layer.fc2]
    weighting = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, leaves, weighting)]
    expected = layer.plain_mlp(x, activation)
    expected = [expected, *torch.autograd.grad(expected, leaves, weighting)]
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and (a - b).norm() <= 0.16 * b.norm()


def _megatron_training(rank, world):
    """Losses of a GPT-2-like model, with every kind of bias, in BF16 and in FP8."""
    from megatron_patches import initialize_model_parallel
    from tests.megatron_patches.test_optimizer import Run

    initialize_model_parallel(1)
    biased = {
        "activation_func": torch.nn.functional.gelu,
        "gated_linear_unit": False,
        "add_bias_linear": True,
    }
    return [Run(model=biased, patch=patch).train(range(20)) for patch in (False, True)]


@pytest.mark.parametrize("world", [1, 2])
def test_megatrons_distributed_optimizer(world):
    """Its DistributedDataParallel and DistributedOptimizer over NCCL, without DeepSpeed: FP8
    learns as BF16 does.
    """
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    for plain, fp8 in run_ranks(world, _megatron_training, backend="nccl"):
        assert fp8 != plain and fp8[-1] < fp8[0] - 0.5
        assert all(abs(b - a) < 0.05 * a for a, b in zip(plain, fp8, strict=True)), (plain, fp8)
