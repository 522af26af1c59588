"""How the kernels that write row scales must agree with their definitions; run in the interpreter, and on the GPU in
tests/gpu.

A row that is quantized, and what is saved of a norm or an activation, are the same to the byte. So is the result of a
norm or an activation where it is made of products alone, given the kernel's own statistics; elsewhere sums and
exponentials differ in the last bits of fp32, and a code may be the neighbour.
"""

import itertools
from unittest import mock

import torch

from coat_dist.formats import E4M3, E5M2
from coat_dist.kernels import activation, activation_compress, norm, quantize
from coat_dist.reference import activation as reference_activation
from coat_dist.reference import norm as reference_norm
from coat_dist.reference import quantize as reference_quantize
from coat_dist.reference.activation import ACTIVATIONS
from tests.coat_dist.kernels.flow_agreement import SCALES, check_compressed, close, off_center, same

SHORT = (32, 1, True, 4)
"""Tiles (see row_tiles) that hold so few columns that most rows are longer: the rest is read twice."""


def tiles(module, ahead=None, chosen=None):
    """A module whose kernels take rows by other tiles: ``ahead`` of them on their way, ``chosen`` as SHORT is."""
    held = module.HELD_TILES if ahead is None else (ahead, *module.HELD_TILES[1:])
    values = {} if chosen is None else {"row_tiles": lambda *_: chosen}
    return mock.patch.multiple(module, HELD_TILES=held, **values)


def same_rows(got, wanted):
    """Codes and scales equal bit for bit; NaN has several codes."""
    assert got.layout == wanted.layout == "row" and got.scales.dtype == torch.float32
    assert got.scales.shape == wanted.scales.shape and got.scales.is_contiguous()
    torch.testing.assert_close(got.scales, wanted.scales, rtol=0, atol=0, equal_nan=True)
    same(got.codes, wanted.codes)


def close_rows(got, wanted):
    """Few codes are neighbours; scales differ by rounding."""
    torch.testing.assert_close(got.scales, wanted.scales, rtol=1e-5, atol=0)
    close(got.codes, wanted.codes)


def wide_rows(*shape, subnormal=True):
    """Rows of many magnitudes; the first is zero, the next subnormal, the last has one subnormal element."""
    x = torch.randn(shape) * torch.exp(5 * torch.randn(*shape[:-1], 1))
    flat = x.view(-1, shape[-1])
    flat[-1, 0] = 1e-41
    flat[0] = 0
    if subnormal and len(flat) > 2:
        flat[1] = torch.randn(shape[-1]) * 1e-40
    return x


def check_quantize(device="cpu", shapes=((5, 70), (3, 2, 64), (4, 1))):
    cases = itertools.product((E4M3, E5M2), shapes, (torch.float32, torch.bfloat16), (False, True), (None, SHORT))
    for fmt, shape, dtype, aligned, chosen in cases:
        # The interpreter reads subnormal BF16 numbers as zero.
        x = wide_rows(*shape, subnormal=device != "cpu" or dtype == torch.float32).to(device, dtype)
        with tiles(quantize, chosen=chosen):
            clean = quantize.quantize_rows(x, fmt, aligned)
            same_rows(clean, reference_quantize.quantize_rows(x, fmt, aligned))
            for bad, column in ((-torch.inf, shape[-1] - 1), (torch.nan, shape[-1] // 2)):
                y = x.clone()
                y.view(-1, shape[-1])[-1, column] = bad
                got = quantize.quantize_rows(y, fmt, aligned)
                same_rows(got, reference_quantize.quantize_rows(y, fmt, aligned))
                spoilt = reference_quantize.dequantize(got).view(-1, shape[-1]).isnan()
                assert spoilt[-1].all() and not spoilt[:-1].any()


def check_norm(device="cpu", sizes=(72, 5120), rows=5, exact_bits=False):
    """``exact_bits``: nothing fuses a product with a sum, so that a LayerNorm has its definition's bits as well."""
    for kind, h, fmt, (scale, size), exact in itertools.product(
        ("rmsnorm", "layernorm"), sizes, (E4M3, E5M2), SCALES, (True, False)
    ):
        x = off_center(rows, h).to(device, torch.bfloat16)
        weight = (torch.rand(h) + 0.5).to(device)
        bias = torch.randn(h).to(device) if kind == "layernorm" else None
        rest = (kind, 1e-5, weight, bias, fmt, size, scale, exact)
        got, wanted = (m.norm_compress_rows(x, *rest) for m in (norm, reference_norm))
        check_compressed(got, wanted, x, fmt, size, scale, exact)
        y = reference_norm.norm_apply(x if exact else got.x8, got.stats, weight, bias)
        mine = reference_quantize.quantize_rows(y, fmt)
        (same_rows if bias is None or exact_bits else close_rows)(got.y8, mine)
        if exact or bias is None:  # otherwise of other codes, where another mean moved a value over a middle
            close_rows(got.y8, wanted.y8)
        x[0, -1, 7], x[1, 0, h - 1] = torch.inf, torch.nan
        spoilt = norm.norm_compress_rows(x, *rest)
        others = torch.ones(2, rows, dtype=torch.bool, device=device)
        others[0, -1] = others[1, 0] = False
        assert torch.equal(spoilt.y8.scales[..., 0].isnan(), ~others)
        assert torch.equal(spoilt.y8.codes.float().isnan(), ~others[..., None].expand_as(x))
        for a, b in ((spoilt.y8, got.y8), (spoilt.x8, got.x8)):
            assert torch.equal(a.codes.view(torch.uint8)[others], b.codes.view(torch.uint8)[others])
            assert torch.equal(a.scales[others], b.scales[others])


def check_activation(device="cpu", sizes=(176, 2752), rows=37, activations=tuple(ACTIVATIONS), variants=3):
    """Every activation, with and without a bias, over tails of columns and groups; ``variants`` of the rest."""
    kinds = itertools.cycle(itertools.product((E4M3, E5M2), SCALES, (True, False), (torch.float32, torch.bfloat16)))
    ways = itertools.cycle(((None, None), (1, SHORT), (0, None), (2, (32, 2, True, 4)), (0, SHORT)))
    for act, f, biased in itertools.product(activations, sizes, (False, True)):
        for fmt, (scale, size), exact, dtype in itertools.islice(kinds, variants):  # odd: shares no divisor with 16
            width = f * ACTIVATIONS[act].parts
            x = (torch.randn(2, rows, width) * torch.exp(torch.randn(2, rows, 1))).to(device, dtype)
            x[0, 0, ::3] = 0
            # Large where x is not: a bias that reached columns outside would raise the amax.
            bias = (torch.randn(width) * 3).to(device, dtype) if biased else None
            rest = (act, fmt, size, scale, exact, bias)
            with tiles(activation_compress, *next(ways)):
                got = activation.activation_compress_rows(x, *rest)
                alone = activation.activation_compress_rows(x[1, -1], *rest)
            wanted = reference_activation.activation_compress_rows(x, *rest)
            same(got.pre8.codes, wanted.pre8.codes)
            assert torch.equal(got.pre8.scales, wanted.pre8.scales)
            (same_rows if act == "squared_relu" else close_rows)(got.a8, wanted.a8)
            assert torch.equal(alone.a8.codes.view(torch.uint8), got.a8.codes[1, -1].view(torch.uint8))
            assert torch.equal(alone.a8.scales, got.a8.scales[1, -1])


def check_activation_of_bad_values(device="cpu"):
    """A value that is not finite spoils its row and no other."""
    for act, (bad, chosen) in itertools.product(ACTIVATIONS, ((torch.inf, None), (torch.nan, SHORT))):
        x = torch.randn(4, 72 * ACTIVATIONS[act].parts).to(device)
        rest = (act, E4M3, 32, "e8m0", True)
        with tiles(activation_compress, chosen=chosen):
            clean = activation.activation_compress_rows(x, *rest)
            x[2, 71] = bad
            got = activation.activation_compress_rows(x, *rest)
        wanted = reference_activation.activation_compress_rows(x, *rest)
        same(got.pre8.codes, wanted.pre8.codes)
        assert torch.equal(got.pre8.scales, wanted.pre8.scales)
        assert got.a8.scales[2].isnan() and got.a8.codes[2].float().isnan().all()
        assert torch.equal(got.a8.scales.isnan(), wanted.a8.scales.isnan())
        others = [0, 1, 3]
        assert torch.equal(got.a8.codes.view(torch.uint8)[others], clean.a8.codes.view(torch.uint8)[others])
        assert torch.equal(got.a8.scales[others], clean.a8.scales[others])


def check_nothing_and_little(device="cpu"):
    """No rows, as an expert without tokens has them, and one row of one column."""
    for rows, n in ((0, 64), (1, 1)):
        x = torch.randn(rows, n, device=device)
        same_rows(quantize.quantize_rows(x, E4M3), reference_quantize.quantize_rows(x, E4M3))
        rest = (x, "rmsnorm", 1e-5, torch.ones(n, device=device), None, E4M3, 32, "e8m0", True)
        got, wanted = (m.norm_compress_rows(*rest) for m in (norm, reference_norm))
        same(got.x8.codes, wanted.x8.codes)
        assert got.y8.codes.shape == (rows, n) and got.y8.scales.shape == (rows, 1)
        for act, act_parts in (("swiglu", 2), ("gelu", 1)):
            pre = torch.randn(rows, n * act_parts, device=device)
            got, wanted = (
                m.activation_compress_rows(pre, act, E4M3, 32, "e8m0", True) for m in (activation, reference_activation)
            )
            same(got.pre8.codes, wanted.pre8.codes)
            close_rows(got.a8, wanted.a8)
