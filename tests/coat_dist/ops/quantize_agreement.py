"""How the quantizing kernels must agree with their definitions: to the byte, with one scale a
tensor, row or group.
"""

import itertools

import torch

from coat_dist.formats import E3M4, E4M3, E5M2, INT8, QuantizedTensor
from coat_dist.kernels import quantize
from coat_dist.reference import quantize as reference
from coat_dist.reference.quantize import tensor_scale

from .codes import SCALES, SHORT, same, same_groups, same_rows, tiles
from .rope_agreement import same as same_values
from .rope_agreement import truncated


def check_quantize(device="cpu", shapes=((3, 70), (130, 300), (2, 3, 64))):
    """All codes and scales, with zeros, tails and every kind of non-finite value."""
    for fmt, shape, dtype in itertools.product(
        (E4M3, E5M2), shapes, (torch.float32, torch.bfloat16)
    ):
        x = (torch.randn(shape) * torch.exp(3 * torch.randn(shape))).to(device, dtype)
        x.view(-1)[::7] = 0
        x.view(-1)[3] = 1e-39
        for bad in (None, torch.inf, torch.nan):
            if bad is not None:
                x.view(-1)[5] = bad
            amax = reference.amax(x)
            assert torch.equal(quantize.amax(x), amax)
            many = torch.cat(
                [
                    amax[None],
                    amax.new_tensor([0.0, 1e-38, torch.inf]),
                    torch.rand(1100, device=device),
                ]
            )
            for aligned in (False, True):
                got, wanted = (m.tensor_scale(many, fmt, aligned) for m in (quantize, reference))
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            for saved, (kind, size) in itertools.product((fmt, E3M4, INT8), SCALES):
                got, wanted = (
                    m.quantize_groups(x, saved, size, kind) for m in (quantize, reference)
                )
                same_groups(got, wanted)
            scale = tensor_scale(amax, fmt)
            for turn in (False, True):
                got, wanted = (
                    m.quantize_tensor(x, fmt, scale, turn) for m in (quantize, reference)
                )
                same(got.codes, wanted.codes)
            both, wanted_both = (m.quantize_both(x, fmt, scale) for m in (quantize, reference))
            for got, wanted in zip(both, wanted_both, strict=True):
                same(got.codes, wanted.codes)
            if x.dim() == 2:
                wanted = wanted_both[0]
                same(quantize.transpose(wanted).codes, wanted.codes.t())


def check_groups_at_the_ends(device="cpu"):
    """Groups near fp32's largest numbers, whose scales have tiny reciprocals, and near its
    smallest.
    """
    for power, saved, (kind, size) in itertools.product((125, -140), (E3M4, INT8), SCALES):
        x = (torch.randn(64, 2048, device=device).clamp(-3.9, 3.9).double() * 2.0**power).float()
        x[0] = x[0, 0]
        x[1, ::size] *= 2.0**-20
        got, wanted = (m.quantize_groups(x, saved, size, kind) for m in (quantize, reference))
        same_groups(got, wanted)
        same_values(quantize.dequantize(got), reference.dequantize(wanted))
        assert reference.dequantize(wanted).isfinite().all()


def check_quantize_rows(device="cpu", shapes=((5, 70), (3, 2, 64), (4, 1))):
    cases = itertools.product(
        (E4M3, E5M2), shapes, (torch.float32, torch.bfloat16), (False, True), (None, SHORT)
    )
    for fmt, shape, dtype, aligned, chosen in cases:
        # The interpreter reads subnormal BF16 numbers as zero.
        x = wide_rows(*shape, subnormal=device != "cpu" or dtype == torch.float32).to(device, dtype)
        with tiles(quantize, chosen=chosen):
            clean = quantize.quantize_rows(x, fmt, aligned)
            same_rows(clean, reference.quantize_rows(x, fmt, aligned))
            for bad, column in ((-torch.inf, shape[-1] - 1), (torch.nan, shape[-1] // 2)):
                y = x.clone()
                y.view(-1, shape[-1])[-1, column] = bad
                got = quantize.quantize_rows(y, fmt, aligned)
                same_rows(got, reference.quantize_rows(y, fmt, aligned))
                spoilt = reference.dequantize(got).view(-1, shape[-1]).isnan()
                assert spoilt[-1].all() and not spoilt[:-1].any()


def check_into(device="cpu", heights=((5, 3), (8, 4, 12)), n=70):
    """Several matrices into one buffer: the codes, scales and largest scale of all of them below
    one another.
    """
    for fmt, rows, dtype in itertools.product(
        (E4M3, E5M2), heights, (torch.float32, torch.bfloat16)
    ):
        whole = wide_rows(sum(rows), n, subnormal=device != "cpu" or dtype == torch.float32).to(
            device, dtype
        )
        for bad in (None, torch.nan):
            if bad is not None:
                whole[rows[0], 2] = bad
            wanted = reference.quantize_rows(whole, fmt, aligned=True)
            scale = tensor_scale(reference.amax(whole), fmt, aligned=True)
            turned = reference.quantize_tensor(whole, fmt, scale, transpose=True)
            for module in (quantize, reference):
                codes = torch.full(whole.shape, 3.0, device=device).to(fmt.dtype)
                scales, top = (
                    torch.full((len(whole), 1), 3.0, device=device),
                    torch.zeros((), device=device),
                )
                out = QuantizedTensor(codes, scales, "row", top=top)
                columns = torch.full(whole.shape[::-1], 3.0, device=device).to(fmt.dtype)
                parts = zip(
                    *(t.split(rows) for t in (whole, codes, scales)),
                    columns.split(rows, 1),
                    strict=True,
                )
                for x, c, s, t in parts:
                    module.quantize_rows(x, fmt, True, QuantizedTensor(c, s, "row", top=top))
                    module.quantize_tensor(x, fmt, scale, True, t)
                same_rows(out, wanted)
                same(columns, turned.codes)


def wide_rows(*shape, subnormal=True):
    """Rows of many magnitudes; the first is zero, the next subnormal, the last has one subnormal
    element.
    """
    x = torch.randn(shape) * torch.exp(5 * torch.randn(*shape[:-1], 1))
    flat = x.view(-1, shape[-1])
    flat[-1, 0] = 1e-41
    flat[0] = 0
    if subnormal and len(flat) > 2:
        flat[1] = torch.randn(shape[-1]) * 1e-40
    return x


def check_dequantize(device="cpu", shapes=((3, 72), (2, 5, 40))):
    """Any code at any scale: NaN, denormals and both zeros."""
    for shape, (fmt, scale, size) in itertools.product(
        shapes,
        (
            *(
                (E4M3, "e8m0", 32),
                (E5M2, "e8m0", 16),
                (E4M3, "bf16", 64),
                (E4M3, "fp32", 0),
                (E5M2, "fp32", 0),
            ),
            *((f, *s) for f in (E3M4, INT8) for s in SCALES),
        ),
    ):
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(fmt.dtype)
        # The interpreter reads these as numbers; quantizers write NaN scales beside them.
        if not codes.is_cuda:
            codes.view(torch.uint8)[~codes.float().isfinite()] = 0
        groups = (*shape[:-1], -(-shape[-1] // size) if size else 1)
        scales = torch.randint(0, 256, groups, dtype=torch.uint8, device=device)
        if scale != "e8m0":
            scales = torch.randn(groups, device=device).mul(30).exp2()
            scales = (
                scales.bfloat16()
                if size
                else scales.index_fill(0, torch.tensor([0], device=device), torch.nan)
            )
        q = QuantizedTensor(codes, scales, "group" if size else "row", size)
        wanted = reference.dequantize(q)
        same_values(quantize.dequantize(q), wanted)
        if codes.is_cuda:
            same_values(quantize.dequantize(q, torch.bfloat16), wanted.bfloat16())
        else:  # as above: truncated, and not where it misreads denormals
            got = quantize.dequantize(q, torch.bfloat16)
            normal = ~(wanted.abs() < 2.0**-126)
            same_values(got[normal], truncated(wanted)[normal].bfloat16())


def check_no_rows_and_one_element(device="cpu"):
    """No rows, as an expert without tokens has them, and one row of one column."""
    for rows, n in ((0, 64), (1, 1)):
        x = torch.randn(rows, n, device=device)
        same_rows(quantize.quantize_rows(x, E4M3), reference.quantize_rows(x, E4M3))
