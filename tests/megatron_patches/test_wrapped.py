"""Patched modules with something put around or into them: fully_shard, parametrizations, hooks, other modules."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, unpatch_model
from tests.support import residuals_apart

from .tiny import BLOCKS, tiny_batch, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()


def wrap(model, paths):
    for path in paths:
        fully_shard(model.get_submodule(path) if path else model)


def loss_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = tiny_loss(model, batch)
    loss.backward()
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return loss.item(), whole


def assert_same(found, expected, device):
    assert found[0] == expected[0]
    if device == "cpu":
        for name, gradient in expected[1].items():
            assert torch.equal(found[1][name], gradient), name


WRAPPED = {
    "whole": [""],
    "layers": ["decoder.layers.0", "decoder.layers.1", ""],
    "blocks": [*BLOCKS, ""],
    "called": ["decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.self_attention.linear_proj", ""],
}


@pytest.mark.parametrize("paths", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("options", [{}, {"loss": "plain"}, {"attention": "fp8"}], ids=["default", "plain", "fp8"])
def test_unpatching_after_fully_shard(paths, options, device):
    if options and len(paths) != 3:
        pytest.skip("once is enough")
    batch, model = tiny_batch(0, device), tiny_gpt()
    plain = loss_and_gradients(model, batch)
    classes = [type(m) for m in model.modules()]
    # Hooks around a block's inputs or outputs end the residual's fusion, which costs a rounding.
    inside = any("mlp" in p or "attention" in p for p in paths)
    with residuals_apart() if inside else nullcontext():
        patch_model(model, ActivationConfig(**options))
    flow = loss_and_gradients(model, batch)
    model.zero_grad(set_to_none=True)
    wrap(model, paths)
    assert_same(loss_and_gradients(model, batch), flow, device)
    unpatch_model(model)
    assert_same(loss_and_gradients(model, batch), plain, device)
    for module, cls in zip(model.modules(), classes, strict=True):
        if isinstance(module, FSDPModule):
            assert type(module).__name__ == f"FSDP{cls.__name__}" and type(module).__mro__[2] is cls
        else:
            assert type(module) is cls
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(model)


def test_weights_that_are_kept_as_codes_follow_the_shards(device):
    curves = []
    for weights in ("on_use", "cached"):
        model = tiny_gpt()
        patch_model(model, ActivationConfig(weights=weights))
        wrap(model, WRAPPED["layers"])
        optimizer, curve = torch.optim.SGD(model.parameters(), lr=0.3), []
        for step in range(3):
            curve.append(loss_and_gradients(model, tiny_batch(step, device))[0])
            optimizer.step()
        curves.append(curve)
    assert curves[0] == curves[1] and curves[0][-1] < curves[0][0] - 0.2


@pytest.mark.parametrize(
    "path",
    [
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "input_layernorm",
        "pre_mlp_layernorm",
        "mlp.experts.local_experts.0.linear_fc2",
    ],
)
def test_fully_shard_on_a_module_that_is_not_called(path, device):
    model = tiny_gpt(num_moe_experts=2) if "experts" in path else tiny_gpt()
    patch_model(model, SETTINGS)
    wrap(model, [f"decoder.layers.0.{path}", ""])
    name = path.rpartition(".")[-1]
    with pytest.raises(ValueError, match=f"^{name}: got fully_shard on this module alone, accepted: .* whole layer"):
        tiny_loss(model, tiny_batch(0, device))


def test_a_module_that_replaces_a_linear_is_refused(device):
    """The new module, an adapter for example, would never be called."""

    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, inner.weight

    model = tiny_gpt()
    patch_model(model, SETTINGS)
    mlp = model.decoder.layers[0].mlp
    mlp.linear_fc1 = Adapter(mlp.linear_fc1)
    with pytest.raises(ValueError, match="linear_fc1: got class Adapter, accepted: the linear that was there"):
        tiny_loss(model, tiny_batch(0, device))


def test_patching_after_fully_shard(device):
    """Around the whole model, layers can still be patched; around layers not, and the report says what to do."""
    batch, model = tiny_batch(0, device), tiny_gpt()
    patch_model(model, ActivationConfig(loss="plain"))
    flow = loss_and_gradients(model, batch)
    unpatch_model(model)
    fully_shard(model.decoder.layers[0])
    fully_shard(model)
    report = patch_model(model, ActivationConfig(bf16_layers=(0,)))
    assert report.patched == BLOCKS[2:] and report.loss == {"output_layer": "plain (model class FSDPGPTModel)"}
    unpatch_model(model)
    report = patch_model(model, SETTINGS)
    assert report.left == dict.fromkeys(BLOCKS[:2], "layer class FSDPTransformerLayer (patch before fully_shard)")
    unpatch_model(model)
    model = tiny_gpt()
    fully_shard(model)
    assert patch_model(model, SETTINGS).patched == BLOCKS
    assert_same(loss_and_gradients(model, batch), flow, device)


def test_patching_after_torch_compile(device):
    model = tiny_gpt()
    model.decoder.layers[0] = torch.compile(model.decoder.layers[0], backend="eager")
    report = patch_model(model, SETTINGS)
    assert report.left == dict.fromkeys(BLOCKS[:2], "layer class OptimizedModule (patch before torch.compile)")


def hook(*args):
    pass


A0, M0 = BLOCKS[:2]


@pytest.mark.parametrize(
    ("path", "kind", "block"),
    [
        ("mlp.linear_fc1", "forward_pre_hook", M0),
        ("mlp.linear_fc1", "forward_hook", M0),
        ("mlp.linear_fc2", "full_backward_hook", M0),
        ("mlp.linear_fc2", "full_backward_pre_hook", M0),
        ("pre_mlp_layernorm", "forward_hook", M0),
        ("mlp", "forward_pre_hook", M0),
        ("mlp", "full_backward_hook", M0),
        ("mlp", "full_backward_pre_hook", None),
        ("self_attention.linear_qkv", "forward_hook", A0),
        ("self_attention", "forward_pre_hook", A0),
        ("self_attention", "full_backward_hook", A0),
        ("input_layernorm", "forward_hook", A0),
        ("input_layernorm", "forward_pre_hook", None),
        ("self_attention.linear_proj", "forward_hook", None),
        ("self_attention", "forward_hook", None),
        ("self_attention.core_attention", "forward_hook", None),
        ("mlp", "forward_hook", None),
        ("", "forward_pre_hook", None),
    ],
)
def test_hooks_that_would_not_run_keep_a_block_as_it_is(path, kind, block, device):
    """Hooks that see the same values before and after patching keep no block in BF16."""
    model = tiny_gpt()
    module, seen = model.decoder.layers[0].get_submodule(path), []
    getattr(module, f"register_{kind}")(lambda *_: seen.append(1))
    report = patch_model(model, SETTINGS)
    kind = kind.removeprefix("full_").replace("_", " ")
    assert report.left == ({block: f"{path} has a {kind}, which would not run or see other values"} if block else {})
    tiny_loss(model, tiny_batch(0, device)).backward()
    assert seen


@pytest.mark.parametrize(
    ("path", "kind"), [("core_attention", "forward_hook"), ("core_attention", "forward_pre_hook"),
                       ("linear_proj", "forward_pre_hook"), ("linear_proj", "forward_hook")]
)  # fmt: skip
def test_hooks_that_fp8_attention_would_pass_by(path, kind, device):
    """It does not call core_attention, and hands linear_proj its input in FP8, which a hook would not change."""
    model, seen = tiny_gpt(), []
    getattr(model.decoder.layers[0].self_attention.get_submodule(path), f"register_{kind}")(lambda *_: seen.append(1))
    report = patch_model(model, ActivationConfig(attention="fp8"))
    why = f"self_attention.{path} has a {kind.replace('_', ' ')}, which would not run or see other values"
    assert report.left == ({} if (path, kind) == ("linear_proj", "forward_hook") else {A0: why})
    tiny_loss(model, tiny_batch(0, device)).backward()
    assert seen
