"""How the flow's kernels must agree with their definitions; run in the interpreter, and on the GPU in tests/gpu.

Quantization is the same to the byte. Norms and activations sum or exponentiate differently in the last bits of fp32, so
a code may be the neighbour where its value sits that close to the middle.
"""

import itertools

import torch

from coat_dist.formats import E4M3, E5M2
from coat_dist.kernels import activation, norm, quantize
from coat_dist.reference import activation as reference_activation
from coat_dist.reference import norm as reference_norm
from coat_dist.reference import quantize as reference_quantize
from coat_dist.reference.activation import ACTIVATIONS
from coat_dist.reference.quantize import tensor_scale

SCALES = (("e8m0", 32), ("bf16", 16))


def same(got, wanted):
    """Codes equal byte for byte; NaN has several codes."""
    nan = wanted.float().isnan()
    assert got.shape == wanted.shape and got.is_contiguous()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.contiguous().view(torch.uint8)[~nan], wanted.contiguous().view(torch.uint8)[~nan])


def close(got, wanted):
    """Few codes differ, and by one step; below 1e-5 of the largest value, where activations cancel, by anything."""
    assert got.shape == wanted.shape and got.is_contiguous()
    if not wanted.numel():
        return
    a, b = (t.contiguous().view(torch.uint8) for t in (got, wanted))
    values, exact = got.float(), wanted.float()
    different = (a != b) & (torch.maximum(values.abs(), exact.abs()) > 1e-5 * exact.abs().max())
    assert different.sum() <= 3e-3 * different.numel() + 3
    steps = (a & 0x7F).int() - (b & 0x7F).int()
    assert (steps[different].abs() <= 1).all() and (values[different] * exact[different] >= 0).all()


def check_quantize(device="cpu", shapes=((3, 70), (130, 300), (2, 3, 64))):
    """All codes and scales, with zeros, tails and every kind of non-finite value."""
    for fmt, shape, dtype in itertools.product((E4M3, E5M2), shapes, (torch.float32, torch.bfloat16)):
        x = (torch.randn(shape) * torch.exp(3 * torch.randn(shape))).to(device, dtype)
        x.view(-1)[::7] = 0
        x.view(-1)[3] = 1e-39
        for bad in (None, torch.inf, torch.nan):
            if bad is not None:
                x.view(-1)[5] = bad
            amax = reference_quantize.amax(x)
            assert torch.equal(quantize.amax(x), amax)
            many = torch.cat([amax[None], amax.new_tensor([0.0, 1e-38, torch.inf]), torch.rand(1100, device=device)])
            got, wanted = (m.tensor_scale(many, fmt) for m in (quantize, reference_quantize))
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            for kind, size in SCALES:
                got, wanted = (m.quantize_groups(x, fmt, size, kind) for m in (quantize, reference_quantize))
                same(got.codes, wanted.codes)
                assert torch.equal(got.scales.float().nan_to_num(-1), wanted.scales.float().nan_to_num(-1))
            scale = tensor_scale(amax, fmt)
            for turn in (False, True):
                got, wanted = (m.quantize_tensor(x, fmt, scale, turn) for m in (quantize, reference_quantize))
                same(got.codes, wanted.codes)
            both, wanted_both = (m.quantize_both(x, fmt, scale) for m in (quantize, reference_quantize))
            for got, wanted in zip(both, wanted_both, strict=True):
                same(got.codes, wanted.codes)
            if x.dim() == 2:
                wanted = wanted_both[0]
                same(quantize.transpose(wanted).codes, wanted.codes.t())


def off_center(rows, h):
    """``[2, rows, h]``, rows of many magnitudes whose means are up to tens of their deviations; one row is zero."""
    x = (torch.randn(2, rows, h) + 10 * torch.randn(2, rows, 1)) * torch.exp(torch.randn(2, rows, 1))
    x[0, 1] = 0
    return x


def check_compressed(got, wanted, x, fmt, size, scale, exact):
    """x8 and rstd of a norm's first pass. x8 has the definition's bytes for x less the mean that the kernel found,
    whose sum in fp32 may end in other last bits than the definition's."""
    mean = got.stats.mean
    assert (mean is None) == (wanted.stats.mean is None)
    if mean is not None:
        torch.testing.assert_close(mean, wanted.stats.mean, rtol=1e-5, atol=1e-6)
    centered = x.float() if mean is None else x.float() - mean
    x8 = reference_quantize.quantize_groups(centered, fmt, size, scale)
    same(got.x8.codes, x8.codes)
    assert torch.equal(got.x8.scales, x8.scales)
    source = (centered if exact else reference_quantize.dequantize(x8)).double()
    rstd = (source.square().mean(-1, keepdim=True) + 1e-5).rsqrt().float()
    torch.testing.assert_close(got.stats.rstd, rstd, rtol=1e-6, atol=0)


def check_norm(device="cpu", sizes=(64, 200), rows=7):
    for kind, h, fmt, (scale, size), exact in itertools.product(
        ("rmsnorm", "layernorm"), sizes, (E4M3, E5M2), SCALES, (True, False)
    ):
        x = off_center(rows, h).to(device)
        weight = (torch.rand(h, 2) + 0.5).to(device)[:, 0]  # columns of a matrix: not contiguous
        bias = torch.randn(h, 2).to(device)[:, 0] if kind == "layernorm" else None
        arguments = (x, kind, 1e-5, weight, bias)
        got, wanted = (m.norm_compress(*arguments, fmt, size, scale, exact) for m in (norm, reference_norm))
        check_compressed(got, wanted, x, fmt, size, scale, exact)
        y = reference_norm.norm_apply(x if exact else got.x8, got.stats, weight, bias)
        torch.testing.assert_close(got.amax, y.abs().max(), rtol=1e-5, atol=0)
        for a, b in zip(norm.norm_forward(*arguments)[0], reference_norm.norm_forward(*arguments)[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        t8 = tensor_scale(wanted.amax, fmt)
        dy = torch.randn_like(x)
        for source in (x, wanted.x8):
            for turn in (False, True):
                rest = (source, wanted.stats, weight, bias, fmt, t8, turn)
                close(norm.norm_quantize(*rest).codes, reference_norm.norm_quantize(*rest).codes)
            rest = (dy, source, kind, wanted.stats, weight, torch.float32, torch.float32, bias is not None)
            for a, b in zip(norm.norm_backward(*rest), reference_norm.norm_backward(*rest), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            if exact and fmt is E4M3:
                check_residual(rest, torch.randn_like(x))


def check_residual(rest, residual):
    """With a residual: that much more in dx, rounded once; nothing else changes."""
    dx, *sums = norm.norm_backward(*rest)
    turned = residual.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (residual, turned, residual.bfloat16(), torch.zeros_like(residual)):
        got, *others = norm.norm_backward(*rest, residual=given)
        # The GPU's kernel may add with the product before it, which is rounded then: an fp32 rounding of dx apart.
        torch.testing.assert_close(got, dx + given.float(), rtol=3e-7, atol=3e-7 * dx.abs().max().item())
        for a, b in zip(sums, others, strict=True):
            assert (a is None) == (b is None)
            if b is not None:  # compiled apart, so a GPU may fuse other products with sums
                torch.testing.assert_close(a, b, rtol=0, atol=a.is_cuda * 1e-6 * b.abs().max().item())
        low = norm.norm_backward(*rest[:6], torch.bfloat16, rest[7], residual=given)[0]
        step = 2**-8 if low.is_cuda else 2**-7  # one rounding: half a step; the interpreter cuts off
        torch.testing.assert_close(low.float(), got, rtol=step * 1.001, atol=1e-6 * dx.abs().max().item())
    residual[0, 1, 3], residual[1, 0, 5] = torch.nan, torch.inf
    got = norm.norm_backward(*rest, residual=residual)[0]
    assert torch.equal(got.isfinite(), residual.isfinite()) and got[0, 1, 3].isnan() and got[1, 0, 5] == torch.inf


def check_norm_of_no_rows(device="cpu"):
    """As an expert without tokens has them."""
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    got, wanted = (
        m.norm_compress(x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", True) for m in (norm, reference_norm)
    )
    assert got.x8.codes.shape == wanted.x8.codes.shape and got.amax == wanted.amax == 0
    dx, dweight, dbias = norm.norm_backward(
        torch.empty(0, 64, device=device), wanted.x8, "rmsnorm", wanted.stats, weight
    )
    assert dx.shape == (0, 64) and not dweight.any() and not dbias.any()
    assert norm.norm_backward(dx, wanted.x8, "rmsnorm", wanted.stats, weight, residual=dx)[0].shape == (0, 64)


def check_activation(device="cpu", sizes=(64, 176), rows=37, activations=tuple(ACTIVATIONS), variants=5):
    """Every activation, with and without a bias, over tails of rows, columns and groups; ``variants`` of the rest."""
    kinds = itertools.cycle(itertools.product((E4M3, E5M2), SCALES, (True, False), (torch.float32, torch.bfloat16)))
    for act, f, biased in itertools.product(activations, sizes, (False, True)):
        for grad_fmt, (scale, size), exact, dtype in itertools.islice(
            kinds, variants
        ):  # odd: shares no divisor with 16
            width = f * ACTIVATIONS[act].parts
            x = (torch.randn(rows, width) * 2).to(device, dtype)
            x[0, ::3] = 0
            # Large where x is not: a bias that reached rows or columns outside would raise the amax.
            bias = (torch.randn(width, 2) * 3).to(device, dtype)[:, 0] if biased else None
            arguments = (x, act, E4M3, size, scale, exact, bias)
            got, wanted = (m.activation_compress(*arguments) for m in (activation, reference_activation))
            same(got.pre8.codes, wanted.pre8.codes)
            assert torch.equal(got.pre8.scales, wanted.pre8.scales)
            torch.testing.assert_close(got.amax, wanted.amax, rtol=1e-5, atol=0)
            t8 = tensor_scale(wanted.amax, E4M3)
            for (source, b), turn in itertools.product(((x, bias), (wanted.pre8, None)), (False, True)):
                rest = (source, act, E4M3, t8, turn, b)
                close(*(m.activation_quantize(*rest).codes for m in (activation, reference_activation)))
            da = torch.randn(rows, f).to(device, dtype)
            amax = reference_activation.activation_grad_amax(da, wanted.pre8, act)
            torch.testing.assert_close(
                activation.activation_grad_amax(da, wanted.pre8, act), amax, rtol=1e-5, atol=0
            )  # fmt: skip
            sums = torch.float32 if biased else None
            rest = (da, wanted.pre8, act, grad_fmt, tensor_scale(amax, grad_fmt), E4M3, t8, sums)
            got, wanted = (m.activation_backward(*rest) for m in (activation, reference_activation))
            for a, b in zip(got[:3], wanted[:3], strict=True):
                close(a.codes, b.codes)
            assert (got.dbias is None) == (wanted.dbias is None) == (not biased)
            if biased:
                torch.testing.assert_close(got.dbias, wanted.dbias, rtol=1e-5, atol=1e-5 * amax.item() * rows)


def check_activation_of_bad_values(device="cpu"):
    """NaN and infinity reach the amax and the codes; no rows, and one row of one column, are shapes like any other."""
    for act, bad, where in itertools.product(ACTIVATIONS, (torch.inf, -torch.inf, torch.nan), ("pre", "bias", "da")):
        parts = ACTIVATIONS[act].parts
        x, bias, da = torch.randn(5, 48 * parts), torch.randn(48 * parts), torch.randn(5, 48)
        {"pre": x[2], "bias": bias, "da": da[2]}[where][7] = bad
        x, bias, da = x.to(device), bias.to(device), da.to(device)
        got, wanted = (
            m.activation_compress(x, act, E4M3, 32, "e8m0", True, bias) for m in (activation, reference_activation)
        )
        same(got.pre8.codes, wanted.pre8.codes)
        assert torch.equal(got.pre8.scales, wanted.pre8.scales)
        assert got.amax == wanted.amax or torch.isclose(got.amax, wanted.amax, rtol=1e-5)
        one = torch.ones((), device=device)
        rest = (da, wanted.pre8, act, E4M3, one, E4M3, one, torch.float32)
        a, b = (m.activation_backward(*rest) for m in (activation, reference_activation))
        for mine, expected in zip(a[:3], b[:3], strict=True):
            assert torch.equal(mine.codes.float().isnan(), expected.codes.float().isnan())
        assert torch.equal(a.dbias.isfinite(), b.dbias.isfinite())
        amaxes = [m.activation_grad_amax(da, wanted.pre8, act) for m in (activation, reference_activation)]
        torch.testing.assert_close(*amaxes, rtol=1e-5, atol=0)
    shapes = (
        (0, 32, "swiglu"),
        (0, 32, "gelu"),
        (1, 1, "geglu"),
        (1, 1, "squared_relu"),
        (17, 1, "gelu"),
        (70, 5, "geglu"),
    )
    for rows, f, act in shapes:
        x, da = torch.randn(rows, f * ACTIVATIONS[act].parts).to(device), torch.randn(rows, f).to(device)
        bias = torch.ones(x.shape[1]).to(device)
        got, wanted = (
            m.activation_compress(x, act, E4M3, 32, "e8m0", True, bias) for m in (activation, reference_activation)
        )
        same(got.pre8.codes, wanted.pre8.codes)
        torch.testing.assert_close(got.amax, wanted.amax, rtol=1e-5, atol=0)
        scale = tensor_scale(wanted.amax, E4M3)
        close(
            *(m.activation_quantize(x, act, E4M3, scale, False, bias).codes for m in (activation, reference_activation))
        )
        rest = (da, wanted.pre8, act, E4M3, scale, E4M3, scale, torch.float64)
        a, b = (m.activation_backward(*rest) for m in (activation, reference_activation))
        for mine, expected in zip(a[:3], b[:3], strict=True):
            close(mine.codes, expected.codes)
        assert a.dbias.dtype == torch.float64
        torch.testing.assert_close(a.dbias, b.dbias, rtol=1e-5, atol=1e-5)
