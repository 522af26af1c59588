"""When modules run the flow: in training mode, without a cache, and as long as nothing is put on
what a block fuses.
"""

import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import DynamicCache

from coat_dist.config import ActivationConfig
from coat_dist.hf import patch_model, unpatch_model

from .tiny import FUSED, relative, step, tiny, tokens

DEFAULT = ActivationConfig()
GENERATION = {"max_new_tokens": 6, "do_sample": False}


def by_hand(model, ids):
    """Greedy generation by a program's own loop."""
    out = model(ids, past_key_values=DynamicCache(), use_cache=True)
    for _ in range(GENERATION["max_new_tokens"]):
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        out = model(ids[:, -1:], past_key_values=out.past_key_values, use_cache=True)
    return ids


@pytest.mark.parametrize("name", [*FUSED, "olmo2", "phi3"])
def test_runs_flow_in_training_mode_and_not_in_eval_mode_or_with_a_cache(name):
    model, ids = tiny(name).eval(), tokens()
    with torch.no_grad():
        own, texts = (
            model(ids).logits,
            [model.generate(ids[:, :5], **GENERATION), by_hand(model, ids[:, :5])],
        )
    patch_model(model, DEFAULT)
    trained = model.train()(ids).logits
    loss = model(ids, labels=ids).loss
    assert not torch.equal(trained, own) and relative(trained, own) < 0.2
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained) and torch.equal(
            model(ids, labels=ids).loss, loss
        )
        assert torch.equal(model.generate(ids[:, :5], **GENERATION), texts[0])
        assert torch.equal(by_hand(model, ids[:, :5]), texts[1])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, trained)
        assert torch.equal(model.eval()(ids).logits, own)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.train().generate(ids)
    hook.remove()
    assert torch.equal(model(ids).logits, trained), "an interrupted generation leaves no mark"
    model.eval()
    unpatch_model(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    patch_model(model, ActivationConfig(evaluation="flow"))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained)
        assert torch.equal(model.generate(ids[:, :5], **GENERATION), texts[0])


@pytest.mark.parametrize("cached", [False, True])
def test_gradients_in_eval_mode_are_warned_of_once(cached):
    model, ids = tiny(), tokens()
    patch_model(model, DEFAULT)
    model.train(cached)
    given = {"past_key_values": model(ids).past_key_values} if cached else {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = model(ids, **given).logits
        assert not any("coat_dist" in str(w.message) for w in told), (
            "evaluating with gradients enabled is no training"
        )
        for _ in range(2):
            out.sum().backward(retain_graph=True)
        model(ids).logits.sum().backward()
    found = [str(w.message) for w in told if "coat_dist" in str(w.message)]
    assert len(found) == 1 and ("a cache" if cached else "model.train()") in found[0]
    assert found[0].endswith(model.coat_patch_report.notes[0])


@pytest.mark.parametrize("part", ["self_attn", "mlp", "input_layernorm", "self_attn.q_proj"])
@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_modules_in_eval_mode_run_their_own_code(name, part):
    model, plain = tiny(name), tiny(name)
    patch_model(model, DEFAULT)
    for m in (model, plain):
        for layer in m.model.layers:
            if part != "input_layernorm" or name == "llama":
                layer.get_submodule(part).eval()
    loss, grads = step(model)
    wanted, right = step(plain)
    assert abs(loss / wanted - 1) < 2e-3 and grads.keys() == right.keys()
    if part == "mlp":
        x = torch.randn(2, 24, 64)
        assert torch.equal(model.model.layers[0].mlp(x), plain.model.layers[0].mlp(x))


def own_forward(module):
    plain = module.forward
    module.forward = lambda x: plain(x) * 4
    return lambda: delattr(module, "forward")


def hook(module):
    return module.register_forward_hook(lambda _, __, out: out * 4).remove


def pre_hook(module):
    return module.register_forward_pre_hook(lambda _, x: (x[0].roll(1, -1),)).remove


PLACES = (
    *("mlp.gate_proj", "mlp.down_proj", "mlp.act_fn", "self_attn.q_proj", "self_attn.o_proj"),
    *("input_layernorm", "post_attention_layernorm", "mlp", "self_attn.v_proj"),
    *("self_attn.q_norm", "self_attn.k_norm"),
)


@pytest.mark.parametrize("change", [own_forward, hook, pre_hook], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_hooks_and_forwards_on_a_part_act(place, change):
    ids, found = tokens(), []
    name = "qwen3" if place.endswith(("q_norm", "k_norm")) else "llama"
    for before in (True, False):
        plain, model, bare = (tiny(name, initializer_range=0.05) for _ in range(3))
        patch_model(bare, DEFAULT)
        for layer in plain.model.layers:
            change(layer.get_submodule(place))
        if not before:
            patch_model(model, DEFAULT)
        undo = [change(layer.get_submodule(place)) for layer in model.model.layers]
        if before:
            patch_model(model, DEFAULT)
        hidden, wanted, untouched = (m.model(ids).last_hidden_state for m in (model, plain, bare))
        found.append(hidden)
        assert relative(hidden, wanted) < relative(untouched, wanted) / 2
        report = model.coat_patch_report
        said = {**report.left, **report.unfused}
        assert any(
            place.rpartition(".")[2] in why or place in block for block, why in said.items()
        ), report
        assert not report.left.keys() & report.unfused.keys() and not set(report.left) & set(
            report.patched
        )
        if not before or change is not own_forward:
            for back in undo:
                back()
            assert torch.equal(model.model(ids).last_hidden_state, untouched)
            assert (
                sorted(report.patched) == sorted(bare.coat_patch_report.patched) and not report.left
            )
    if change is not own_forward:
        assert torch.equal(*found)


def test_hooks_of_wrappers_keep_the_flow_on():
    model, ids = tiny(), tokens()
    patch_model(model, DEFAULT)
    wanted = model(ids).logits
    model(ids, output_hidden_states=True)  # transformers leaves hooks for this
    hook = lambda *_: None  # noqa: E731
    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    for module in model.modules():
        module.register_forward_hook(hook)
    assert torch.equal(model(ids).logits, wanted) and not model.coat_patch_report.left


@pytest.mark.parametrize("place", ["mlp", "mlp.act_fn", "input_layernorm", ""])
def test_replaced_classes_run_their_own_code(place, monkeypatch):
    """Before a second model of the class is patched, after it, and on an instance."""
    first, second, ids = tiny(initializer_range=0.05), tiny(initializer_range=0.05), tokens()
    report = patch_model(first, DEFAULT)
    before = first.model(ids).last_hidden_state
    cls = type(second.model.layers[0].get_submodule(place))
    own = cls.forward
    if place in ("mlp", ""):
        monkeypatch.setattr(
            cls, "forward", lambda self, *args, **given: own(self, *args, **given) * 2
        )
    else:
        changed = type("Changed", (cls,), {"forward": lambda self, x: own(self, x) * 2})
        for layer in (*first.model.layers, *second.model.layers):
            layer.get_submodule(place).__class__ = changed
    wanted = second.model(ids).last_hidden_state
    patch_model(second, DEFAULT)
    for model in (first, second):
        found = model.model(ids).last_hidden_state
        assert relative(found, wanted) < relative(before, wanted) / 2
    said = " ".join([*report.left.values(), *report.unfused.values()])
    assert ("forward of its class" if place in ("mlp", "") else "Changed in place of") in said


class Strange(torch.Tensor):
    """As quantized and sharded weights are."""


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_weights_of_other_types_and_replicas_run_their_own_code(name):
    plain, model, x = tiny(name), tiny(name), torch.randn(2, 24, 64)
    for m in (plain, model):
        linear = m.model.layers[0].mlp.up_proj
        linear.weight = nn.Parameter(linear.weight.data.as_subclass(Strange))
    report = patch_model(model, DEFAULT)
    assert report.unfused["model.layers.0.mlp.up_proj"] == "a Strange as weight"
    assert "a Strange as weight of up_proj" in report.unfused["model.layers.0.mlp"]
    assert 0.8 < report.fp8_share < 1
    (first, second), (own, _) = ([layer.mlp for layer in m.model.layers] for m in (model, plain))
    assert torch.equal(first.up_proj(x), own.up_proj(x)) and 0 < relative(first(x), own(x)) < 0.1
    linear = model.model.layers[1].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Strange))
    loss, _ = step(model)
    assert loss.isfinite() and "model.layers.1.self_attn" in report.unfused
    replica, wanted = second._replicate_for_data_parallel(), plain.model.layers[1].mlp(x)
    assert not torch.equal(second(x), wanted) and 0 < relative(replica(x), wanted) < 0.1
