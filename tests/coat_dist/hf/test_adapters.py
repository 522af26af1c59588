"""Adapters of PEFT: put on before patching, their base weights are multiplied in FP8; put on
later, never bypassed.
"""

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.hf import patch_model
from coat_dist.hf.modules import Projection

from .tiny import check_near, relative, step, tiny, tokens

peft = pytest.importorskip("peft")
LORA = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"],
    "task_type": "CAUSAL_LM",
}


def adapted(model, **more):
    found = peft.get_peft_model(model, peft.LoraConfig(**LORA, **more))
    torch.manual_seed(1)
    for name, p in found.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1)
    return found.train()


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_patch_model_with_adapters(name):
    model = adapted(tiny(name))
    wanted = step(model)
    report = patch_model(model, ActivationConfig())
    assert any("self_attn" in block for block in report.patched), report
    assert report.unfused.keys() >= {block for block in report.patched if "self_attn" in block}
    fp8 = [n for n, m in model.named_modules() if isinstance(m, Projection)]
    assert [n.rpartition("self_attn.")[2] for n in fp8[:2]] == ["q_proj.base_layer", "k_proj"], (
        "base weights in FP8"
    )
    found = step(model)
    check_near(found, wanted)
    assert all("lora_" in key for key in found[1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_adapters_on_a_patched_model(name):
    plain = adapted(tiny(name))
    loss, grads = step(plain)
    model = tiny(name)
    patch_model(model, ActivationConfig())
    model = adapted(model)
    got, found = step(model)
    assert abs(got / loss - 1) < 2e-3 and found.keys() == grads.keys()
    for key in grads:
        assert found[key].any() == grads[key].any() and relative(found[key], grads[key]) < 0.4, key
    with model.disable_adapter():
        assert torch.equal(model.eval()(tokens()).logits, tiny(name).eval()(tokens()).logits)


def test_coat_runs_is_false_with_adapters():
    """Their own code multiplies values, also of linears without an adapter."""
    model = tiny()
    patch_model(model, ActivationConfig())
    layer = model.model.layers[0]
    assert layer.self_attn.coat_runs() and layer.mlp.coat_runs()
    adapted(model)
    assert not (layer.self_attn.coat_runs() or layer.mlp.coat_runs())
