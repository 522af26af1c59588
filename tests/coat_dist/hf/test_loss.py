"""The loss in chunks is transformers' loss, with every keyword; logits are made where somebody
reads them.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from coat_dist.config import ActivationConfig
from coat_dist.flow.blocks import loss as flow_loss
from coat_dist.hf import late_answers, log_probs, patch_model, unpatch_model
from coat_dist.hf.late import LogitsOnRead, _Late
from tests.support import Largest

from .tiny import SIZES, step, tiny, tokens


def loss_alone(model):
    """Patch the loss, and nothing else: what is left are differences of the loss itself."""
    patch_model(model, ActivationConfig())
    for module in model.model.modules():
        if getattr(type(module), "coat_patched", False):
            module.__class__ = type(module).coat_original
    return model


CASES = list(
    itertools.product((None, 17, torch.tensor(17)), (False, True), (-100, 5), (True, False), (0, 3))
)  # num_items_in_batch, shift_labels, ignore_index, return_dict, logits_to_keep


def assert_near(found, wanted):
    """Loss and gradients, up to the order of sums."""
    for a, b, rtol in zip(found, wanted, (1e-6, 1e-4), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("items, shifted, ignored, as_dict, keep", CASES)
def test_chunked_loss_with_every_keyword(items, shifted, ignored, as_dict, keep):
    ids = tokens()
    labels = ids.clone()
    labels[0, :6] = ignored
    given = {"labels": labels, "return_dict": as_dict}
    if items is not None:
        given["num_items_in_batch"] = items
    if ignored != -100:
        given["ignore_index"] = ignored
    if shifted:
        given["shift_labels"] = torch.roll(labels, -1, 1)
    if keep:
        given |= {"logits_to_keep": keep, "labels": labels[:, -keep:]}
        given.pop("shift_labels", None)
    model = tiny()
    wanted = step(model, ids, **given)
    assert_near(step(loss_alone(model), ids, **given), wanted)


ROUTED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "output_router_logits": True,
}
VISION = SIZES | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
TEXT = SIZES | {"model_type": "mistral", "vocab_size": 512}
FAMILIES = {
    "llama": {},
    "gemma2": {},
    "gemma3_text": {"final_logit_softcapping": 20.0},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "mixtral": ROUTED | {"num_local_experts": 4},
    "qwen3_moe": ROUTED,
    "llava": {"text_config": TEXT, "vision_config": VISION},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_make_no_logits_and_have_the_loss_of_all(name, monkeypatch):
    model, ids = tiny(name, **{"vocab_size": 512, **FAMILIES[name]}), tokens(8)
    wanted = step(model, ids)
    logits = model(ids, labels=ids).logits
    loss_alone(model)
    monkeypatch.setattr(flow_loss, "_BLOCK", ids.numel() * 64)
    with monkeypatch.context() as patched, Largest() as largest:
        patched.setattr(_Late, "tensor", None)
        found = step(model, ids)
    assert largest.elements < logits.numel() == ids.numel() * 512
    assert_near(found, wanted)
    assert torch.equal(model(ids, labels=ids).logits[...], logits)


def written(logits):
    logits[..., 5:7] = -10.0
    return logits


CHANGES = {
    "chunked": (
        lambda logits: logits / 2 * 3,
        lambda logits: logits.mul_(2),
        lambda logits: (logits, logits.exp())[0],
        lambda logits: torch.tanh(logits.double() / -3) * -3.0,
    ),
    "plain": (
        written,
        lambda logits: logits * torch.tensor(2.0),
        lambda logits: torch.tanh(torch.tanh(logits) * 3),
    ),
}


@pytest.mark.parametrize(
    ("how", "change"), [(how, change) for how, changes in CHANGES.items() for change in changes]
)
def test_forward_that_changes_its_logits(how, change):
    model, ids = tiny(), tokens()

    class Changing(type(model)):
        def forward(self, input_ids, labels=None, detach=False, **_):
            logits = change(self.lm_head(self.model(input_ids).last_hidden_state))
            given = logits.detach() if detach else logits
            loss = self.loss_function(given, labels, self.config.vocab_size)
            return CausalLMOutput(loss=loss, logits=logits)

    model.__class__ = Changing
    wanted = step(model)
    logits = model(ids, labels=ids).logits
    found = step(loss_alone(model))
    assert model.coat_patch_report.loss["lm_head"].startswith(how)
    assert_near(found, wanted)
    assert torch.equal(model(ids, labels=ids).logits[...], logits)
    assert not model(ids, labels=ids, detach=True).loss.requires_grad


def gathered(logits, ids):
    return logits.gather(-1, ids[..., None]).squeeze(-1)


def entropy(logits):
    logs = F.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)


READS = (  # as TRL, verl and OpenRLHF compute log-probabilities and entropies
    lambda x, ids: gathered(x, ids) - torch.stack([row.logsumexp(-1) for row in x]),
    lambda x, ids: torch.stack(
        [
            gathered(row.log_softmax(-1), i)
            for row, i in zip(x[:, :-1].float(), ids[:, 1:], strict=True)
        ]
    ),
    lambda x, ids: F.cross_entropy(x[:, :-1].reshape(-1, 512), ids[:, 1:].flatten()),
    lambda x, _: x.div_(0.7).logsumexp(-1) - (x.softmax(-1) * x).sum(-1),
    lambda x, _: torch.cat([entropy(rows) for rows in x.flatten(0, 1).split(50)]),
)


@pytest.mark.parametrize("read", READS)
def test_what_reads_logits_row_by_row_makes_them_in_pieces(read, monkeypatch):
    ids, found = tokens(8), []
    monkeypatch.setattr(late_answers, "_PART", 512 * 16)
    monkeypatch.setattr(flow_loss, "_BLOCK", ids.numel() * 64)
    for change in (lambda model: model, loss_alone):
        model = change(tiny("gemma2", vocab_size=512))
        with Largest() as largest:
            out = read(model(ids).logits, ids)
            out.square().sum().backward()
        found.append((out.detach(), [p.grad for p in model.parameters()]))
    assert largest.elements < ids.numel() * 512
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(read(model(ids).logits, ids), out)  # ratios to old ones are 1


def test_log_probs_are_those_of_the_logits_and_one_function():
    ids, model = tokens(), tiny("gemma2")
    logits = model(ids).logits[:, :-1] / 0.7
    wanted = gathered(logits.log_softmax(-1), ids[:, 1:]), entropy(logits)
    for change in (lambda model: model, loss_alone):
        got = log_probs(change(model), ids, temperature=0.7, entropy=True)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            assert torch.equal(log_probs(model, ids, temperature=0.7), got[0])
    assert log_probs(model, ids, logits_to_keep=4).shape == (2, 3)
    with pytest.raises(ValueError, match=r"labels: got \[2, 23\], accepted: \[2, 24\], one for"):
        log_probs(model, ids, ids[:, 1:])
    with pytest.raises(ValueError, match="labels: got None with positions to keep, accepted: one"):
        log_probs(model, ids, logits_to_keep=torch.tensor([3, 7]))


def test_log_probs_are_of_what_a_hook_makes_of_the_logits():
    ids, model = tokens(), loss_alone(tiny())
    wanted = log_probs(model, ids, temperature=0.7)
    model.register_forward_hook(lambda _, __, out: setattr(out, "logits", out.logits / 0.7))
    torch.testing.assert_close(log_probs(model, ids), wanted)


def test_late_logits_are_made_when_they_are_read(tmp_path):
    model, ids = tiny(), tokens()
    wanted = model(ids, labels=ids).logits
    out = loss_alone(model)(ids, labels=ids)
    assert isinstance(out.logits, LogitsOnRead) and out.logits.late.made is None
    assert out.logits.float().late.made is None
    assert (
        torch.equal(out.logits[..., :-1, :], wanted[..., :-1, :])
        and out.logits.shape == wanted.shape
    )
    fresh = model(ids, labels=ids)
    assert torch.equal(fresh.logits, wanted)
    assert model(ids, labels=ids, return_dict=False)[1].shape == wanted.shape
    assert torch.equal(model(ids).logits, wanted) and isinstance(model(ids).logits, torch.Tensor), (
        "without labels"
    )
    assert type(model(ids, past_key_values=DynamicCache()).logits) is torch.Tensor  # generation
    unread = model(ids, labels=ids).logits
    torch.save(unread.clone(), tmp_path / "logits")
    torch.optim.SGD(model.parameters()).step()
    assert torch.equal(fresh.logits.argmax(-1), wanted.argmax(-1)), "made before"
    assert torch.equal(torch.load(tmp_path / "logits"), wanted), "saved before"
    written = model(ids, labels=ids).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    for logits in (unread, unread.float(), written):
        with pytest.raises(
            RuntimeError, match="logits: read after an optimizer's step, .* accepted: before it"
        ):
            logits.argmax(-1)


def test_late_logits_are_found_by_what_looks_for_tensors():
    """DDP with a static graph puts the beginning of backward behind them; ranks drift apart
    where it misses one.
    """
    model, ids, passed = loss_alone(tiny()), tokens(), []
    out = model(ids, labels=ids, use_cache=False)
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves) and out.logits.late.made is None
    for leaf in leaves:
        leaf.register_hook(passed.append)
    again = torch.utils._pytree.tree_unflatten([leaf * 1 for leaf in leaves], spec)
    assert torch.equal(again.logits[...], out.logits[...]) and not passed
    again.logits.sum().backward()
    assert len(passed) == 1


def test_lm_head_with_hooks_returns_logits():
    model, ids = tiny(), tokens()
    model.lm_head.register_forward_hook(lambda _, __, logits: logits / 2)
    wanted = model(ids, labels=ids).loss
    assert torch.equal(loss_alone(model)(ids, labels=ids).loss, wanted)
    model.lm_head._forward_hooks.clear()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert type(model(ids).logits) is torch.Tensor
    handle.remove()


def test_loss_function_of_a_program_stays_plain():
    model, ids = tiny(), tokens()
    loss_alone(model)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    out = model(ids, labels=ids)
    assert torch.equal(out.loss, out.logits.square().mean())
    other = tiny()
    other.loss_function = lambda logits, labels, **_: logits.sum()
    assert "a loss function of its own" in patch_model(other, ActivationConfig()).loss["lm_head"]


def test_loss_plain_and_chunked_under_torch_compile():
    model = tiny("gemma2", num_hidden_layers=1)
    assert patch_model(model, ActivationConfig(loss="plain")).loss == {
        "lm_head": "plain: loss: plain"
    }
    loss, grads = step(model)
    unpatch_model(model)
    patch_model(model, ActivationConfig())
    chunked, found = step(model)
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=1e-6)
    with ThreadPoolExecutor() as fresh:  # nothing was ever given there
        compiled, _ = fresh.submit(step, torch.compile(model, backend="eager")).result()
    torch.testing.assert_close(compiled, loss, rtol=1e-6, atol=1e-6)
    assert found.keys() == grads.keys()


@pytest.mark.parametrize("loss", ["chunked", "kept"])
def test_loss_kept_saves_logits(loss):
    model, ids, held = tiny(), tokens(), []
    assert patch_model(model, ActivationConfig(loss=loss)).loss == {"lm_head": loss}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.shape) or t, lambda t: t):
        model(ids, labels=ids)
    assert ((ids.numel(), model.config.vocab_size) in held) == (loss == "kept")
