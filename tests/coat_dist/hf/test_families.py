"""Every family: near its unpatched self in training, itself in evaluation, and itself again when
unpatched.
"""

import copy
import inspect
import pickle

import pytest
import torch

from tests.support import equal

pytest.importorskip("transformers")

from coat_dist.config import ActivationConfig, CoatConfigError
from coat_dist.flow.core import inputs
from coat_dist.flow.saved import saved_for_backward
from coat_dist.hf import is_transformers_model, patch_model, unpatch_model
from coat_dist.hf.sinks import has_sinks
from coat_dist.patching.report import is_patched

from .tiny import FOUR_NORMS, FUSED, GENERIC, check_near, relative, step, tiny, tokens

DEFAULT = ActivationConfig()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_patch_model_is_near_and_unpatch_model_restores(name, dtype):
    model = tiny(name, dtype)
    keys, names = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
    before, grads = step(model)
    report = patch_model(model, DEFAULT)
    assert report is model.coat_patch_report and not report.left, report
    assert report.fp8_share == 1
    if name in (*FUSED, *FOUR_NORMS):
        sides = model.model.layers[0].coat.kind
        assert sides.attention and sides.mlp and not report.unfused
    assert list(model.state_dict()) == keys and [type(m).__name__ for m in model.modules()] == names
    loss, found = step(model)
    check_near((loss, found), (before, grads))
    assert loss.dtype == torch.float32
    for key in grads:
        # Softmax does not see what all keys share: gradients of their biases nearly cancel.
        limit = 0.5 if key.endswith("k_proj.bias") else 0.35
        assert found[key].dtype == dtype and relative(found[key], grads[key]) < limit, key
    unpatch_model(model)
    assert equal(step(model), (before, grads)) and not hasattr(model, "coat_patch_report")


@pytest.mark.parametrize("name", ["llama", "qwen2", "olmo2"])
def test_copies_and_pickles_of_a_patched_model(name, tmp_path):
    model = tiny(name)
    patch_model(model, DEFAULT)
    loss, grads = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(step(other), (loss, grads))
        unpatch_model(other)
    model.save_pretrained(tmp_path)
    loaded = type(model).coat_original.from_pretrained(tmp_path).eval()
    assert loaded.config.architectures == [type(model).__name__]
    assert torch.equal(loaded(tokens()).logits, model.eval()(tokens()).logits)


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_forward_with_hidden_states_padding_and_autocast(name):
    model = tiny(name)
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0  # left
    mask[1, 20:] = 0  # right
    given = {
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "output_hidden_states": True,
    }
    plain = tiny(name)(ids, **given)
    before, grads = step(model)
    patch_model(model, DEFAULT)
    out = model(ids, **given)
    assert abs(out.loss / plain.loss - 1) < 2e-3
    assert len(out.hidden_states) == len(plain.hidden_states) == 3
    inside = mask.bool()
    assert all(
        relative(a[inside], b[inside]) < 0.1
        for a, b in zip(out.hidden_states, plain.hidden_states, strict=True)
    )
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(ids, labels=ids)
    assert mixed.loss.dtype == torch.float32
    mixed.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    unpatch_model(model)
    assert equal(step(model), (before, grads))


def test_norms_of_queries_and_keys_keep_the_projections_output_instead_of_queries():
    """A CPU's attention copies keys; two layers with 128 outputs, 64 of them queries."""
    kept = []
    for name in ("llama", "qwen3"):
        patch_model(model := tiny(name, torch.bfloat16, attn_implementation="sdpa"), DEFAULT)
        with saved_for_backward(model) as found:
            model.base_model(tokens(rows=1))
        kept.append(sum(found.values()))
    assert kept[1] - kept[0] <= 2 * (24 * 2 * (128 - 64) + 64)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fp8_attention_with_and_without_a_mask(name):
    """Where nothing stands against it; else attention is transformers'."""
    model, ids = tiny(name, attn_implementation="sdpa"), tokens()
    mask = torch.ones_like(ids)  # without it and a cache, transformers 4 makes masks of its own
    wanted = step(model)
    patch_model(model, ActivationConfig(attention="fp8"))
    found = step(model, use_cache=False, attention_mask=mask)
    check_near(found, wanted)
    mask[0, :5] = 0
    masked, _ = step(model, attention_mask=mask)
    unpatch_model(model)
    patch_model(model, DEFAULT)
    assert torch.equal(step(model, attention_mask=mask)[0], masked)
    assert not torch.equal(step(model)[0], found[0])


def test_attention_interface_of_another_library(monkeypatch):
    """DeepSpeed's Ulysses and ring attention take the name of transformers' own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own, losses = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def attend(*args, **kwargs):
        return own(*args, **kwargs)[0] * 3, None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    for attention in ("bf16", "fp8"):
        model = tiny("llama", attn_implementation="sdpa")
        patch_model(model, ActivationConfig(attention=attention))
        losses.append(step(model, use_cache=False, attention_mask=torch.ones_like(tokens()))[0])
    assert torch.equal(*losses)


@pytest.mark.parametrize("how", ["lengths", "positions"])
def test_packed_documents_have_the_outputs_that_they_have_alone(how):
    """By flash attention's arguments, or by the positions that it reads, with FP8 attention."""
    model = tiny("llama", attn_implementation="sdpa")
    patch_model(model, ActivationConfig(attention="fp8"))
    documents, ids = (9, 15), tokens(1)
    given = {"position_ids": torch.cat([torch.arange(n) for n in documents])[None]}
    if how == "positions":
        model.config._attn_implementation = "flash_attention_2"
    else:
        starts = torch.tensor([0, 9, 24], dtype=torch.int32)
        given |= {
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": 15,
            "max_length_k": 15,
        }
    hidden = model.model(ids, **given).last_hidden_state
    for part, n in zip(ids.split(documents, 1), (slice(0, 9), slice(9, 24)), strict=True):
        alone = model.model(part).last_hidden_state
        torch.testing.assert_close(hidden[:, n], alone, rtol=2e-2, atol=2e-2)


def test_linears_of_one_input_quantize_it_once(monkeypatch):
    """Queries, keys and values in attention, where it is the model's own, and here the MLP."""
    model, found, plain = tiny("cohere"), [], inputs.quantize_rows
    patch_model(model, DEFAULT)

    def quantize_rows(x, *rest, **options):
        found.append(x.shape[-1])
        return plain(x, *rest, **options)

    monkeypatch.setattr(inputs, "quantize_rows", quantize_rows)
    assert step(model)[0].isfinite()
    assert len(found) in (2, 4), "once a layer; attention keeps its output itself, or not"


class Reader(torch.nn.Module):
    """Stands for a block whose own code multiplies by a weight without calling its linear."""

    def __init__(self):
        super().__init__()
        self.read, self.called = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        assert self.read.weight.dtype == x.dtype
        return self.called(x) @ self.read.weight


def test_linears_that_may_not_be_called_stay_bf16():
    """Their weights are read; or they have a bias where others of their product have none."""
    model, plain = tiny(attention_bias=True), tiny(attention_bias=True)
    for m in (model, plain):
        m.model.layers[1].self_attn.q_proj.bias = None
        torch.manual_seed(3)
        m.model.layers[0].mlp = torch.nn.Sequential(Reader())
    report = patch_model(model, DEFAULT)
    assert "that tests's Reader reads" in report.unfused["model.layers.0.mlp.0.read"]
    assert "some parts have a bias" in report.unfused["model.layers.1.self_attn"]
    check_near(step(model), step(plain))


def test_patch_model_with_tied_embeddings_and_frozen_layers():
    model = tiny("llama", tie_word_embeddings=True)
    patch_model(model, DEFAULT)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loss, grads = step(model)
    assert "lm_head.weight" not in grads
    model.resize_token_embeddings(144)
    assert model.lm_head.weight.shape[0] == 144 and step(model)[0].isfinite()
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    _, grads = step(model)
    assert (
        not any("layers.0" in key for key in grads) and "model.layers.1.mlp.up_proj.weight" in grads
    )


def test_report_names_blocks_in_bf16():
    model = tiny("llama", num_hidden_layers=3)
    report = patch_model(model, ActivationConfig(bf16_layers=[0, -1]))
    assert report.left["model.layers.2.mlp"] == "bf16_layers" and len(report.patched) == 2
    assert step(model)[0].isfinite()
    odd = tiny("llama", intermediate_size=100)
    report = patch_model(odd, DEFAULT)
    assert "not multiples of 16" in report.left["model.layers.0.mlp"] and report.fp8_share < 0.7
    assert "model.layers.0.self_attn" in report.patched and step(odd)[0].isfinite()
    with pytest.raises(
        CoatConfigError, match="^activation.bf16_layers: got 3, accepted: 0 to 2, or -3 to -1"
    ):
        patch_model(tiny("llama", num_hidden_layers=3), ActivationConfig(bf16_layers=[3]))
    with pytest.raises(CoatConfigError, match="patched already"):
        patch_model(model, DEFAULT)
    why = "nothing to patch .*0 of 2 blocks .*1 x attn, transformers's Conv1D in place of linears"
    with pytest.raises(
        CoatConfigError,
        match=f'GPT2LMHeadModel with {why}.*"enabled": false}}}} .or "auto".',
    ):
        patch_model(tiny("gpt2", n_embd=64, n_head=4, num_hidden_layers=1), DEFAULT)
    plain = tiny("gpt2", n_embd=64, n_head=4, num_hidden_layers=1)
    with pytest.warns(UserWarning, match="all of GPT2LMHeadModel stays BF16"):
        assert not patch_model(plain, ActivationConfig(enabled="auto")).patched
    assert not is_patched(plain)
    assert is_transformers_model(model) and not is_transformers_model(torch.nn.Linear(2, 2))


MODERN = {
    "ministral3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("name", MODERN)
def test_attentions_that_are_not_known(name):
    """Their linears run in FP8, and the report counts them."""
    model = tiny(name, **MODERN[name])
    for key, p in model.named_parameters():
        if "q_norm" in key:  # Gemma 4's heads are not divided by their size: BF16 is 25 % off
            p.data.mul_(0.02)
    wanted = step(model)
    report = patch_model(model, DEFAULT)
    assert not [block for block, why in report.left.items() if "experts" not in why], report
    check_near(step(model), wanted)


def test_patch_model_keeps_replaced_forwards():
    model = tiny("llama")
    model.model.layers[0].mlp.forward = lambda x: x * 0
    model.forward = lambda **given: type(model).forward(model, **given)
    report = patch_model(model, DEFAULT)
    assert "a forward of its own" in report.unfused["model.layers.0.mlp"]
    assert report.loss["lm_head"] == "plain: a forward of tests"
    assert step(model)[0].isfinite()


def test_attention_with_sinks_makes_no_weights_unless_they_are_asked_for(monkeypatch):
    model = tiny("gpt_oss", num_local_experts=4, sliding_window=8, attn_implementation="eager")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    made = []
    scope = inspect.unwrap(type(model.model.layers[0].self_attn).forward).__globals__
    eager = scope["eager_attention_forward"]
    before, ids = step(model), tokens()
    patch_model(model, DEFAULT)

    def spy(*args, **kwargs):
        made.append(args)
        return eager(*args, **kwargs)

    monkeypatch.setitem(scope, "eager_attention_forward", spy)
    loss, grads = step(model)
    assert not made and (loss - before[0]).abs() < 0.01
    for key in (name for name in grads if "self_attn" in name):
        assert relative(grads[key], before[1][key]) < 0.3, key
    assert model(ids, output_attentions=True).attentions[1].shape[-1] == ids.shape[1]
    assert len(made) == 2
    model.config.output_attentions = True
    assert len(model(ids).attentions) == 2
    assert len(made) == 4
    model.eval()(ids)
    assert len(made) == 6


def test_attention_that_depends_on_the_name_of_its_implementation():
    """HY-V4's reads few keys under some names alone, gpt-oss' under all of them."""
    for name, depends in (("hy_v4", True), ("gpt_oss", False)):
        attention = tiny(name, num_local_experts=4).model.layers[0].self_attn
        assert has_sinks(attention) is not depends
