"""The definition of split and rotation, against complex numbers and against autograd."""

from dataclasses import replace

import pytest
import torch

from coat_dist.reference.quantize import amax
from coat_dist.reference.rope import HeadNorms, Heads, rope_table, split_rope, split_rope_backward

HEADS = Heads(groups=2, per_group=3, size=16)


def angles(s=5, b=1, rot=16, interleaved=False):
    half = torch.randn(s, b, 1, rot // 2) * 30
    return torch.stack((half, half), -1).flatten(-2) if interleaved else torch.cat((half, half), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [16, 10])
@pytest.mark.parametrize("batch", [1, 3])
def test_split_rope_turns_pairs_in_the_complex_plane(interleaved, rot, batch):
    mixed, freqs = torch.randn(5, 3, HEADS.width), angles(b=batch, rot=rot, interleaved=interleaved)
    q, k, v = split_rope(mixed, HEADS, rope_table(freqs, interleaved, 1.5))
    for group in range(2):
        slots = mixed.view(5, 3, 2, 5, 16)[:, :, group]
        assert torch.equal(v[:, :, group], slots[:, :, 4])
        for got, given in [(q[:, :, 3 * group + i], slots[:, :, i]) for i in range(3)] + [
            (k[:, :, group], slots[:, :, 3])
        ]:
            pairs = given[..., :rot].unflatten(-1, (-1, 2) if interleaved else (2, -1))
            a, b = pairs.unbind(-1 if interleaved else -2)
            theta = (freqs[..., ::2] if interleaved else freqs[..., : rot // 2]).squeeze(2).double()
            turned = torch.complex(a.double(), b.double()) * torch.polar(
                torch.full_like(theta, 1.5), theta
            )
            turned = torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)
            torch.testing.assert_close(got[..., :rot], turned.float(), rtol=1e-5, atol=1e-5)
            assert torch.equal(got[..., rot:], given[..., rot:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [16, 6, 0])
@pytest.mark.parametrize("normed", [False, True])
def test_split_rope_backward_is_autograds(interleaved, rot, normed):
    """Angles of a pair need not even be the same."""
    table = rope_table(torch.randn(5, 3, 1, rot) * 9, interleaved, 0.7) if rot else None
    mixed, norms = torch.randn(5, 3, HEADS.width, requires_grad=True), None
    inputs, near = [mixed], 0
    if normed:
        norms, near = HeadNorms(torch.randn(2, 16, requires_grad=True), (0.1, 1e-5)), 1e-4
        inputs.append(norms.weights)
    parts = split_rope(mixed, HEADS, table, norms)
    assert all(p.is_contiguous() for p in parts[: 4 - len(inputs)])
    gradients = [torch.randn_like(p) for p in parts]
    wanted = torch.autograd.grad(parts, inputs, gradients)
    got, top, dgains = split_rope_backward(*gradients, HEADS, table, norms, mixed)
    found = (got, dgains)[: len(inputs)]
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    assert got.is_contiguous() and torch.equal(top, amax(got))


def test_norms_of_heads_come_before_the_rotation():
    heads, table = replace(HEADS, blocks=True), rope_table(angles(rot=10))
    mixed, norms = torch.randn(5, 3, HEADS.width), HeadNorms(torch.randn(2, 16), (0.1, 1e-5))
    parts = list(heads.split(mixed))
    for i in range(2):
        parts[i] = torch.nn.functional.rms_norm(parts[i], (16,), norms.weights[i], norms.eps[i])
    wanted = split_rope(torch.cat(parts, 2).flatten(2), heads, table)
    got = split_rope(mixed, heads, table, norms)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert got[2].untyped_storage().data_ptr() == mixed.data_ptr()


@pytest.mark.parametrize("blocks, batch_first", [(True, False), (False, True), (True, True)])
def test_split_rope_of_other_orders(blocks, batch_first):
    mixed, table = torch.randn(5, 3, HEADS.width), rope_table(angles(b=3))
    other = mixed
    if blocks:
        q, k, v = HEADS.split(mixed)
        other = torch.cat((q.flatten(2, 3), k, v), 2).flatten(2)
    turn = (lambda t: t.transpose(0, 1).contiguous()) if batch_first else (lambda t: t)
    heads = replace(HEADS, blocks=blocks, batch_first=batch_first)
    wanted, got = split_rope(mixed, HEADS, table), split_rope(turn(other), heads, table)
    assert all(torch.equal(g, turn(w)) for g, w in zip(got, wanted, strict=True))
    other.requires_grad_()
    gradients = [torch.randn_like(g) for g in got]
    (expected,) = torch.autograd.grad(split_rope(turn(other), heads, table), other, gradients)
    dmixed, top, _ = split_rope_backward(*gradients, heads, table)
    assert torch.equal(turn(dmixed), expected) and torch.equal(top, amax(expected))


def test_split_rope_rounds_bfloat16_once():
    mixed, table = torch.randn(5, 3, HEADS.width).bfloat16(), rope_table(angles())
    for got, exact in zip(
        split_rope(mixed, HEADS, table), split_rope(mixed.float(), HEADS, table), strict=True
    ):
        assert got.dtype == torch.bfloat16 and torch.equal(got, exact.bfloat16())
    gradients = [torch.randn(5, 3, n, 16).bfloat16() for n in (6, 2, 2)]
    got, *_ = split_rope_backward(*gradients, HEADS, table)
    exact, *_ = split_rope_backward(*(g.float() for g in gradients), HEADS, table)
    assert torch.equal(got, exact.bfloat16())


def test_split_rope_refuses_misfits():
    mixed, table = torch.randn(5, 3, HEADS.width), rope_table(angles())
    with pytest.raises(ValueError, match=r"qkv: got shape \[5, 3, 159\], accepted: \[s, b, 160\]"):
        split_rope(mixed[..., 1:], HEADS, table)
    with pytest.raises(
        ValueError, match=r"rope table: got shape \[4, 1, 16\], accepted: \[5, 1 or 3, at most 16\]"
    ):
        split_rope(mixed, HEADS, rope_table(angles(s=4)))
    with pytest.raises(ValueError, match=r"rope table: got shape \[5, 1, 18\]"):
        split_rope(mixed, HEADS, rope_table(angles(rot=18)))
    for shape in ((5, 16), (5, 1, 1, 7), (5, 1, 2, 8)):
        with pytest.raises(ValueError, match="freqs: got shape .*, accepted: .*an even number"):
            rope_table(torch.zeros(shape))
