"""Quantization: the same to the byte, with one scale a tensor, row or group."""

import itertools

import torch

from coat_dist.formats import E3M4, E4M3, E5M2, INT8, QuantizedTensor
from coat_dist.reference.quantize import amax, quantize_rows, quantize_tensor, tensor_scale
from tests.support.devices import DEVICE, on_device

from . import SCALES, SHORT, agree, compare, pair, same, same_rows, tiles
from .rope import truncated


def check_tensors_and_groups(*shape):
    """All codes and scales, with zeros, tails and every kind of non-finite value."""
    for fmt, dtype in itertools.product((E4M3, E5M2), (torch.float32, torch.bfloat16)):
        x = (torch.randn(shape) * torch.exp(3 * torch.randn(shape))).to(DEVICE, dtype)
        x.view(-1)[::7] = 0
        x.view(-1)[3] = 1e-39
        for bad in (None, torch.inf, torch.nan):
            if bad is not None:
                x.view(-1)[5] = bad
            _, top = agree("amax", x)
            ends = top.new_tensor([0.0, 1e-38, torch.inf])
            many = torch.cat([top[None], ends, torch.rand(1100, device=DEVICE)])
            for aligned in (False, True):
                agree("tensor_scale", many, fmt, aligned)
            for saved, (kind, size) in itertools.product((fmt, E3M4, INT8), SCALES):
                agree("quantize_groups", x, saved, size, kind)
            scale = tensor_scale(top, fmt)
            for turned in (False, True):
                _, q = agree("quantize_tensor", x, fmt, scale, turned)
                agree("dequantize", q)
            _, (q, _) = agree("quantize_both", x, fmt, scale)
            if x.dim() == 2:
                same(pair("transpose")[0](q).codes, q.codes.t())


def check_groups_at_the_ends():
    """Groups near fp32's largest numbers, whose scales have tiny reciprocals, and near its
    smallest.
    """
    for power, saved, (kind, size) in itertools.product((125, -140), (E3M4, INT8), SCALES):
        x = (torch.randn(64, 2048, device=DEVICE).clamp(-3.9, 3.9).double() * 2.0**power).float()
        x[0] = x[0, 0]
        x[1, ::size] *= 2.0**-20
        _, q = agree("quantize_groups", x, saved, size, kind)
        assert agree("dequantize", q)[1].isfinite().all()


def check_rows(*shape):
    cases = itertools.product(
        (E4M3, E5M2), (torch.float32, torch.bfloat16), (False, True), (None, SHORT)
    )
    for fmt, dtype, aligned, chosen in cases:
        x = wide_rows(dtype, *shape)
        with tiles("quantize", chosen=chosen):
            _, q = agree("quantize_rows", x, fmt, aligned)
            for turned in (False, True) if aligned else ():
                agree("quantize_tensor", q, fmt, q.top, turned)
            for bad, column in ((-torch.inf, shape[-1] - 1), (torch.nan, shape[-1] // 2)):
                y = x.clone()
                y.view(-1, shape[-1])[-1, column] = bad
                _, q = agree("quantize_rows", y, fmt, aligned)
                spoilt = pair("dequantize")[1](q).view(-1, shape[-1]).isnan()
                assert spoilt[-1].all() and not spoilt[:-1].any()


def check_one(rows, n):
    """No rows, as an expert without tokens has them, and one row of one column."""
    agree("quantize_rows", torch.randn(rows, n, device=DEVICE), E4M3)


def check_into(rows, n=70):
    """Several matrices into one buffer: the codes, scales and largest scale of all of them below
    one another.
    """
    for fmt, dtype in itertools.product((E4M3, E5M2), (torch.float32, torch.bfloat16)):
        whole = wide_rows(dtype, sum(rows), n)
        for bad in (None, torch.nan):
            if bad is not None:
                whole[rows[0], 2] = bad
            wanted = quantize_rows(whole, fmt, aligned=True)
            scale = tensor_scale(amax(whole), fmt, aligned=True)
            turned = quantize_tensor(whole, fmt, scale, transpose=True)
            for by_rows, by_tensor in zip(
                pair("quantize_rows"), pair("quantize_tensor"), strict=True
            ):
                codes = torch.full(whole.shape, 3.0, device=DEVICE).to(fmt.dtype)
                scales = torch.full((len(whole), 1), 3.0, device=DEVICE)
                top = torch.zeros((), device=DEVICE)
                out = QuantizedTensor(codes, scales, "row", top=top)
                columns = torch.full(whole.shape[::-1], 3.0, device=DEVICE).to(fmt.dtype)
                parts = zip(
                    *(t.split(rows) for t in (whole, codes, scales)),
                    columns.split(rows, 1),
                    strict=True,
                )
                for x, c, s, t in parts:
                    by_rows(x, fmt, True, QuantizedTensor(c, s, "row", top=top))
                    by_tensor(x, fmt, scale, True, t)
                same_rows(out, wanted)
                same(columns, turned.codes)


def wide_rows(dtype, *shape):
    """Rows of many magnitudes; the first is zero, the next subnormal, the last has one subnormal
    element.
    """
    x = torch.randn(shape) * torch.exp(5 * torch.randn(*shape[:-1], 1))
    flat = x.view(-1, shape[-1])
    flat[-1, 0] = 1e-41
    flat[0] = 0
    # The interpreter reads subnormal BF16 numbers as zero.
    if (DEVICE != "cpu" or dtype == torch.float32) and len(flat) > 2:
        flat[1] = torch.randn(shape[-1]) * 1e-40
    return x.to(DEVICE, dtype)


def check_dequantize(shape, fmt, scale, size):
    """Any code at any scale: NaN, denormals and both zeros."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).view(fmt.dtype)
    # The interpreter reads these as numbers; quantizers write NaN scales beside them.
    if not codes.is_cuda:
        codes.view(torch.uint8)[~codes.float().isfinite()] = 0
    groups = (*shape[:-1], -(-shape[-1] // size) if size else 1)
    scales = torch.randint(0, 256, groups, dtype=torch.uint8, device=DEVICE)
    if scale != "e8m0":
        scales = torch.randn(groups, device=DEVICE).mul(30).exp2()
        if size:
            scales = scales.bfloat16()
        else:
            scales[0] = torch.nan
    q = QuantizedTensor(codes, scales, "group" if size else "row", size)
    _, wanted = agree("dequantize", q)
    got = pair("dequantize")[0](q, torch.bfloat16)
    if codes.is_cuda:
        compare(got, wanted.bfloat16())
    else:  # as above: truncated, and not where it misreads denormals
        normal = ~(wanted.abs() < 2.0**-126)
        compare(got[normal], truncated(wanted)[normal].bfloat16())


TENSORS = on_device(((3, 70), (257, 1040), (2, 130, 4096), (2, 131, 200)), ((3, 70), (2, 3, 64)))
BY_ROWS = on_device(((5, 70), (3, 43, 4096), (7, 11008), (3, 4, 1)), ((4, 70), (2, 2, 33), (3, 1)))
KINDS = (
    *((E4M3, "e8m0", 32), (E5M2, "e8m0", 16), (E4M3, "bf16", 64)),
    *((E4M3, "fp32", 0), (E5M2, "fp32", 0)),
    *((f, *s) for f in (E3M4, INT8) for s in SCALES),
)
ROWS = {
    **{f"{shape}": (check_tensors_and_groups, *shape) for shape in TENSORS},
    **{f"{shape} by rows": (check_rows, *shape) for shape in BY_ROWS},
    "no rows": (check_one, 0, 64),
    "one element": (check_one, 1, 1),
    "into two parts": (check_into, (5, 3)),
    "into three parts": (check_into, (8, 4, 12)),
    "groups at the ends": (check_groups_at_the_ends,),
    **{
        f"dequantize {shape} {fmt.name} {scale} {size}": (check_dequantize, shape, fmt, scale, size)
        for shape in ((3, 72), (2, 5, 40), *on_device(((130, 4096),), ()))
        for fmt, scale, size in KINDS
    },
}
