"""Options of the block in transformers models: the z-loss, and what is refused because nothing
would honour it.
"""

import json

import pytest
import torch

pytest.importorskip("transformers")

from coat_dist.config import ActivationConfig, CoatConfigError
from coat_dist.deepspeed.request import validate
from coat_dist.hf import patch_model
from coat_dist.patching.report import is_patched
from tests.coat_dist.configurations import config

from .tiny import step, tiny, tokens

Z = 0.1


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_z_loss_is_added_in_training_only(name):
    model, ids = tiny(name), tokens()
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    with torch.no_grad():
        before = model.eval()(ids, labels=labels).loss
    plain = tiny(name)
    patch_model(plain, ActivationConfig(forward="quantized"))
    out = plain(ids, labels=labels)
    sums = out.logits[:, :-1].logsumexp(-1)[labels[:, 1:] != -100]
    wanted = out.loss + Z * sums.square().mean()
    wanted.backward()
    model = tiny(name)
    patch_model(model, ActivationConfig(forward="quantized", z_loss=Z))
    loss, found = step(model, ids, labels=labels)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-5)
    for name in ("lm_head.weight", "model.norm.weight"):  # others are products of rounded gradients
        torch.testing.assert_close(
            found[name], plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6
        )
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, labels=labels).loss, before)
    model.lm_head.register_forward_hook(lambda *_: None)
    why = "got 0.1 and a loss that stays plain, accepted: 0 with a forward hook on lm_head"
    with pytest.raises(CoatConfigError, match=f"^coat.activation.z_loss: {why}"):
        model.train()(ids, labels=labels)


@pytest.mark.parametrize(
    ("name", "changes", "key", "value"),
    [
        *(
            ("llama", {}, key, value)
            for key, value in (
                *(("enabled", False), ("expert_dispatch", "fp8"), ("expert_dispatch_grad", "fp8")),
                *(("tp_invariant", True), ("wgrad", "main_grad"), ("cuda_graphs", True)),
            )
        ),
        ("olmo2", {}, "attention", "fp8"),
        ("llama", {"attn_implementation": "eager"}, "attention", "fp8"),
        ("llama", {"attention_dropout": 0.1}, "attention", "fp8"),
        ("mixtral", {}, "boundaries", "fp8"),
        # Layers that are not transformers' GradientCheckpointingLayer.
        ("gpt_neox_japanese", {}, "boundaries", "fp8"),
        ("gpt_neox_japanese", {}, "recompute", 1),
    ],
)
def test_patch_model_refuses_options_without_effect(name, changes, key, value):
    model = tiny(name, **changes)
    with pytest.raises(
        CoatConfigError, match=f"^coat.activation.{key}: got {json.dumps(value)}, accepted: "
    ):
        patch_model(model, ActivationConfig(**{key: value}))
    assert not is_patched(model)
    harmless = ActivationConfig(fp8_gather=False, expert_dispatch="bf16")
    assert patch_model(model, harmless).patched
    changed = validate({"model": model, "config": config({})}).error
    assert str(changed).startswith(
        "coat.activation: got a model that is patched already with fp8_gather False where"
    )


def test_z_loss_without_an_output_layer_is_refused():
    with pytest.raises(CoatConfigError, match="z_loss: .*the model's own: no lm_head"):
        patch_model(tiny().model, ActivationConfig(z_loss=Z))
