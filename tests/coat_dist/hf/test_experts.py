"""Experts of transformers models in the flow: what they compute and save, and which stay BF16."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from coat_dist.config import ActivationConfig
from coat_dist.hf import patch_model
from coat_dist.hf.experts import Experts, experts_kind, why_not_experts
from coat_dist.ops import ACTIVATIONS
from tests.coat_dist.flow.saved_bytes import saved

from .tiny import check_near, relative, step, tiny

E, H, F, K, TOKENS = 8, 96, 48, 3, 50
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), F),
    "hidden_size": H,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "qwen3_moe": {},
    "mixtral": {},
    "deepseek_v3": LATENT,
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": E},
    "nemotron_h": {"layers_block_type": ["attention", "moe"]},
    "gpt_oss": {},
    "deepseek_v4": {},
}


def mixture(name, chosen=E, dtype=torch.bfloat16, **changes):
    """A tiny model; all experts are chosen, so that no rounding changes a choice."""
    return tiny(name, dtype, num_experts_per_tok=chosen, **SIZES | FAMILIES[name] | changes)


def experts_of(model):
    return next(m for m in model.modules() if experts_kind(m) is not None)


@pytest.mark.parametrize(
    ("name", "frozen"), [*((name, False) for name in FAMILIES), ("mixtral", True)]
)
def test_experts_are_those_of_their_definition(name, frozen):
    """Against fp64, where a gate near its limit may be on the other side, with choices of other
    ranks' experts, and no copy of a weight; a hook on the module runs, and evaluation is the
    model's own.
    """
    model = mixture(name)
    for p in experts_of(model).parameters():
        p.data.normal_(0, 0.35)  # beyond the limits of clamped gates
    plain, own = (copy.deepcopy(experts_of(model)) for _ in range(2))
    patch_model(model, ActivationConfig())
    experts = experts_of(model)
    experts.requires_grad_(not frozen)
    assert isinstance(experts, Experts) and experts.training
    seen = []
    experts.register_forward_hook(lambda module, args, y: seen.append(y))
    x = torch.randn(TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    probs, index = torch.rand(TOKENS, E).topk(K)
    index[torch.rand(TOKENS, K) < 0.2] = E + 1
    probs.requires_grad_()
    kind = experts_kind(experts)
    bound = 0.16 if ACTIVATIONS[kind.activation].limit < torch.inf else 0.11
    names = *kind.weights, *(kind.biases or ())
    weights = [getattr(experts, name) for name in names]
    leaves = [x, probs] if frozen else [x, probs, *weights]
    y = experts(x, index, probs)
    assert seen == [y]
    dy = torch.randn_like(y)

    plain = plain.double()
    plain.config = copy.copy(plain.config)
    plain.config._experts_implementation = "eager"
    doubles = [t.detach().double().requires_grad_() for t in (x, probs)]
    there = index < E
    wanted = plain(doubles[0], index.where(there, 0), doubles[1] * there)
    if not frozen:
        doubles += [getattr(plain, name) for name in names]
    found = zip(
        (y, *torch.autograd.grad(y, leaves, dy)),
        (wanted, *torch.autograd.grad(wanted, doubles, dy.double())),
        strict=True,
    )
    for got, exact in found:
        assert got.shape == exact.shape and relative(got, exact) < bound

    kept = saved(lambda: experts(x, index, probs), *weights, probs)
    smallest = min(w.nbytes for w in weights[:2]) // 2  # of FP8 codes
    assert max(kept.values()) < smallest
    assert any(size == TOKENS * H for size in kept.values()) != frozen
    index = torch.rand(TOKENS, E).topk(K).indices
    assert torch.equal(experts.eval()(x, index, probs), own(x, index, probs))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_models_with_experts(name):
    """Loss and the gradient of every parameter, that of the router too."""
    model = mixture(name, dtype=torch.float32)
    wanted = step(model)
    report = patch_model(model, ActivationConfig())
    assert any(block.endswith("experts") for block in report.patched), report
    check_near(step(model), wanted)


NO_ACTIVATION = "an activation that the flow does not have"


def gated(experts):
    experts.__class__ = type("Own", (type(experts),), {"_apply_gate": lambda self, x: x})


class Learned(torch.nn.Module):
    """SiLU until its parameter is trained."""

    def __init__(self):
        super().__init__()
        self.beta = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def learned(experts):
    experts.act_fn = Learned()


def dropped(experts):
    experts.act_fn = torch.nn.Sequential(experts.act_fn, torch.nn.Dropout(0.1)).eval()


def rounded(experts):
    experts._apply_gate = lambda x: x[:, ::2].bfloat16()


def own_forward(experts):
    experts.forward = lambda *args: args[0]


def odd(experts):
    experts.down_proj = torch.nn.Parameter(torch.zeros(E, H, 24))


def computed(experts):
    class Quantized(torch.nn.Parameter):
        pass

    experts.down_proj.__class__ = Quantized


def implemented(experts):
    experts.config._experts_implementation = "mine"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (gated, NO_ACTIVATION),
        (learned, NO_ACTIVATION),
        (dropped, NO_ACTIVATION),
        (rounded, NO_ACTIVATION),
        (own_forward, "a forward of its own on experts"),
        (odd, f"a weight [{E}, {H}, 24], whose sizes are not multiples of 16"),
        (computed, "a Quantized as down_proj"),
        (implemented, "experts_implementation 'mine'"),
    ],
)
def test_experts_that_stay_bf16_say_why(change, why):
    experts = experts_of(mixture("qwen3_moe"))
    assert why_not_experts(experts, experts_kind(experts)) is None
    change(experts)
    modes = [m.training for m in experts.modules()]
    assert why_not_experts(experts, experts_kind(experts)) == why
    assert modes == [m.training for m in experts.modules()]


@pytest.mark.parametrize("frozen", ["bf16", "fp8"])
@pytest.mark.parametrize("first", [False, True])
def test_adapted_experts(first, frozen):
    """LoRA on parameters of experts: put on before patching, so that these stay BF16, or later."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_parameters=["experts.gate_up_proj", "experts.down_proj"], task_type="CAUSAL_LM"
    )
    steps, settings = [], ActivationConfig(frozen_weights=frozen)
    for patches in (False, True):
        model = mixture("qwen3_moe", dtype=torch.float32).requires_grad_(False)
        if patches and first:
            patch_model(model, settings)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config).train()
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.1)
        if patches and not first:
            patch_model(adapted, settings)
        if patches:
            experts = experts_of(adapted)
            assert isinstance(experts, Experts)
            assert (type(experts.down_proj) is torch.nn.Parameter) != (first and frozen == "fp8")
        steps.append(step(adapted))
    plain, found = steps
    check_near(found, plain)
    assert found[0] != plain[0]
