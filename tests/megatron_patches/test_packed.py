"""Several documents in a sequence through a GPT model: as each alone, patched or not, in
whatever way it is run.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention

import megatron_patches as mp
from coat_dist import flow
from coat_dist.config import ActivationConfig
from megatron_patches import patch_model
from megatron_patches.layers.core_attention import SDPA
from megatron_patches.layers.loss import ChunkedLossGPTModel
from tests.support import equal, run_ranks

from .tiny import FP32, FULL, VOCAB, selective, tiny_gpt
from .training import INVARIANT, engine_config, start, whole_parameters

LENGTHS = [7, 1, 20, 13, 1, 22]
T = sum(LENGTHS)
LONG = {"gpt": {"max_sequence_length": T}}
SETTINGS = {
    "unpatched": None,
    "plain_loss": ActivationConfig(loss="plain"),
    "quantized": ActivationConfig(forward="quantized"),
    "fp8_attention": ActivationConfig(attention="fp8"),
}
MODELS = {
    "llama": {},
    "gqa_qk_norm": {"num_query_groups": 2, "qk_layernorm": True},
    "learned_positions": {
        "gpt": {"max_sequence_length": T, "position_embedding_type": "learned_absolute"}
    },
}


def params(lengths=LENGTHS, longest=None, device="cpu"):
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = longest or max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def text(seed=1, lengths=LENGTHS, device="cpu"):
    tokens = torch.randint(
        0, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed)
    )
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return tokens.to(device), tokens.roll(-1).to(device), positions.to(device)


def per_token(model, tokens, labels, positions, packed=None):
    """Losses ``[1, T]``."""
    if isinstance(model, ChunkedLossGPTModel):
        return model(tokens, positions, None, labels=labels, packed_seq_params=packed)
    logits = model(tokens, positions, None, packed_seq_params=packed)
    return flow.vocab_parallel_cross_entropy(logits, labels, flow.TensorParallel())


def each_alone(model, tokens, labels, positions):
    ends = itertools.pairwise([0, *itertools.accumulate(LENGTHS)])
    return torch.cat(
        [per_token(model, tokens[:, a:b], labels[:, a:b], positions[:, a:b]) for a, b in ends], 1
    )


def same(together, alone):
    """To the bit; of a document of one token up to two last bits, as some CPUs multiply one row
    in another order.
    """
    several = torch.tensor([n > 1 for n in LENGTHS for _ in range(n)], device=together.device)
    torch.testing.assert_close(together, alone, rtol=3e-7, atol=0)
    return torch.equal(together[:, several], alone[:, several])


def gradients(model, losses):
    model.zero_grad(set_to_none=True)
    losses.mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def built(settings, **options):
    model = tiny_gpt(**LONG | options)
    if settings is not None:
        patch_model(model, settings)
    return model


@pytest.mark.parametrize(
    ("settings", "kind"),
    [*((name, "llama") for name in SETTINGS), *(("fp8_attention", kind) for kind in MODELS)],
)
def test_packed_documents_have_the_losses_that_they_have_alone(settings, kind, device):
    """To the bit on the CPU, as every scale of forward is a row's or a group's. One of a tensor
    would be shared.
    """
    model = built(SETTINGS[settings], **MODELS[kind])
    batch = text(device=device)
    together, alone = per_token(model, *batch, params(device=device)), each_alone(model, *batch)
    if device == "cpu":
        assert same(together, alone)
    else:
        torch.testing.assert_close(together, alone, rtol=0.05, atol=0.05)
    assert not torch.equal(
        together, per_token(model, *batch[:2], torch.arange(T, device=device)[None])
    )
    # Of backward: a gradient is quantized with one scale a tensor, so it depends on which documents
    # it belongs to. Where nothing is patched, only the order of sums differs: bf16.
    grads, wanted = gradients(model, together), gradients(model, alone)
    for name, g in wanted.items():
        apart = (grads[name].double() - g.double()).norm() / g.double().norm()
        assert apart < (0.02 if settings == "unpatched" else 0.12), (name, apart)


def test_packed_documents_in_fp32_with_megatrons_rotation():
    """Megatron's attention around our core attention rotates document by document: the same
    bits, one layer further.
    """
    # A patched layer that runs Megatron's forward.
    model, batch = built(ActivationConfig(), test_mode=True), text()
    assert same(per_token(model, *batch, params()), each_alone(model, *batch))
    model, batch = tiny_gpt(**FP32, **LONG), text()
    ours, alone = per_token(model, *batch, params()), each_alone(model, *batch)
    # Some CPUs sum fp32 products of few rows otherwise.
    torch.testing.assert_close(ours, alone, rtol=2e-6, atol=0)
    grads, wanted = gradients(model, ours), gradients(model, alone)
    for layer in model.decoder.layers:
        assert isinstance(layer.self_attention.core_attention, SDPA)
        layer.self_attention.__class__ = SelfAttention
    theirs = per_token(model, *batch, params())
    assert torch.equal(theirs, ours)
    for name, g in gradients(model, theirs).items():
        torch.testing.assert_close(g, grads[name], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(g, wanted[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "recompute"),
    [("quantized", selective("core_attn")), ("fp8_attention", selective("layernorm", "mlp"))]
    + [(settings, FULL) for settings in ("unpatched", "quantized", "fp8_attention")],
)
def test_packed_documents_with_recomputation(settings, recompute, device, monkeypatch):
    calls, positions = [], flow.Documents.positions
    monkeypatch.setattr(flow.Documents, "positions", lambda *a: (calls.append(a), positions(*a))[1])
    batch = text(device=device)
    seen = []
    for options in ({}, recompute):
        model = built(SETTINGS[settings], **options)
        losses = per_token(model, *batch, params(device=device))
        seen.append((losses, gradients(model, losses)))
    assert torch.equal(seen[0][0], seen[1][0]) and len(calls) == 2, (
        "angles are gathered once, for all layers"
    )
    if device == "cpu":
        assert equal(seen[0][1], seen[1][1])


def test_packed_documents_with_changed_lengths():
    """The same object with other documents, in place or by another tensor."""
    model, batch, given = built(ActivationConfig()), text(), params()
    first = per_token(model, *batch, given)
    given.cu_seqlens_q[1] = 3
    second = per_token(model, *batch, given)
    assert torch.equal(second, per_token(model, *batch, params([3, 5, *LENGTHS[2:]])))
    assert not torch.equal(first, second)
    given.cu_seqlens_q = given.cu_seqlens_kv = params().cu_seqlens_q
    assert torch.equal(per_token(model, *batch, given), first)


@pytest.mark.parametrize("settings", ["unpatched", "fp8_attention"])
def test_packed_refuses_by_name(settings):
    model, (tokens, labels, positions) = built(SETTINGS[settings]), text()
    starts = params().cu_seqlens_q
    for fields, message in (
        ({"qkv_format": "sbhd"}, "packed_seq_params.qkv_format: got 'sbhd', accepted: \"thd\""),
        (
            {"cu_seqlens_q_padded": starts},
            r"packed_seq_params.cu_seqlens_q_padded: got a tensor \[7\], accepted: None",
        ),
        (
            {"cu_seqlens_kv": starts + 1},
            "packed_seq_params.cu_seqlens_kv: got a tensor .*, accepted: cu_seqlens_q",
        ),
        (
            vars(params([7, 1])),
            r"packed_seq_params.cu_seqlens: got \[0, 7, 8\], accepted: from 0 up to .* tokens, 64",
        ),
        (
            vars(params(longest=21)),
            "packed_seq_params.max_seqlen: got 21, accepted: an int, 22 or more",
        ),
    ):
        given = params()
        for name, value in fields.items():
            setattr(given, name, value)
        with pytest.raises(ValueError, match=message):
            per_token(model, tokens, labels, positions, given)
    two = [t.view(2, -1) for t in (tokens, labels, positions)]
    with pytest.raises(
        ValueError,
        match=r"packed_seq_params: got 2 sequences of 32 tokens, accepted: tokens \[1, T\]",
    ):
        per_token(model, *two, params([16, 16]))


def _ranks(rank, world):
    """Tensor and sequence parallelism: the same losses, and gradients but for rounding.
    DeepSpeed's engines hand the documents on.
    """
    settings = INVARIANT.model_copy(update={"attention": "fp8", "loss": "chunked"})
    first = None
    for tp, sp in ((1, False), (2, False), (2, True)):
        start(tp)
        options = {"tensor_model_parallel_size": tp, "sequence_parallel": sp, "num_query_groups": 2}
        model = built(settings, **options)
        mp.install_replicated_grad_hooks(model)
        losses = per_token(model, *text(), params())
        losses.mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.grad)
        grads = whole_parameters(model)
        first = first or (losses, grads)
        assert torch.equal(losses, first[0])
        for name, wanted in first[1].items():
            apart = (grads[name].double() - wanted.double()).norm()
            assert apart < 0.02 * wanted.double().norm(), name
    start()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = engine_config(3, train_micro_batch_size_per_gpu=1, zero_optimization=zero)
    engine, *_ = mp.initialize(model=tiny_gpt(**LONG), config=config, dist_init_required=False)
    tokens, labels, positions = text(rank)
    found = engine(tokens, positions, None, labels=labels, packed_seq_params=params())
    engine.backward(found.mean())
    assert same(found, each_alone(built(ActivationConfig()), tokens, labels, positions))


def test_packed_documents_with_tensor_parallelism_and_engines():
    run_ranks(2, _ranks)
