"""Several documents in a sequence on a GPU: flash attention against one SDPA a document, bytes,
no waiting.
"""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_dist.config import ActivationConfig
from coat_dist.flow import Documents, TensorParallel, attention, linear, sdpa
from coat_dist.flow.blocks.documents import why_no_flash
from launch.data.packed import pack_lengths
from megatron_patches import patch_model
from tests.coat_dist.flow.common import relative_error
from tests.coat_dist.flow.saved_bytes import saved
from tests.coat_dist.flow.test_documents import FP8, each_alone, kinds
from tests.support.devices import CONVERTS_FP8

if not CONVERTS_FP8:
    pytest.skip("needs a GPU that converts FP8", allow_module_level=True)

CASES = {
    "few": [300, 1, 700, 23],
    "many": [1, 2, 3, 5, 8, 13] * 40,
    "ones": [1] * 256,
    "empty": [0, 128, 0, 0, 384, 0],
    "one": [1024],
}
SHAPES = [(8, 8, 128), (8, 2, 128), (6, 1, 64), (4, 4, 80), (4, 2, 256)]


def documents(lengths, known=True):
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    return Documents(starts, max(lengths), tuple(lengths) if known else None)


def qkv(tokens, heads, groups, d, dtype=torch.bfloat16):
    return [
        torch.randn(tokens, 1, n, d, device="cuda", dtype=dtype).requires_grad_()
        for n in (heads, groups, groups)
    ]


@pytest.mark.parametrize("which", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_documents_are_as_each_alone(which, shape, case):
    """Errors are those of two kernels that round to BF16; FP8 rounds the output again."""
    lengths, attend = CASES[case], kinds(which)
    if case == "many" and shape != SHAPES[1]:
        pytest.skip("one shape is enough for many documents")
    inputs = qkv(sum(lengths), *shape)
    assert why_no_flash(*inputs) is None
    for causal in (True, False):
        out = attend(*inputs, documents(lengths), causal=causal)
        alone = each_alone(attend, inputs, documents(lengths), causal=causal)
        dout = torch.randn_like(out)
        grads, wanted = (torch.autograd.grad(o, inputs, dout) for o in (out, alone))
        assert relative_error(out, alone) < (0.006 if which == "bf16" else 0.02)
        for got, expected in zip(grads, wanted, strict=True):
            # A document of one token has no gradient of its scores.
            if expected.norm() > 1e-3 * dout.norm():
                assert relative_error(got, expected) < (0.015 if which == "bf16" else 0.05)


@pytest.mark.parametrize("which", ["bf16", "fp8"])
def test_one_document_is_the_whole_sequence_to_the_bit(which):
    inputs, attend = qkv(1024, 8, 2, 128), kinds(which)
    assert torch.equal(attend(*inputs, documents([1024])), attend(*inputs))


@pytest.mark.parametrize("which", ["bf16", "fp8"])
def test_nothing_is_left_of_other_documents(which):
    lengths, attend = CASES["few"], kinds(which)
    inputs = qkv(sum(lengths), 8, 2, 128)
    wanted = attend(*inputs, documents(lengths))
    for t in inputs:
        t.data[301:1001] = float("nan")
    out = attend(*inputs, documents(lengths))
    assert torch.equal(out[:301], wanted[:301]) and torch.equal(out[1001:], wanted[1001:])
    assert out[301:1001].isnan().all()


def test_a_kernel_that_is_not_there_is_one_sdpa_a_document():
    inputs = qkv(1024, 8, 2, 128, torch.float32)
    assert why_no_flash(*inputs) == "float32 tensors"
    for known in (True, False):
        out = sdpa(*inputs, documents=documents(CASES["few"], known))
        assert torch.equal(out, each_alone(kinds("bf16"), inputs, documents(CASES["few"])))
    with sdpa_kernel(SDPBackend.MATH):
        low = [t.bfloat16() for t in inputs]
        assert why_no_flash(*low) == "flash attention is switched off"
        out = sdpa(*low, documents=documents(CASES["few"]))
    assert relative_error(out, each_alone(kinds("bf16"), low, documents(CASES["few"]))) < 0.02


@pytest.mark.parametrize("which", ["bf16", "fp8"])
def test_saved_bytes(which):
    """As of one document, but for flash attention's state of the random generator: 24 bytes."""
    inputs, docs = qkv(1024, 8, 2, 128), documents(CASES["few"])
    ignored = [*inputs, docs.cu_seqlens]
    weight = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)

    def block(d):
        if which == "bf16":
            return linear(sdpa(*inputs, documents=d), weight, TensorParallel(), FP8)
        return linear(
            *(r := attention(*inputs, FP8, documents=d))[:1], weight, TensorParallel(), FP8, r[1]
        )

    kept = [sum(saved(lambda d=d: block(d), weight, *ignored).values()) for d in (None, docs)]
    assert kept[1] <= kept[0] + 64


def batch(lengths, seed=0):
    tokens = torch.randint(
        0, 512, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed)
    ).cuda()
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    return tokens, positions


@pytest.mark.parametrize(
    "settings", [None, ActivationConfig(), FP8, ActivationConfig(forward="quantized")]
)
@pytest.mark.parametrize(
    "options", [{}, {"num_query_groups": 2, "qk_layernorm": True}], ids=["llama", "gqa_qk_norm"]
)
def test_a_model_does_not_wait_and_sees_each_document_alone(settings, options):
    """Other lengths in every batch; from the second on, nothing may wait for the GPU."""
    from tests.megatron_patches.tiny import tiny_gpt
    from tests.support import megatron_on_one_rank

    with megatron_on_one_rank():
        model = tiny_gpt(gpt={"max_sequence_length": 512}, **options)
        if settings is not None:
            patch_model(model, settings)
        packs = [[100, 1, 300, 111], [17, 200, 200, 95], [256, 1, 1, 254], [1] * 100 + [412]]
        given = [(*batch(lengths), pack_lengths(lengths, "cuda")) for lengths in packs]
        outs = []
        for index, (tokens, positions, params) in enumerate(given):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if index else "default")
            try:
                out = model(tokens, positions, None, packed_seq_params=params)
                out.float().square().mean().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            outs.append(out.detach())
        for (tokens, positions, _), lengths, out in zip(given, packs, outs, strict=True):
            ends = itertools.pairwise([0, *itertools.accumulate(lengths)])
            with torch.no_grad():
                alone = torch.cat(
                    [model(tokens[:, a:b], positions[:, a:b], None) for a, b in ends], 1
                )
            assert relative_error(out, alone) < 0.08
            assert (
                relative_error(model(tokens, torch.arange(512, device="cuda")[None], None), alone)
                > 0.1
            )
