"""Norms: what is saved is the same to the byte. So is the result where it is made of products
alone, given the kernel's own statistics; elsewhere sums differ in the last bits of fp32, and a code
may be the neighbour.
"""

import itertools

import torch

from coat_dist.formats import E3M4, E4M3, E5M2, INT8, QuantizedTensor
from coat_dist.reference.norm import norm_apply
from coat_dist.reference.quantize import dequantize, quantize_groups, quantize_rows, tensor_scale
from tests.support.devices import DEVICE, on_device

from . import SCALES, agree, check_top, close, close_rows, compare, pair, same_groups, same_rows

SAVED = {E4M3: E3M4, E5M2: INT8}
"""Format of what is saved, by that of the result."""
FIXED = E4M3, 32, "e8m0", True


def off_center(rows, h):
    """``[2, rows, h]``, rows of many magnitudes whose means are up to tens of their deviations;
    one row is zero.
    """
    x = (torch.randn(2, rows, h) + 10 * torch.randn(2, rows, 1)) * torch.exp(
        torch.randn(2, rows, 1)
    )
    x[0, 1] = 0
    return x


def compare_compressed(got, wanted, x, fmt, size, scale, exact):
    """x8 and rstd of a norm's first pass. x8 has the definition's bytes for x less the mean that
    the kernel found, whose sum in fp32 may end in other last bits than the definition's.
    """
    mean = got.stats.mean
    assert (mean is None) == (wanted.stats.mean is None)
    if mean is not None:
        torch.testing.assert_close(mean, wanted.stats.mean, rtol=1e-5, atol=1e-6)
    centered = x.float() if mean is None else x.float() - mean
    x8 = quantize_groups(centered, fmt, size, scale)
    same_groups(got.x8, x8)
    source = (centered if exact else dequantize(x8)).double()
    rstd = (source.square().mean(-1, keepdim=True) + 1e-5).rsqrt().float()
    torch.testing.assert_close(got.stats.rstd, rstd, rtol=1e-6, atol=0)


def check_passes(kind, rows, sizes):
    for h, fmt, (scale, size), exact in itertools.product(
        sizes, (E4M3, E5M2), SCALES, (True, False)
    ):
        x = off_center(rows, h).to(DEVICE)
        weight = (torch.rand(h, 2) + 0.5).to(DEVICE)[:, 0]  # columns of a matrix: not contiguous
        bias = torch.randn(h, 2).to(DEVICE)[:, 0] if kind == "layernorm" else None
        given = x, kind, 1e-5, weight, bias
        kernel, definition = pair("norm_compress")
        rest = fmt, size, scale, exact, SAVED[fmt]
        got, wanted = kernel(*given, *rest), definition(*given, *rest)
        compare_compressed(got, wanted, x, SAVED[fmt], size, scale, exact)
        y = norm_apply(x if exact else got.x8, got.stats, weight, bias)
        compare(got.amax, y.abs().max(), rtol=1e-5)
        kernel, definition = pair("norm_forward")
        compare(kernel(*given)[0], definition(*given)[0], rtol=1e-5, atol=1e-5)
        t8, dy = tensor_scale(wanted.amax, fmt), torch.randn_like(x)
        for source in (x, wanted.x8):
            for turned in (False, True):
                rest = weight, bias, fmt, t8, turned
                agree("norm_quantize", source, wanted.stats, *rest, codes=close)
            rest = dy, source, kind, wanted.stats, weight, torch.float32, torch.float32
            rest = *rest, bias is not None
            agree("norm_backward", *rest, rtol=1e-4, atol=1e-4)
            if exact and fmt is E4M3:
                check_residual(pair("norm_backward")[0], rest, torch.randn_like(x))


def check_residual(backward, rest, residual):
    """With a residual: that much more in dx, rounded once; nothing else changes."""
    dx, *sums = backward(*rest)
    turned = residual.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (residual, turned, residual.bfloat16(), torch.zeros_like(residual)):
        got, *others = backward(*rest, residual=given)
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
        low = backward(*rest[:6], torch.bfloat16, rest[7], residual=given)[0]
        # One rounding: half a step; the interpreter cuts off.
        step = 2**-8 if low.is_cuda else 2**-7
        torch.testing.assert_close(
            low.float(), got, rtol=step * 1.001, atol=1e-6 * dx.abs().max().item()
        )
    residual[0, 1, 3], residual[1, 0, 5] = torch.nan, torch.inf
    got = backward(*rest, residual=residual)[0]
    assert torch.equal(got.isfinite(), residual.isfinite())
    assert got[0, 1, 3].isnan() and got[1, 0, 5] == torch.inf


def check_no_rows():
    """As an expert without tokens has them."""
    x, weight = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    _, wanted = agree("norm_compress", x, "rmsnorm", 1e-5, weight, None, *FIXED)
    assert wanted.amax == 0
    for more in ({}, {"residual": x}):
        rest = x, wanted.x8, "rmsnorm", wanted.stats, weight
        dx, *sums = pair("norm_backward")[0](*rest, **more)
        assert dx.shape == (0, 64) and not any(s.any() for s in sums)


def check_rows(kind, rows, sizes):
    """Nothing fuses a product with a sum in the interpreter, so that a LayerNorm has its
    definition's bits there as well.
    """
    for h, fmt, (scale, size), exact in itertools.product(
        sizes, (E4M3, E5M2), SCALES, (True, False)
    ):
        x = off_center(rows, h).to(DEVICE, torch.bfloat16)
        weight = (torch.rand(h) + 0.5).to(DEVICE)
        bias = torch.randn(h).to(DEVICE) if kind == "layernorm" else None
        rest = kind, 1e-5, weight, bias, fmt, size, scale, exact, SAVED[fmt]
        kernel, definition = pair("norm_compress_rows")
        got, wanted = kernel(x, *rest), definition(x, *rest)
        compare_compressed(got, wanted, x, SAVED[fmt], size, scale, exact)
        y = norm_apply(x if exact else got.x8, got.stats, weight, bias)
        mine = quantize_rows(y, fmt, aligned=True)
        (same_rows if bias is None or DEVICE == "cpu" else close_rows)(got.y8, mine)
        # Otherwise of other codes, where another mean moved a value over a middle.
        if exact or bias is None:
            close_rows(got.y8, wanted.y8)
        x[0, -1, 7], x[1, 0, h - 1] = torch.inf, torch.nan
        spoilt = kernel(x, *rest)
        check_top(spoilt.y8)
        others = torch.ones(2, rows, dtype=torch.bool, device=DEVICE)
        others[0, -1] = others[1, 0] = False
        assert torch.equal(spoilt.y8.scales[..., 0].isnan(), ~others)
        assert torch.equal(spoilt.y8.codes.float().isnan(), ~others[..., None].expand_as(x))
        for a, b in ((spoilt.y8, got.y8), (spoilt.x8, got.x8)):
            assert torch.equal(a.codes.view(torch.uint8)[others], b.codes.view(torch.uint8)[others])
            assert torch.equal(a.scales[others], b.scales[others])


def check_rows_into(rows, n):
    """No rows, as an expert without tokens has them, and one row of one column; into given memory,
    whatever it holds.
    """
    x, weight = torch.randn(rows, n, device=DEVICE), torch.ones(n, device=DEVICE)
    rest = x, "rmsnorm", 1e-5, weight, None, *FIXED
    kernel, definition = pair("norm_compress_rows")
    got = kernel(*rest)
    same_groups(got.x8, definition(*rest).x8)
    assert got.y8.codes.shape == (rows, n) and got.y8.scales.shape == (rows, 1)
    check_top(got.y8)
    scales, top = torch.full_like(got.y8.scales, torch.nan), torch.full((), torch.inf)
    codes = torch.full_like(got.y8.codes, torch.nan)
    room = QuantizedTensor(codes, scales, "row", top=top.to(DEVICE))
    for function in (kernel, definition):
        assert function(*rest, out=room).y8 is room
        same_rows(room, got.y8)


KINDS = "rmsnorm", "layernorm"
# Two times 130 or 2 rows are transposed by packets of four, two times 65 or 3 are not.
PASSES = on_device([(130, (200, 5120)), (65, (4096,))], [(3, (72,)), (2, (72,))])
SHAPES = on_device([(65, (200, 5120)), (65, (4096,))], [(2, (72,))])
ROWS = {
    **{f"{kind} {shape}": (check_passes, kind, *shape) for kind in KINDS for shape in PASSES},
    "no rows": (check_no_rows,),
    **{f"{kind} {shape} by rows": (check_rows, kind, *shape) for kind in KINDS for shape in SHAPES},
    "no rows by rows": (check_rows_into, 0, 64),
    "one element by rows": (check_rows_into, 1, 1),
}
