"""``module.forward = ...`` on modules of a layer: a block whose computation it changes stays BF16, and says so."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model

from .tiny import gradients, tiny_batch, tiny_gpt

SETTINGS = ActivationConfig()


def doubled(old):
    def forward(*args, **kwargs):
        y = old(*args, **kwargs)
        return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y

    return forward


def checkpointed(old):
    return functools.partial(checkpoint, old, use_reentrant=False)


@pytest.mark.parametrize("around", [doubled, checkpointed])
@pytest.mark.parametrize("path", ["mlp", "mlp.linear_fc1", "mlp.linear_fc2", "pre_mlp_layernorm", "input_layernorm"]
                         + ["self_attention", "self_attention.linear_qkv", "self_attention.linear_proj"])  # fmt: skip
def test_a_block_with_a_forward_of_its_own_stays_bf16(path, around, device):
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
    assert set(report.left) == {f"decoder.layers.{i}.{block}" for i in range(2)} and len(report.patched) == 2
    for reason in report.left.values():
        assert reason.endswith(f"{path.split('.')[-1]} has a forward of its own, which a patch would pass by")
    (loss, grads), (wanted, theirs) = found
    assert loss == wanted and grads.keys() == theirs.keys()
    assert all(torch.equal(grads[name], theirs[name]) for name in theirs)


def test_experts_with_a_forward_of_their_own_stay_bf16(device):
    model = tiny_gpt(num_moe_experts=2)
    experts = model.decoder.layers[0].mlp.experts
    linear = experts.local_experts[1].linear_fc2
    linear.forward = doubled(linear.forward)
    assert "linear_fc2 has a forward of its own" in patch_model(model, SETTINGS).left["decoder.layers.0.mlp.experts"]


@pytest.mark.parametrize("path", ["", "output_layer"])
def test_the_loss_of_a_model_with_a_forward_of_its_own_stays_plain(path, device):
    model = tiny_gpt()
    module = model.get_submodule(path)
    module.forward = checkpointed(module.forward)
    (said,) = patch_model(model, SETTINGS).loss.values()
    assert said.startswith("plain (") and "has a forward of its own" in said


@pytest.mark.parametrize("path", ["mlp.linear_fc1", "mlp.linear_fc2", "pre_mlp_layernorm", "input_layernorm"])
def test_a_forward_that_is_set_after_patching_is_refused(path, device):
    model, batch = tiny_gpt(), tiny_batch(1, device)
    patch_model(model, SETTINGS)
    module = model.decoder.layers[1].get_submodule(path)
    module.forward = doubled(module.forward)
    with pytest.raises(ValueError, match=f"^{path.split('.')[-1]}: got a forward that was set on the module, accepted"):
        gradients(model, batch)
    del module.forward
    gradients(model, batch)
