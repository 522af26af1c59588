"""The chunked loss of a GPT model: the same losses and gradients without logits of the whole
vocabulary.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel

from coat_dist import flow
from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, patched, tensor_parallel
from megatron_patches.layers.loss import ChunkedLossGPTModel
from tests.support import equal

from .tiny import BATCH, FP32, FULL, SEQ, VOCAB, state, tiny_batch, tiny_gpt

MODELS = {
    "llama": {},
    "tied, recomputed": FULL | {"gpt": {"share_embeddings_and_output_weights": True}},
    "fp32": FP32,
    "per_token": {"calculate_per_token_loss": True},
}


def train(model, batch, settings, loss_of):
    """Losses per token and gradients of a model that is patched for the time being."""
    model.zero_grad(set_to_none=True)
    with patched(model, settings) as report:
        losses = loss_of(model, *batch)
        (losses * weighting(losses)).mean().backward()
    return report, losses.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def weighting(losses):
    return (
        1 + torch.arange(losses.numel(), device=losses.device).view(losses.shape) / losses.numel()
    )


def labelled(model, tokens, labels, positions):
    return model(tokens, positions, None, labels=labels)


def from_logits(z_loss):
    def losses(model, tokens, labels, positions):
        logits, tp = model(tokens, positions, None), tensor_parallel(model.output_layer)
        return flow.vocab_parallel_cross_entropy(logits, labels, tp, z_loss=z_loss)

    return losses


@pytest.fixture
def small_chunks(monkeypatch):
    from coat_dist.flow.blocks import loss

    monkeypatch.setattr(loss, "_BLOCK", BATCH * SEQ * 128)


@pytest.mark.parametrize(("name", "z_loss"), [*((name, 0.0) for name in MODELS), ("llama", 1e-2)])
@pytest.mark.parametrize("invariant", [False, True])
def test_chunked_loss_is_the_plain_loss(name, z_loss, invariant, device, small_chunks):
    model, (tokens, labels, positions) = tiny_gpt(**MODELS[name]), tiny_batch(3, device)
    labels = labels.clone()  # shares its memory with the tokens
    labels[0, :3] = -100
    batch = tokens, labels, positions
    before, chunked = state(model), ActivationConfig(tp_invariant=invariant, z_loss=z_loss)
    report, losses, grads = train(model, batch, chunked, labelled)
    assert report.loss == {"output_layer": "chunked"} and "  loss     output_layer: chunked" in str(
        report
    )
    held: list = []  # train() runs backward, too: with "kept" logits wait for it
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.shape) or t, lambda t: t):
        report, same, _ = train(model, batch, chunked.model_copy(update={"loss": "kept"}), labelled)
    assert (
        report.loss == {"output_layer": "kept"}
        and torch.equal(same, losses)
        and (BATCH * SEQ, 128) in held
    )
    assert state(model) == before
    plain_settings = ActivationConfig(tp_invariant=invariant, loss="plain")
    report, plain, wanted = train(model, batch, plain_settings, from_logits(z_loss))
    assert report.loss == {"output_layer": "plain (activation.loss)"}
    assert losses.shape == (BATCH, SEQ) and losses.dtype == torch.float32 and losses.is_contiguous()
    assert not losses[0, :3].any()
    if device == "cpu" and (invariant or name != "fp32"):
        assert torch.equal(losses, plain)
    torch.testing.assert_close(losses, plain, rtol=1e-5 if name == "fp32" else 1e-3, atol=1e-5)
    for n, g in wanted.items():
        # On a GPU, attention and embeddings sum in no fixed order.
        if invariant and device == "cpu":
            assert torch.equal(grads[n], g), n
        # dx rounds once, from another order of sums; behind it FP8 codes turn.
        assert (
            F.cosine_similarity(grads[n].flatten().double(), g.flatten().double(), dim=0) > 0.999
        ), n


def test_chunked_loss_without_labels_returns_logits(device):
    model, (tokens, labels, positions) = tiny_gpt(), tiny_batch(5, device)
    with patched(model, ActivationConfig(loss="plain")):
        wanted = model(tokens, positions, None)
    with patched(model, ActivationConfig()):
        before = model(tokens, positions, None)
        model(tokens, positions, None, labels=labels)  # leaves nothing behind
        assert torch.equal(before, wanted) and torch.equal(model(tokens, positions, None), wanted)
        # A caller with logits of its own gets what Megatron computes of them.
        raw = torch.randn(SEQ, BATCH, VOCAB, device=device)
        wanted = GPTModel.compute_language_model_loss(model, labels, raw.clone())
        assert torch.equal(model.compute_language_model_loss(labels, raw), wanted)


@pytest.mark.parametrize(("rows", "invariant"), [(1, False), (1, True), (2, False)])
def test_chunked_loss_changed_in_place(rows, invariant, device):
    """As Megatron's loss functions do: at micro-batch 1 what the model returns is a view of the
    flow's output.
    """
    model, (tokens, labels, positions) = tiny_gpt(), (t[:rows] for t in tiny_batch(8, device))

    def gradients(change, **given):
        model.zero_grad(set_to_none=True)
        out = model(tokens, positions, None, **given)
        change(out).mean().backward()
        return [p.grad for p in model.parameters()]

    with patched(model, ActivationConfig(tp_invariant=invariant)):
        for given in ({"labels": labels}, {}):
            wanted = gradients(lambda t: t * weighting(t).to(t.dtype), **given)
            got = gradients(lambda t: t.mul_(weighting(t).to(t.dtype)), **given)
            assert equal(got, wanted)


def test_chunked_loss_after_an_error(device):
    model, (tokens, labels, positions) = tiny_gpt(), tiny_batch(7, device)
    patch_model(model, ActivationConfig())
    with pytest.raises(ValueError, match="labels: got"):
        labelled(model, tokens, labels[:, 1:], positions)
    assert model(tokens, positions, None).shape == (BATCH, SEQ, VOCAB)


class Other(GPTModel):
    pass


def with_attribute(name, value):
    return lambda model: setattr(model.config, name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model, "__class__", Other), "model class Other"),
        (lambda model: setattr(model, "fp16_lm_cross_entropy", True), "fp16_lm_cross_entropy"),
        (with_attribute("mtp_num_layers", 1), "multi-token prediction computes several losses"),
        (with_attribute("config_logger_dir", "logs"), "config.config_logger_dir asks for logits"),
        (
            with_attribute("defer_embedding_wgrad_compute", True),
            "config.defer_embedding_wgrad_compute=True",
        ),
        (with_attribute("use_mup", True), "config.use_mup scales logits"),
    ],
)
def test_loss_stays_plain_with_a_reason(change, reason):
    model = tiny_gpt()
    change(model)
    before = state(model)
    with pytest.raises(
        ValueError, match=r"activation.z_loss: got 0.01, accepted: 0.*\n(.*\n)*.*plain \("
    ):
        patch_model(model, ActivationConfig(z_loss=0.01))
    assert state(model) == before
    report = patch_model(model, ActivationConfig())
    assert report.loss == {"output_layer": f"plain ({reason})"}
    assert not isinstance(model, ChunkedLossGPTModel)
    assert f"  loss     output_layer: plain ({reason})" in str(report)


def test_z_loss_is_added_in_training_and_not_in_evaluation(device):
    model, batch = tiny_gpt(), tiny_batch(10, device)
    with patched(model, ActivationConfig()):
        without = labelled(model, *batch)
    patch_model(model, ActivationConfig(z_loss=1e-2))
    assert (labelled(model, *batch) > without + 0.1).all()  # log(512)**2 / 100 = 0.39
    model.eval()
    with torch.no_grad():
        assert torch.equal(labelled(model, *batch), without)
        model(batch[0], batch[2], None)


def test_z_loss_without_a_chunked_loss_is_refused():
    with pytest.raises(ValueError, match="activation.z_loss: got 0.01, accepted: 0"):
        patch_model(tiny_gpt().decoder, ActivationConfig(z_loss=0.01))
    # Not the last stage.
    patch_model(tiny_gpt(gpt={"post_process": False}), ActivationConfig(z_loss=0.01))
    model, (tokens, _, positions) = tiny_gpt().cpu(), tiny_batch(11)
    patch_model(model, ActivationConfig(z_loss=0.01))
    with pytest.raises(
        ValueError, match="activation.z_loss: got 0.01 and a training model called without labels"
    ):
        model(tokens, positions, None)


@pytest.mark.slow
def test_chunked_loss_under_torch_compile(device, monkeypatch):
    """With its z_loss; nothing of one call's labels is traced."""
    calls, chunked = [], flow.linear_cross_entropy
    monkeypatch.setattr(
        flow, "linear_cross_entropy", lambda *a, **k: (calls.append(a), chunked(*a, **k))[1]
    )
    torch._dynamo.reset()
    model = tiny_gpt()
    patch_model(model, ActivationConfig(z_loss=0.1))
    batches = [tiny_batch(i, device) for i in range(2)]

    compiled = torch.compile(model, backend="eager")
    found = [labelled(compiled, *batch) for batch in batches]
    assert len(calls) == 2
    found[1].sum().backward()
    assert all(
        torch.equal(a, labelled(model, *batch)) for a, batch in zip(found, batches, strict=True)
    )
    torch._dynamo.reset()
