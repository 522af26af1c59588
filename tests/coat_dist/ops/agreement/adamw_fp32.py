"""fp32 on either side of the AdamW kernel: master weights as bfloat16 and remainder, and moments
that stay fp32.
"""

import functools
import math
from dataclasses import replace

import torch

from coat_dist.kernels import adamw as kernels
from coat_dist.kernels import adamw_fp32
from coat_dist.kernels.adamw_numbers import numbers_of_counts
from coat_dist.reference import adamw as reference
from coat_dist.reference.adamw import AdamWStep, FP32Tensors
from coat_dist.reference.master import join, split
from coat_dist.reference.moments import MomentCodec
from tests.support import equal
from tests.support.devices import DEVICE, on_device

from ..adamw_problems import NUMBERS, clone, extras, one_step, problem


def check_remainder(n, seed, grad):
    """bfloat16 and remainder give the bits of the fp32 master weight that they stand for, step
    by step.
    """
    fp32 = problem(n, DEVICE, grad=grad)
    # What weight decay leaves of them is a zero and a subnormal.
    fp32[0][:2] = torch.tensor([-0.0, 1e-42])[:n]
    halves = clone(fp32)
    halves[0], low = split(fp32[0])
    for step in range(1, 6):
        numbers = replace(NUMBERS, step=step)
        for x in (fp32, halves):
            x[1] = (
                torch.randn(n, generator=torch.Generator().manual_seed(step)).to(DEVICE, x[1].dtype)
                ** 3
            )
        one_step(kernels, *fp32, numbers, seed)
        one_step(kernels, *halves, numbers, seed, low=low)
        assert torch.equal(join(halves[0], low).view(torch.int32), fp32[0].view(torch.int32))
        assert equal((*fp32[2], *fp32[3]), (*halves[2], *halves[3]))
        assert halves[0].dtype == torch.bfloat16 and low.any()


def check_split(every):
    """The kernel's division of a master weight, at ``every`` so many upper halves and at edges
    of both halves.
    """
    still = AdamWStep(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1)
    edges = torch.tensor(
        [[x, x + 1, x + (1 << 15), x + (1 << 15) + 1] for x in (0, 0x7F7F, 0x7F81, 0x7FC0, 0x7FFE)]
    )
    upper = torch.cat([torch.arange(0, 1 << 16, every), edges.flatten()]).to(DEVICE, torch.int32)
    n = len(upper)
    codec_m, codec_v = MomentCodec(), MomentCodec(keep_nonzero=True)
    zero = torch.zeros(n, device=DEVICE)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD):
        p = upper.to(torch.int16).view(torch.bfloat16)
        low = torch.full_like(upper, lower).to(torch.int16)
        master = join(p, low)
        expected = master * 1.0 - 0.0  # what the step does to it: NaN and -0 included
        m, v = codec_m.zeros(n, DEVICE), codec_v.zeros(n, DEVICE)
        one_step(kernels, p, zero, m, v, codec_m, codec_v, still, low=low)
        wanted = split(expected)
        assert torch.equal(p.view(torch.int16), wanted[0].view(torch.int16)), lower
        assert torch.equal(low, wanted[1]), lower


def master(one):
    return one.param if one.low is None else join(one.param, one.low)


def check_kernel(
    param=torch.float32,
    grad=torch.float32,
    low=False,
    copy=None,
    counted=False,
    **numbers,
):
    """One launch a kind, of tensors of any size and alignment, against the definition. The last
    tensor has other types. (Tensors that are not contiguous: ``adamw_layouts.py``.)
    """
    numbers = replace(NUMBERS, **numbers)

    def build():
        g = torch.Generator().manual_seed(0)
        found = []
        for i, n in enumerate((16, 7, 0, 1024, 2049, 48)):
            p, grad_, m, v = (
                torch.randn(n + i % 2, generator=g)[i % 2 :].to(DEVICE) for _ in range(4)
            )
            last = i == 5
            types = (FP32, FP32) if last else (param, grad)
            more = extras(n, DEVICE, low and not last, copy)
            found.append(FP32Tensors(p.to(types[0]), grad_.to(types[1]), m, v.square(), **more))
        return found

    mine, theirs = build(), build()
    if counted:
        count = torch.tensor(float(numbers.step), device=DEVICE)
        mine = [one._replace(step_count=count) for one in mine]
        adamw_fp32.step_contiguous(mine, replace(numbers, step=1))
    else:
        adamw_fp32.step_contiguous(mine, numbers)
    reference.adamw_fp32_steps(theirs, numbers)
    masters = [one._replace(param=master(one), low=None) for one in build()]
    adamw_fp32.step_contiguous(masters, numbers)
    for a, b, fp32 in zip(mine, theirs, masters, strict=True):
        p, q = master(a), master(b)
        assert not low or torch.equal(p, fp32.param)  # the bits of fp32 master weights
        # the interpreter truncates to bfloat16; sums of terms of size 1 differ by the rounding of
        # their terms
        for x, y in ((p, q), (a.first_moment, b.first_moment), (a.second_moment, b.second_moment)):
            eps = torch.finfo(x.dtype).eps
            assert ((x.double() - y.double()).abs() <= eps * (1.01 * y.double().abs() + 1)).all()
        if copy is not None:
            eps = torch.finfo(copy).eps
            assert (
                (a.copy.double() - q.double()).abs() <= 1.01 * eps * q.double().abs() + 1e-6
            ).all()


def check_numbers(*betas):
    """Those computed on the device have the bits of the host's."""
    steps = [1, 2, 3, 7, 100, 1023, 4097, 99_999, 2**24]
    counts = [torch.tensor(float(t), device=DEVICE) for t in steps]
    found = numbers_of_counts(counts, AdamWStep(3e-4, *betas, 1e-8, 0.1, 1))
    for row, step in zip(found.cpu(), steps, strict=True):
        one = AdamWStep(3e-4, *betas, 1e-8, 0.1, step)
        wanted = one.lr * one.inverse_bias1, one.inverse_bias1, one.inverse_sqrt_bias2, float(step)
        assert torch.equal(row, torch.tensor(wanted, dtype=torch.float64).float()), step
        assert math.isclose(one.inverse_bias1, 1 / (1 - betas[0] ** step), rel_tol=1e-9)


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KERNEL = {
    "default": {},
    "bf16 gradients": {"grad": BF16},
    "remainder, copy": {"param": BF16, "low": True, "copy": BF16},
    "bf16, fp32 gradients": {"param": BF16},
    "fp16": {"param": FP16, "grad": FP16},
    "fp16, bf16 gradients": {"param": FP16, "grad": BF16},
    "maximize, tensors": {
        "maximize": True,
        "lr": torch.tensor(0.01, device=DEVICE),
        "grad_factor": torch.tensor(0.37, device=DEVICE),
    },
    "counted on the device": {"counted": True, "step": 12},
}
ROWS = {
    **{
        f"remainder of {n}, {seed}, {grad}": (check_remainder, n, seed, grad)
        for n in on_device((1, 129, 128 * 21 + 1, 1_000_003), (128 * 21 + 1,))
        for seed in (None, 11)
        for grad in (FP32, BF16)
    },
    "every master": (check_split, on_device(1, 61)),
    **{
        f"one launch, {name}": (functools.partial(check_kernel, **options),)
        for name, options in KERNEL.items()
    },
    **{
        f"numbers of {betas}": (check_numbers, *betas)
        for betas in ((0.9, 0.999), (0.95, 0.98), (0.0, 0.5))
    },
}
