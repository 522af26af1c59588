"""norm → qkv → split and rotation as one function: the same bits as its parts, and nothing more
kept.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from coat_dist.flow import HeadNorms, Heads, heads_again, norm_linear, norm_qkv, rope_table
from coat_dist.flow.function import once_per_tensor
from coat_dist.flow.saved import saved_for_backward
from coat_dist.reference.rope import split_rope, split_rope_backward
from tests.support import equal

from .common import EPS, ONE, Layer, settings
from .saved_bytes import normed_bytes, saved

S, B, H = 12, 3, 64
HEADS = Heads(groups=2, per_group=2, size=16)


def table(batch=1, rot=12):
    return rope_table(torch.randn(S, batch, 1, rot) * 30)


@pytest.mark.parametrize("config", [settings(), settings(forward="quantized", grad_format="e5m2"),
                                    settings(forward_scales="tensor")])  # fmt: skip
@pytest.mark.parametrize("angles", [table(), table(B, 16), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_qkv_has_the_bits_of_its_parts(config, angles, dtype, normed):
    layer = Layer.random(h=H, n=HEADS.width, kind="layernorm", dtype=dtype)
    x = torch.randn(S, B, H, dtype=dtype, requires_grad=True)
    inputs = [x, layer.norm_weight, layer.norm_bias, layer.weight, layer.bias]
    norms, gains = None, []
    if normed:
        gains = [torch.randn(2, 16, dtype=dtype, requires_grad=True)]
        norms = HeadNorms(*gains, (1e-5, 1e-2))
    rest = HEADS, angles, ONE, config, False, norms
    got = norm_qkv(x, layer.norm, layer.weight, layer.bias, *rest)
    mixed = norm_linear(x, layer.norm, layer.weight, layer.bias, ONE, config)
    wanted = split_rope(mixed, HEADS, angles, norms)
    assert [t.shape for t in got] == [(S, B, 4, 16), (S, B, 2, 16), (S, B, 2, 16)]
    assert equal(got, wanted) and all(t.is_contiguous() for t in got[: 2 if normed else 3])
    douts = [torch.randn_like(t) for t in got]
    dmixed, _, dgains = split_rope_backward(*douts, HEADS, angles, norms, mixed)
    grads = torch.autograd.grad(got, inputs + gains, douts)
    assert equal(grads[:5], torch.autograd.grad(mixed, inputs, dmixed))
    if normed:
        assert torch.equal(grads[5], dgains.to(dtype))
        with pytest.raises(ValueError, match=r"head_norms: got .*\[1, 16\], accepted: \[2, 16\]"):
            wrong = HeadNorms(gains[0][:1], norms.eps)
            norm_qkv(x, layer.norm, layer.weight, layer.bias, *rest[:-1], wrong)


@pytest.mark.parametrize("how", ["", "changed in place", "checkpoint"])
def test_queries_and_keys_with_norms_are_made_again_in_backward(how):
    config, angles = settings(), table()
    layer = Layer.random(h=H, n=HEADS.width, dtype=torch.bfloat16)
    x = torch.randn(S, B, H, dtype=torch.bfloat16, requires_grad=True)
    norms = HeadNorms(torch.randn(2, 16, requires_grad=True), (EPS, EPS))
    given = layer.norm, layer.weight, None, HEADS, angles, ONE, config, False, norms
    known = [*layer.parameters().values(), angles.cos, angles.sin, norms.weights]
    # The shared table and the projection's output, in which values are, besides.
    kept = saved(lambda: norm_qkv(x, *given)[0], *known)
    assert sum(kept.values()) == S * B * (normed_bytes(H, config) + 2 * HEADS.width) + 8

    def attend(x, again):
        outs = norm_qkv(x, *given)
        with heads_again(*outs, HEADS, angles, norms) if again else nullcontext():
            if how == "changed in place":
                outs[0].mul_(2)
            heads = (t.permute(1, 2, 0, 3) for t in outs)
            return F.scaled_dot_product_attention(*heads, enable_gqa=True)

    outs = [attend(x, False), attend(x, True)]
    if how == "checkpoint":
        outs[1] = checkpoint(attend, x, True, use_reentrant=False)
    dout = torch.randn_like(outs[0])
    inputs = [x, *layer.parameters().values(), norms.weights]
    wanted, got = (torch.autograd.grad(o, inputs, dout, allow_unused=True) for o in outs)
    assert equal(outs[1], outs[0]) and equal(got, wanted)
    kept = []
    for again in (False, True):
        with saved_for_backward(torch.nn.Module()) as found:
            attend(x, again)
        kept.append(sum(found.values()))
    assert kept[0] - kept[1] == 2 * 16 * S * B * (2 if how == "changed in place" else 6)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        attend(x, True).add_(1).sum().backward()


def test_norm_qkv_with_unused_outputs():
    layer, x = Layer.random(h=H, n=HEADS.width), torch.randn(S, B, H, requires_grad=True)
    _, _, v = norm_qkv(x, layer.norm, layer.weight, None, HEADS, table(), ONE, settings())
    v.sum().backward()
    rows = layer.weight.grad.view(2, 4, 16, H).abs().amax((2, 3)) > 0
    assert rows.tolist() == [[False, False, False, True]] * 2


def test_once_per_tensor_until_one_changes():
    calls = []

    @once_per_tensor
    def total(cosines, sines, *, factor):
        calls.append(factor)
        return (cosines.sum() + sines.sum()).item() * factor

    cosines, sines, others = torch.randn(3, 4).double().unbind()
    for changes in (lambda: None, lambda: cosines.mul_(2), lambda: sines.mul_(2)):
        changes()
        for _ in range(3):
            for factor in (1, 3):
                assert (
                    total(cosines, sines, factor=factor)
                    == (cosines.sum() + sines.sum()).item() * factor
                )
    assert calls == [1, 3] * 3
    assert total(cosines, others, factor=1) == (cosines.sum() + others.sum()).item()
    with torch.inference_mode():
        quiet = torch.ones(2)
        assert total(quiet, quiet, factor=1) == total(quiet, quiet, factor=1) == 4
