"""How the kernels of norms must agree with their definitions.

What is saved is the same to the byte. So is the result where it is made of products alone, given
the kernel's own statistics; elsewhere sums differ in the last bits of fp32, and a code may be the
neighbour.
"""

import itertools

import torch

from coat_dist.formats import E3M4, E4M3, E5M2, INT8, QuantizedTensor
from coat_dist.kernels import norm
from coat_dist.reference import norm as reference
from coat_dist.reference import quantize as reference_quantize
from coat_dist.reference.quantize import tensor_scale

from .codes import SCALES, check_top, close, close_rows, same_groups, same_rows


def off_center(rows, h):
    """``[2, rows, h]``, rows of many magnitudes whose means are up to tens of their deviations;
    one row is zero.
    """
    x = (torch.randn(2, rows, h) + 10 * torch.randn(2, rows, 1)) * torch.exp(
        torch.randn(2, rows, 1)
    )
    x[0, 1] = 0
    return x


SAVED = {E4M3: E3M4, E5M2: INT8}
"""Format of what is saved, by that of the result."""


def check_compressed(got, wanted, x, fmt, size, scale, exact):
    """x8 and rstd of a norm's first pass. x8 has the definition's bytes for x less the mean that
    the kernel found, whose sum in fp32 may end in other last bits than the definition's.
    """
    mean = got.stats.mean
    assert (mean is None) == (wanted.stats.mean is None)
    if mean is not None:
        torch.testing.assert_close(mean, wanted.stats.mean, rtol=1e-5, atol=1e-6)
    centered = x.float() if mean is None else x.float() - mean
    x8 = reference_quantize.quantize_groups(centered, fmt, size, scale)
    same_groups(got.x8, x8)
    source = (centered if exact else reference_quantize.dequantize(x8)).double()
    rstd = (source.square().mean(-1, keepdim=True) + 1e-5).rsqrt().float()
    torch.testing.assert_close(got.stats.rstd, rstd, rtol=1e-6, atol=0)


def check_norm(device="cpu", kinds=("rmsnorm", "layernorm"), sizes=(64, 200), rows=7):
    for kind, h, fmt, (scale, size), exact in itertools.product(
        kinds, sizes, (E4M3, E5M2), SCALES, (True, False)
    ):
        x = off_center(rows, h).to(device)
        weight = (torch.rand(h, 2) + 0.5).to(device)[:, 0]  # columns of a matrix: not contiguous
        bias = torch.randn(h, 2).to(device)[:, 0] if kind == "layernorm" else None
        arguments = (x, kind, 1e-5, weight, bias)
        got, wanted = (
            m.norm_compress(*arguments, fmt, size, scale, exact, SAVED[fmt])
            for m in (norm, reference)
        )
        check_compressed(got, wanted, x, SAVED[fmt], size, scale, exact)
        y = reference.norm_apply(x if exact else got.x8, got.stats, weight, bias)
        torch.testing.assert_close(got.amax, y.abs().max(), rtol=1e-5, atol=0)
        for a, b in zip(
            norm.norm_forward(*arguments)[0], reference.norm_forward(*arguments)[0], strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        t8 = tensor_scale(wanted.amax, fmt)
        dy = torch.randn_like(x)
        for source in (x, wanted.x8):
            for turn in (False, True):
                rest = (source, wanted.stats, weight, bias, fmt, t8, turn)
                close(norm.norm_quantize(*rest).codes, reference.norm_quantize(*rest).codes)
            rest = (
                dy,
                source,
                kind,
                wanted.stats,
                weight,
                torch.float32,
                torch.float32,
                bias is not None,
            )
            for a, b in zip(norm.norm_backward(*rest), reference.norm_backward(*rest), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            if exact and fmt is E4M3:
                check_residual(rest, torch.randn_like(x))


def check_residual(rest, residual):
    """With a residual: that much more in dx, rounded once; nothing else changes."""
    dx, *sums = norm.norm_backward(*rest)
    turned = residual.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (residual, turned, residual.bfloat16(), torch.zeros_like(residual)):
        got, *others = norm.norm_backward(*rest, residual=given)
        # The GPU's kernel may add with the product before it, which is rounded then: an fp32
        # rounding of dx apart.
        torch.testing.assert_close(
            got, dx + given.float(), rtol=3e-7, atol=3e-7 * dx.abs().max().item()
        )
        for a, b in zip(sums, others, strict=True):
            assert (a is None) == (b is None)
            if b is not None:  # compiled apart, so a GPU may fuse other products with sums
                torch.testing.assert_close(
                    a, b, rtol=0, atol=a.is_cuda * 1e-6 * b.abs().max().item()
                )
        low = norm.norm_backward(*rest[:6], torch.bfloat16, rest[7], residual=given)[0]
        # One rounding: half a step; the interpreter cuts off.
        step = 2**-8 if low.is_cuda else 2**-7
        torch.testing.assert_close(
            low.float(), got, rtol=step * 1.001, atol=1e-6 * dx.abs().max().item()
        )
    residual[0, 1, 3], residual[1, 0, 5] = torch.nan, torch.inf
    got = norm.norm_backward(*rest, residual=residual)[0]
    assert (
        torch.equal(got.isfinite(), residual.isfinite())
        and got[0, 1, 3].isnan()
        and got[1, 0, 5] == torch.inf
    )


def check_norm_of_no_rows(device="cpu"):
    """As an expert without tokens has them."""
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    got, wanted = (
        m.norm_compress(x, "rmsnorm", 1e-5, weight, None, E4M3, 32, "e8m0", True)
        for m in (norm, reference)
    )
    assert got.x8.codes.shape == wanted.x8.codes.shape and got.amax == wanted.amax == 0
    dx, dweight, dbias = norm.norm_backward(
        torch.empty(0, 64, device=device), wanted.x8, "rmsnorm", wanted.stats, weight
    )
    assert dx.shape == (0, 64) and not dweight.any() and not dbias.any()
    assert norm.norm_backward(dx, wanted.x8, "rmsnorm", wanted.stats, weight, residual=dx)[
        0
    ].shape == (0, 64)


def check_norm_rows(
    device="cpu", kinds=("rmsnorm", "layernorm"), sizes=(72, 5120), rows=5, exact_bits=False
):
    """``exact_bits``: nothing fuses a product with a sum, so that a LayerNorm has its
    definition's bits as well.
    """
    for kind, h, fmt, (scale, size), exact in itertools.product(
        kinds, sizes, (E4M3, E5M2), SCALES, (True, False)
    ):
        x = off_center(rows, h).to(device, torch.bfloat16)
        weight = (torch.rand(h) + 0.5).to(device)
        bias = torch.randn(h).to(device) if kind == "layernorm" else None
        rest = (kind, 1e-5, weight, bias, fmt, size, scale, exact, SAVED[fmt])
        got, wanted = (m.norm_compress_rows(x, *rest) for m in (norm, reference))
        check_compressed(got, wanted, x, SAVED[fmt], size, scale, exact)
        y = reference.norm_apply(x if exact else got.x8, got.stats, weight, bias)
        mine = reference_quantize.quantize_rows(y, fmt, aligned=True)
        (same_rows if bias is None or exact_bits else close_rows)(got.y8, mine)
        # Otherwise of other codes, where another mean moved a value over a middle.
        if exact or bias is None:
            close_rows(got.y8, wanted.y8)
        x[0, -1, 7], x[1, 0, h - 1] = torch.inf, torch.nan
        spoilt = norm.norm_compress_rows(x, *rest)
        check_top(spoilt.y8)
        others = torch.ones(2, rows, dtype=torch.bool, device=device)
        others[0, -1] = others[1, 0] = False
        assert torch.equal(spoilt.y8.scales[..., 0].isnan(), ~others)
        assert torch.equal(spoilt.y8.codes.float().isnan(), ~others[..., None].expand_as(x))
        for a, b in ((spoilt.y8, got.y8), (spoilt.x8, got.x8)):
            assert torch.equal(a.codes.view(torch.uint8)[others], b.codes.view(torch.uint8)[others])
            assert torch.equal(a.scales[others], b.scales[others])


def check_no_rows_and_one_element(device="cpu"):
    """No rows, as an expert without tokens has them, and one row of one column."""
    for rows, n in ((0, 64), (1, 1)):
        x = torch.randn(rows, n, device=device)
        rest = (x, "rmsnorm", 1e-5, torch.ones(n, device=device), None, E4M3, 32, "e8m0", True)
        got, wanted = (m.norm_compress_rows(*rest) for m in (norm, reference))
        same_groups(got.x8, wanted.x8)
        assert got.y8.codes.shape == (rows, n) and got.y8.scales.shape == (rows, 1)
        check_top(got.y8)
        # into given memory, whatever it holds
        room = QuantizedTensor(
            torch.full_like(got.y8.codes, torch.nan), torch.full((rows, 1), torch.nan), "row"
        )
        room.scales, room.top = room.scales.to(device), torch.full((), torch.inf, device=device)
        for m in (norm, reference):
            assert m.norm_compress_rows(*rest, out=room).y8 is room
            same_rows(room, got.y8)
