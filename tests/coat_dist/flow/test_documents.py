"""Several documents in a sequence: each attends within itself, as if it were alone, and nothing
more is saved.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from coat_dist.flow import Documents, attention, sdpa
from tests.support import equal

from .common import settings
from .saved_bytes import saved

LENGTHS = [5, 1, 17, 0, 9, 1, 7]
T, HEADS, D = sum(LENGTHS), 4, 32
FP8 = settings(attention="fp8")


def documents(lengths=LENGTHS):
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Documents(starts, max(lengths))


def qkv(groups=2, dtype=torch.bfloat16):
    return [torch.randn(T, 1, n, D).to(dtype).requires_grad_() for n in (HEADS, groups, groups)]


def kinds(which):
    if which == "bf16":
        return lambda q, k, v, docs=None, **o: sdpa(q, k, v, documents=docs, **o)
    return lambda q, k, v, docs=None, **o: attention(q, k, v, FP8, documents=docs, **o)[0]


ATTENDS = kinds("bf16"), kinds("fp8")


def each_alone(attend, inputs, docs, **options):
    ends = docs.bounds
    return torch.cat(
        [attend(*(t[a:b] for t in inputs), **options) for a, b in itertools.pairwise(ends) if a < b]
    )


@pytest.mark.parametrize("which", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, [T]], ids=["several", "one"])
def test_documents_have_the_bits_that_each_has_alone(which, dtype, groups, causal, lengths):
    inputs, attend, docs = qkv(groups, dtype), kinds(which), documents(lengths)
    options = {"causal": causal, "scale": 0.3}
    out = attend(*inputs, docs, **options)
    alone = each_alone(attend, inputs, docs, **options)
    assert torch.equal(out, alone)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(alone, inputs, dout)
    for _ in range(2):
        assert equal(torch.autograd.grad(out, inputs, dout, retain_graph=True), wanted)
    with torch.no_grad():
        assert torch.equal(attend(*inputs, docs, **options), out)
    recomputed = checkpoint(attend, *inputs, docs, **options, use_reentrant=False)
    assert equal(torch.autograd.grad(recomputed, inputs, dout), wanted)


@pytest.mark.parametrize("groups", [4, 2])
def test_documents_are_softmax_under_a_block_mask(groups):
    """The definition in other words: one softmax over all keys of which those of other documents
    are masked.
    """
    inputs = [t.detach().double().requires_grad_() for t in qkv(groups)]
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    mask = (owner[:, None] == owner) & torch.ones(T, T, dtype=torch.bool).tril()
    heads_first = [t.permute(1, 2, 0, 3) for t in inputs]
    wanted = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).permute(
        2, 0, 1, 3
    )
    out = sdpa(*inputs, documents=documents()).view(wanted.shape)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    grads = [torch.autograd.grad(o, inputs, dout) for o in (out, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("which", ["bf16", "fp8"])
def test_documents_saved_bytes(which):
    """q, k, v and the output once, and a logarithm of a sum for each token and head."""
    inputs, attend = qkv(), kinds(which)
    ignored = inputs if which == "fp8" else ()
    kept = [
        sum(saved(lambda d=d: attend(*inputs, d), *ignored).values()) for d in (None, documents())
    ]
    assert kept[0] == kept[1]


def test_documents_dropout():
    inputs = qkv(HEADS, torch.float32)
    torch.manual_seed(1)
    out = sdpa(*inputs, documents=documents(), dropout=0.5)
    torch.manual_seed(1)
    alone = each_alone(sdpa, inputs, documents(), dropout=0.5)
    dout = torch.randn_like(out)
    assert torch.equal(out, alone) and not torch.equal(out, sdpa(*inputs, documents=documents()))
    assert equal(*(torch.autograd.grad(o, inputs, dout) for o in (out, alone)))


def test_documents_beside_nan():
    """Other documents may even be NaN."""
    for attend in ATTENDS:
        inputs = qkv()
        wanted = attend(*inputs, documents())
        for t in inputs:
            t.data[6:23] = float("nan")
        out = attend(*inputs, documents())
        assert (
            torch.equal(out[:6], wanted[:6])
            and torch.equal(out[23:], wanted[23:])
            and out[6:23].isnan().all()
        )


@pytest.mark.parametrize("lengths", [LENGTHS, [1] * 8, [40], [0, 3, 0, 2, 0]])
def test_documents_positions(lengths):
    wanted = torch.cat([torch.arange(n) for n in lengths])
    assert torch.equal(documents(lengths).positions(sum(lengths)), wanted)


def test_documents_refuse_misfits():
    q, k, v = qkv()
    starts = documents().cu_seqlens
    for given, message in (
        (
            Documents(starts.long(), 17),
            r"cu_seqlens: got torch.int64 \[8\], accepted: torch.int32 \[documents \+ 1\]",
        ),
        (
            Documents(starts - 1, 17),
            r"cu_seqlens: got \[-1, 4, .*, 39\], accepted: from 0 up to the number of tokens, 40",
        ),
        (Documents(starts[:-1], 17), "accepted: from 0 up to the number of tokens, 40"),
        (
            Documents(starts, 16),
            "max_seqlen: got 16, accepted: an int, 17 or more, the tokens of the longest",
        ),
        (Documents(starts, torch.tensor(17)), r"max_seqlen: got tensor\(17\), accepted: an int"),
    ):
        for attend in ATTENDS:
            with pytest.raises(ValueError, match=message):
                attend(q, k, v, given)
    with pytest.raises(
        ValueError, match=r"q: got \[40, 2, 4, 32\] with 40 keys, accepted: \[s, 1, heads, d\]"
    ):
        sdpa(*(t.expand(-1, 2, -1, -1) for t in (q, k, v)), documents=documents())
