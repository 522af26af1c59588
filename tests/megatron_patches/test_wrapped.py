"""Patched modules with something put around or into them: fully_shard, hooks, other modules and
forwards.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, unpatch_model
from tests.support import residuals_apart

from .test_grouped import EXPERTS, GROUPED_GEMM
from .tiny import BLOCKS, assert_equal, gradients, tiny_batch, tiny_gpt, tiny_loss

SETTINGS, FP8 = ActivationConfig(), ActivationConfig(attention="fp8")
WRAPPED = {
    "whole": [""],
    "layers": ["decoder.layers.0", "decoder.layers.1", ""],
    "blocks": [*BLOCKS, ""],
    "called": [
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.0.self_attention.linear_proj",
        "",
    ],
}


def wrap(model, paths):
    for path in paths:
        fully_shard(model.get_submodule(path) if path else model)


@pytest.mark.parametrize(
    ("paths", "options"),
    [
        *((paths, {}) for paths in WRAPPED),
        ("layers", {"loss": "plain"}),
        ("layers", {"attention": "fp8"}),
    ],
)
def test_unpatching_after_fully_shard(paths, options, device):
    batch, model = tiny_batch(0, device), tiny_gpt()
    plain = gradients(model, batch)
    classes = [type(m) for m in model.modules()]
    # Hooks around a block's inputs or outputs end the residual's fusion, which costs a rounding.
    inside = any("mlp" in p or "attention" in p for p in WRAPPED[paths])
    with residuals_apart() if inside else nullcontext():
        patch_model(model, ActivationConfig(**options))
    flow = gradients(model, batch)
    model.zero_grad(set_to_none=True)
    wrap(model, WRAPPED[paths])
    assert_equal(gradients(model, batch), flow)
    unpatch_model(model)
    assert_equal(gradients(model, batch), plain)
    for module, cls in zip(model.modules(), classes, strict=True):
        if isinstance(module, FSDPModule):
            assert type(module).__name__ == f"FSDP{cls.__name__}" and type(module).__mro__[2] is cls
        else:
            assert type(module) is cls


def test_cached_weights_follow_fully_shard(device):
    curves = []
    for weights in ("on_use", "cached"):
        model = tiny_gpt(**EXPERTS, **GROUPED_GEMM)
        patch_model(model, ActivationConfig(weights=weights))
        wrap(model, WRAPPED["layers"])
        optimizer, curve = torch.optim.SGD(model.parameters(), lr=0.3), []
        for step in range(3):
            curve.append(gradients(model, tiny_batch(step, device))[0])
            optimizer.step()
        curves.append(curve)
    assert curves[0] == curves[1] and curves[0][-1] < curves[0][0] - 0.2


@pytest.mark.parametrize(
    "path", ["mlp.linear_fc1", "pre_mlp_layernorm", "mlp.experts.local_experts.0.linear_fc2"]
)
def test_fully_shard_on_a_module_that_is_not_called(path, device):
    model = tiny_gpt(num_moe_experts=2) if "experts" in path else tiny_gpt()
    patch_model(model, SETTINGS)
    wrap(model, [f"decoder.layers.0.{path}", ""])
    name = path.rpartition(".")[-1]
    with pytest.raises(
        ValueError, match=f"^{name}: got fully_shard on this module alone, accepted: .* whole layer"
    ):
        tiny_loss(model, tiny_batch(0, device))


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, inner.weight


def doubled(old):
    def forward(*args, **kwargs):
        y = old(*args, **kwargs)
        return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y

    return forward


@pytest.mark.parametrize(
    ("path", "name", "around"),
    [
        ("mlp", "linear_fc1", Adapter),
        ("mlp.linear_fc1", "forward", doubled),
        ("input_layernorm", "forward", doubled),
    ],
)
def test_forward_refuses_a_replaced_module_that_is_not_called(path, name, around, device):
    """What is put into its place later, an adapter for example, would never run."""
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    holder = model.decoder.layers[0].get_submodule(path)
    setattr(holder, name, around(getattr(holder, name)))
    with pytest.raises(
        ValueError,
        match="^(linear_fc1|input_layernorm): got class .* with another forward, accepted",
    ):
        tiny_loss(model, tiny_batch(0, device))


def test_patch_model_of_wrapped_layers(device):
    """Around the whole model, layers can still be patched; around layers not, and the report
    says what to do.
    """
    model = tiny_gpt()
    fully_shard(model.decoder.layers[0])
    model.decoder.layers[1] = torch.compile(model.decoder.layers[1], backend="eager")
    with pytest.raises(ValueError, match="nothing to patch") as error:
        patch_model(model, SETTINGS)
    assert "layer class FSDPTransformerLayer (patch before fully_shard)" in str(error.value)
    assert "layer class OptimizedModule (patch before torch.compile)" in str(error.value)
    model = tiny_gpt()
    fully_shard(model)
    report = patch_model(model, SETTINGS)
    assert report.patched == BLOCKS and report.loss == {
        "output_layer": "plain (model class FSDPGPTModel)"
    }
    tiny_loss(model, tiny_batch(0, device)).backward()


A0, M0 = BLOCKS[:2]


@pytest.mark.parametrize(
    ("path", "kind", "block", "settings"),
    [
        ("mlp.linear_fc1", "forward_hook", M0, SETTINGS),
        ("pre_mlp_layernorm", "forward_hook", M0, SETTINGS),
        ("mlp", "forward_pre_hook", M0, SETTINGS),
        ("mlp", "full_backward_hook", M0, SETTINGS),
        ("mlp", "full_backward_pre_hook", None, SETTINGS),
        ("mlp", "forward_hook", None, SETTINGS),
        ("self_attention.linear_qkv", "forward_hook", A0, SETTINGS),
        ("input_layernorm", "forward_hook", A0, SETTINGS),
        ("input_layernorm", "forward_pre_hook", None, SETTINGS),
        ("self_attention.core_attention", "forward_hook", None, SETTINGS),
        ("self_attention.core_attention", "forward_hook", A0, FP8),
        ("self_attention.linear_proj", "forward_pre_hook", A0, FP8),
        ("self_attention.linear_proj", "forward_hook", None, FP8),
    ],
)
def test_patch_model_leaves_blocks_with_hooks(path, kind, block, settings, device):
    """Hooks that see the same values before and after patching keep no block in BF16."""
    model = tiny_gpt()
    module, seen = model.decoder.layers[0].get_submodule(path), []
    getattr(module, f"register_{kind}")(lambda *_: seen.append(1))
    report = patch_model(model, settings)
    kind = kind.removeprefix("full_").replace("_", " ")
    assert report.left == ({block: f"a {kind} on {path}"} if block else {})
    tiny_loss(model, tiny_batch(0, device)).backward()
    assert seen


def checkpointed(old):
    return functools.partial(checkpoint, old, use_reentrant=False)


@pytest.mark.parametrize(
    ("path", "around"),
    [
        ("mlp", checkpointed),
        ("mlp.linear_fc1", doubled),
        ("pre_mlp_layernorm", doubled),
        ("input_layernorm", doubled),
        ("self_attention", checkpointed),
        ("self_attention.linear_qkv", doubled),
    ],
)
def test_patch_model_leaves_a_block_with_a_replaced_forward(path, around, device):
    """To the bit what the block computes where a hook that does nothing keeps it in BF16."""
    batch, found = tiny_batch(1, device), []
    block = "mlp" if "mlp" in path else "self_attention"
    for hooked in (True, False):
        model = tiny_gpt()
        for layer in model.decoder.layers:
            module = layer.get_submodule(path)
            module.forward = around(module.forward)
            if hooked:
                layer.get_submodule(block).register_forward_pre_hook(lambda module, args: None)
        report = patch_model(model, SETTINGS)
        found.append(gradients(model, batch))
    assert (
        set(report.left) == {f"decoder.layers.{i}.{block}" for i in range(2)}
        and len(report.patched) == 2
    )
    for reason in report.left.values():
        assert reason.startswith("a forward of its own on ")
        assert reason.endswith(path.split(".")[-1])
    assert_equal(*found)


@pytest.mark.parametrize("path", ["", "output_layer"])
def test_loss_of_a_model_with_a_replaced_forward_stays_plain(path):
    model = tiny_gpt()
    module = model.get_submodule(path)
    module.forward = checkpointed(module.forward)
    (loss,) = patch_model(model, SETTINGS).loss.values()
    assert loss.startswith("plain (") and "a forward of its own on" in loss
