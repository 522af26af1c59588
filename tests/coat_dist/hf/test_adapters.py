"""Adapters of PEFT, put on before patching or later: LoRA is computed with its linear, in fused
blocks and around linears; all else is PEFT's own, around linears in FP8.
"""

import pytest
import torch

from coat_dist import flow
from coat_dist.config import ActivationConfig
from coat_dist.hf import patch_model
from tests.support import equal

from ..flow.saved_bytes import saved
from .tiny import check_near, step, tiny, tokens

peft = pytest.importorskip("peft")
SOME = ["q_proj", "v_proj", "up_proj", "o_proj"]
ALL = [*SOME, "k_proj", "gate_proj", "down_proj"]


def config(kind=peft.LoraConfig, targets=SOME, **more):
    rank = {"r": 4} if kind is peft.LoraConfig else {"feedforward_modules": ["down_proj"]}
    targets = targets if kind is peft.LoraConfig else ["k_proj", "down_proj"]
    return kind(target_modules=targets, task_type="CAUSAL_LM", **rank, **more)


def adapted(model, *args, **more):
    found = peft.get_peft_model(model, config(*args, **more))
    started(found)
    return found.train()


def started(model):
    """As after some steps: B is not 0."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.02)


def both(name="llama", *args, dtype=torch.float32, **more):
    """The adapted model, and the patched one."""
    plain, model = (adapted(tiny(name, dtype=dtype), *args, **more) for _ in range(2))
    report = patch_model(model, ActivationConfig())
    return plain, model, report


@pytest.fixture
def added(monkeypatch):
    """Adapters that the flow computed, by function."""
    seen = []
    for name in ("linear", "norm_linear", "norm_qkv", "norm_mlp", "mlp"):
        function = getattr(flow, name)

        def noted(*args, function=function, **options):
            for given in (*args, *options.values()):
                for of_weight in given if isinstance(given, (list, tuple)) else ():
                    if isinstance(of_weight, list):
                        seen.extend(of_weight)
            return function(*args, **options)

        monkeypatch.setattr(flow, name, noted)
    return seen


@pytest.mark.parametrize("targets", [SOME, ALL, ["o_proj"], ["down_proj"]], ids=" ".join)
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "smollm3"])
def test_lora_before_and_after_the_patch(name, targets, added):
    plain, model, report = both(name, targets=targets)
    wanted = step(plain)
    assert f"{2 * len(targets)} linears with adapters of PEFT" in report.notes
    found = step(model)
    check_near(found, wanted)
    assert all("lora_" in key for key in found[1])
    assert len(added) == 2 * len(targets)
    later = tiny(name)
    unfused = patch_model(later, ActivationConfig()).unfused
    later = adapted(later, targets=targets)
    got = step(later)
    check_near(got, wanted)
    assert unfused.keys() == {name.partition("base_model.model.")[2] for name in report.unfused}
    if name not in ("smollm3", "olmo2"):  # whose attention runs its own code around linears
        assert equal(got, found)
    with later.disable_adapter():
        later.eval()
        assert torch.equal(later(tokens()).logits, tiny(name).eval()(tokens()).logits)


@pytest.mark.parametrize("gradient_checkpointing", [None, True, False])
@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_dropout_of_lora(name, gradient_checkpointing, added):
    _, model, _ = both(name, targets=ALL, lora_dropout=0.3)
    torch.manual_seed(7)
    wanted = step(model)
    assert {adapter.dropout for adapter in added} == {0.3}
    if gradient_checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": gradient_checkpointing})
    torch.manual_seed(7)
    assert equal(step(model), wanted)
    torch.manual_seed(8)
    assert not torch.equal(step(model)[0], wanted[0])
    added.clear()
    step(model.eval())
    assert not added


@pytest.mark.parametrize("autocast", [False, True])
def test_fp32_adapters_beside_a_bf16_base(autocast, added):
    plain, model, _ = both(targets=ALL, dtype=torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted, found = step(plain), step(model)
    check_near(found, wanted)
    assert added and all(g.dtype == torch.float32 for g in found[1].values())


KINDS = {
    "rslora": ({"use_rslora": True}, True),
    "pattern": ({"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 3}}, True),
    "dora": ({"use_dora": True}, False),
    "lora_bias": ({"lora_bias": True}, False),
    "ia3": ({"kind": peft.IA3Config}, False),
}


@pytest.mark.parametrize("name", ["llama", "smollm3"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind, name, added):
    more, in_flow = KINDS[kind]
    model = tiny(name) if kind != "lora_bias" else tiny("qwen2")
    plain = adapted(model, **more)
    wanted = step(plain)
    patch_model(plain, ActivationConfig())
    check_near(step(plain), wanted)
    assert bool(added) == in_flow


def test_modules_to_save(added):
    plain, model, _ = both(modules_to_save=["down_proj", "lm_head"])
    check_near(step(model), step(plain))
    assert len(added) == 2 * 4  # that of up_proj beside a down_proj that is a copy, too


SWITCHES = {
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "merged": lambda m: m.merge_adapter(),
    "merged and disabled": lambda m: (m.merge_adapter(), m.base_model.disable_adapter_layers()),
    "unmerged": lambda m: (m.merge_adapter(), m.unmerge_adapter()),
    "another": lambda m: m.set_adapter("other"),
    "several": lambda m: m.base_model.set_adapter(["default", "other"]),
    "deleted": lambda m: (m.set_adapter("other"), m.delete_adapter("default")),
    "hook": lambda m: m.base_model.model.model.layers[
        0
    ].self_attn.q_proj.lora_A.default.register_forward_hook(lambda *a: a[-1] * 2),
}


@pytest.mark.parametrize("name", ["llama", "smollm3"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_switched_adapters(switch, name):
    plain, model, _ = both(name)
    for one in (plain, model):
        torch.manual_seed(2)
        one.add_adapter("other", config(targets=ALL, lora_alpha=16))
        started(one)
        step(one)
        SWITCHES[switch](one)
        for p in one.parameters():
            p.requires_grad_(True)
    loss, grads = step(plain)
    got, found = step(model)
    check_near((got, found), (loss, grads))
    if switch == "disabled":
        base = tiny(name)
        patch_model(base, ActivationConfig())
        assert torch.equal(got, step(base)[0])


def test_unloaded_adapters():
    _, model, report = both()
    model = model.unload()
    base = tiny()
    patch_model(base, ActivationConfig())
    found = step(model.requires_grad_(True))
    assert torch.equal(found[0], step(base)[0]) and not report.unfused


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_bytes_that_are_saved_with_adapters(name):
    """x A', and the joined adapters; with linears by themselves the shared codes of x."""

    def kept(model):
        ids = tokens()
        return sum(saved(lambda: model(ids, labels=ids).loss, *model.parameters()).values())

    base = tiny(name, dtype=torch.bfloat16).requires_grad_(False)
    base.enable_input_require_grads()
    patch_model(base, ActivationConfig())
    _, model, _ = both(name, targets=ALL, dtype=torch.bfloat16)
    found = kept(model) - kept(base)
    rows, rank, widths = tokens().numel(), 7 * 4, 2 * 64 + 96 + 64
    joined = 12 * (64 + 128) + 8 * (64 + 192) + 4 * (64 + 64) + 4 * (96 + 64)
    if name == "smollm3":
        joined = 4 * (6 * 64 + 64 + 32 + 32 + 64 + 96 + 96 + 96)
    planned = 2 * (2 * rows * rank + 2 * joined)
    codes = 0 if name == "llama" else 2 * rows * (widths + 4 * 4)
    assert found <= planned + codes + 4096


@pytest.mark.parametrize("what", ["hook", "class"])
def test_dropouts_of_adapters_that_are_not_plain_act(what):
    plain, model = adapted(tiny()), adapted(tiny())
    patch_model(model, ActivationConfig())
    for m in (plain, model):
        for module in m.modules():
            if hasattr(module, "lora_dropout"):
                if what == "hook":
                    module.lora_dropout["default"].register_forward_hook(lambda _, __, y: y * 0)
                else:
                    module.lora_dropout["default"] = torch.nn.Threshold(1e6, 0.0)
    check_near(step(model), step(plain))
    assert not any(g.any() for n, g in step(model)[1].items() if "lora_B" in n)


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_hooks_on_the_base_see_no_adapter(name):
    plain, model, _ = both(name)
    for module in (*plain.modules(), *model.modules()):
        if hasattr(module, "base_layer"):
            module.base_layer.register_forward_hook(lambda *args: args[-1] * 0)
    check_near(step(model), step(plain))
