"""fp32 on either side of the AdamW kernel: master weights as bfloat16 and remainder, and moments
that stay fp32.
"""

from dataclasses import replace

import torch

from coat_dist.kernels import adamw as kernels
from coat_dist.kernels import adamw_fp32, adamw_fp32_kernel
from coat_dist.reference import adamw as reference
from coat_dist.reference.adamw import AdamWStep, FP32Tensors
from coat_dist.reference.master import join, split
from coat_dist.reference.moments import MomentCodec
from tests.support import equal

from .adamw_problems import NUMBERS, clone, extras, one_step, problem


def check_remainder(device="cpu", seed=None, n=128 * 21 + 1, **variant):
    """bfloat16 and remainder give the bits of the fp32 master weight that they stand for, step
    by step.
    """
    fp32 = problem(n, device, **variant)
    # What weight decay leaves of them is a zero and a subnormal.
    fp32[0][:2] = torch.tensor([-0.0, 1e-42])[:n]
    halves = clone(fp32)
    halves[0], low = split(fp32[0])
    for step in range(1, 6):
        numbers = replace(NUMBERS, step=step)
        for x in (fp32, halves):
            x[1] = (
                torch.randn(n, generator=torch.Generator().manual_seed(step)).to(device, x[1].dtype)
                ** 3
            )
        one_step(kernels, *fp32, numbers, seed)
        one_step(kernels, *halves, numbers, seed, low=low)
        assert torch.equal(join(halves[0], low).view(torch.int32), fp32[0].view(torch.int32))
        assert equal((*fp32[2], *fp32[3]), (*halves[2], *halves[3]))
        assert halves[0].dtype == torch.bfloat16 and low.any()


def check_split(device="cpu", every=1):
    """The kernel's division of a master weight, at ``every`` so many upper halves and at edges
    of both halves.
    """
    still = AdamWStep(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1)
    edges = torch.tensor(
        [[x, x + 1, x + (1 << 15), x + (1 << 15) + 1] for x in (0, 0x7F7F, 0x7F81, 0x7FC0, 0x7FFE)]
    )
    upper = torch.cat([torch.arange(0, 1 << 16, every), edges.flatten()]).to(device, torch.int32)
    n = len(upper)
    codec_m, codec_v = MomentCodec(), MomentCodec(keep_nonzero=True)
    zero = torch.zeros(n, device=device)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD):
        p = upper.to(torch.int16).view(torch.bfloat16)
        low = torch.full_like(upper, lower).to(torch.int16)
        master = join(p, low)
        expected = master * 1.0 - 0.0  # what the step does to it: NaN and -0 included
        m, v = codec_m.zeros(n, device), codec_v.zeros(n, device)
        one_step(kernels, p, zero, m, v, codec_m, codec_v, still, low=low)
        wanted = split(expected)
        assert torch.equal(p.view(torch.int16), wanted[0].view(torch.int16)), lower
        assert torch.equal(low, wanted[1]), lower


def check_fp32_steps(
    device="cpu",
    param=torch.float32,
    grad=torch.float32,
    maximize=False,
    lr=0.01,
    low=False,
    copy=None,
):
    """Many tensors with fp32 moments: batches of mixed sizes, an empty one and one larger than a
    batch.
    """
    g = torch.Generator().manual_seed(0)
    sizes = [(3, 5), (0,), (7,), (), (adamw_fp32.BATCH_ELEMENTS + 1,), (40,), (4, 6)]

    def build():
        g.manual_seed(0)
        found = []
        for i, size in enumerate(sizes):
            p, grad_, m, v = (torch.randn(size, generator=g).to(device) for _ in range(4))
            kinds = (torch.float32, torch.float32) if i == 5 else (param, grad)
            one = FP32Tensors(p.to(kinds[0]), grad_.to(kinds[1]), m, v.square())
            one = FP32Tensors(*(x.t() for x in one[:4])) if i == 6 else one  # not contiguous
            found.append(one._replace(**extras(p.numel(), device, low and i != 5, copy)))
        return found

    mine, theirs, start = build(), build(), build()
    numbers = replace(NUMBERS, maximize=maximize, lr=lr)
    if maximize:
        numbers = replace(numbers, grad_factor=torch.tensor(0.37, device=device))
    adamw_fp32.adamw_fp32_steps(mine, numbers)
    reference.adamw_fp32_steps(theirs, numbers)
    for a, b, before in zip(mine, theirs, start, strict=True):
        assert torch.equal(a.grad, before.grad)
        assert not a.param.numel() or not torch.equal(a.param, before.param)
        p, q = (
            (x.param if x.low is None else join(x.param, x.low.view(x.param.shape))) for x in (a, b)
        )
        if a.copy is not None:
            assert torch.equal(a.copy.view(p.shape), p.to(a.copy.dtype))
        for x, y in ((p, q), (a.first_moment, b.first_moment), (a.second_moment, b.second_moment)):
            if device == "cpu":
                assert torch.equal(x, y)
            else:  # an addition may or may not be contracted with the multiplication before it
                rtol = 2e-2 if x.dtype != torch.float32 else 1e-5
                assert torch.allclose(x.float(), y.float(), rtol=rtol, atol=1e-6)


def check_fp32_kernel(
    device="cpu",
    param=torch.float32,
    grad=torch.float32,
    low=False,
    copy=None,
    counted=False,
    **numbers,
):
    """One launch a kind, of tensors of any size and alignment, against the definition."""
    numbers = replace(NUMBERS, **numbers)

    def build():
        g = torch.Generator().manual_seed(0)
        found = []
        for i, n in enumerate((16, 7, 0, 1024, 2049, 48)):
            p, grad_, m, v = (
                torch.randn(n + i % 2, generator=g)[i % 2 :].to(device) for _ in range(4)
            )
            one = FP32Tensors(
                p.to(param), grad_.to(grad), m, v.square(), **extras(n, device, low, copy)
            )
            found.append(one)
        return found

    mine, theirs = build(), build()
    if counted:
        count = torch.tensor(float(numbers.step), device=device)
        mine = [one._replace(step_count=count) for one in mine]
        adamw_fp32_kernel.step_contiguous(mine, replace(numbers, step=1))
    else:
        adamw_fp32_kernel.step_contiguous(mine, numbers)
    reference.adamw_fp32_steps(theirs, numbers)
    for a, b in zip(mine, theirs, strict=True):
        p, q = ((x.param if x.low is None else join(x.param, x.low)) for x in (a, b))
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
