"""A step of AdamW: every difference has to be one that the kernel's docstring allows."""

from dataclasses import replace

import torch

from coat_dist.kernels import adamw as kernels
from coat_dist.kernels import table
from coat_dist.reference import adamw as reference
from coat_dist.reference.adamw import AdamWTensors
from coat_dist.reference.master import join
from coat_dist.reference.moment_formats import LOG8_SPAN
from coat_dist.reference.moments import TINY, Moment, decode
from tests.support import equal
from tests.support.devices import DEVICE, on_device

from ..adamw_problems import NUMBERS, VARIANTS, clone, extras, one_step, problem


def numbers_of(variant):
    numbers = variant.get("numbers", NUMBERS)
    if variant.get("lr") == "tensor":
        numbers = replace(numbers, lr=torch.tensor(0.01, device=DEVICE))
    if "factor" in variant:
        numbers = replace(numbers, grad_factor=torch.tensor(variant["factor"], device=DEVICE))
    return numbers


def check(n, name):
    """One step of both from the same start."""
    device, variant = DEVICE, VARIANTS[name]
    numbers, seed = numbers_of(variant), variant.get("seed")
    factor = variant.get("factor", 1.0)
    mine = problem(n, device, **variant)
    theirs, start = clone(mine), clone(mine)
    more, expected, before = (extras(n, device, **variant) for _ in range(3))
    one_step(kernels, *mine, numbers, seed, **more)
    one_step(reference, *theirs, numbers, seed, **expected)
    assert torch.equal(mine[1], start[1])
    check_copy(mine[0], **more)
    if "low" in more:  # from here on these are the fp32 master weights
        mine[0], theirs[0], start[0] = (
            join(mine[0], more["low"]),
            join(theirs[0], expected["low"]),
            join(start[0], before["low"]),
        )
    p, g, lr = (
        start[0].double(),
        start[1].double() * factor * (-1 if numbers.maximize else 1),
        float(numbers.lr),
    )
    codec_m, codec_v = start[4:]
    old_v = decode(start[3], codec_v, n)
    old_m = decode(start[2], codec_m, n, old_v if codec_m.over_root else None).double()
    old_v = old_v.double()
    m = numbers.beta1 * old_m + (1 - numbers.beta1) * g
    v = numbers.beta2 * old_v + (1 - numbers.beta2) * g * g
    check_params(mine[0], theirs[0], p, g, old_m, v, numbers, lr)
    # Of arithmetic, before cancellation.
    noise_m = 4e-5 * (numbers.beta1 * old_m.abs() + (1 - numbers.beta1) * g.abs())
    if codec_m.over_root:
        noise_m, m = ((x / v.clamp(min=TINY).sqrt()) for x in (noise_m, m))
    check_moment(mine[2], theirs[2], m, noise_m, codec_m, seed if numbers.stochastic[0] else None)
    check_moment(
        mine[3], theirs[3], v, 4e-5 * v, codec_v, seed if numbers.stochastic[1] else None, start[3]
    )


def check_copy(param, low=None, copy=None):
    """The copy is the new parameter as torch casts it; the interpreter truncates to bfloat16."""
    if copy is None:
        return
    master = param if low is None else join(param, low)
    if copy.dtype == torch.bfloat16 and not copy.is_cuda:
        assert torch.equal(copy.view(torch.int16), (master.view(torch.int32) >> 16).to(torch.int16))
    else:
        assert torch.equal(copy, master.to(copy.dtype))


def check_params(got, wanted, p, g, old_m, v, numbers, lr):
    denominator = v.sqrt() * numbers.inverse_sqrt_bias2 + numbers.eps
    update = (
        (old_m.abs() * numbers.beta1 + g.abs() * (1 - numbers.beta1))
        * numbers.inverse_bias1
        / denominator
    )
    allowed = 2**-22 * p.abs() + 4e-5 * lr * update
    if got.dtype != torch.float32:
        allowed = (
            allowed
            + torch.finfo(got.dtype).eps * wanted.double().abs()
            + torch.finfo(got.dtype).smallest_normal
        )
        if got.is_cuda:  # the interpreter truncates to bfloat16
            assert (got != wanted).sum() <= 0.01 * got.numel()
    assert ((got.double() - wanted.double()).abs() <= allowed).all()


def check_moment(got, wanted, exact, noise, codec, seed, before=None):
    """``exact`` fp64 values before encoding, which either side may have missed by ``noise``;
    ``before``: what the moment was, whose exponents a codec may keep.
    """
    size = codec.group_size
    wide, noise = (
        torch.nn.functional.pad(x.abs(), (0, -x.numel() % size)).view(-1, size)
        for x in (exact, noise)
    )
    wide = torch.where(wide < TINY, 0.0, wide)
    a = wanted.a.double()
    tie_a, tie_k = got.a != wanted.a, got.k != wanted.k
    assert ((got.a.double() - a).abs() <= a * 2**-7).all() and tie_a.sum() <= 0.01 * tie_a.numel()
    if codec.expand:
        ends = [torch.where(wide > 0, x, torch.inf).amin(1) for x in (wide + noise, wide - noise)]
        least, most = (
            (torch.log2(a / x.clamp(min=TINY)) * f).clamp(max=codec.span)
            for x, f in zip(ends, (0.9999, 1.0001), strict=True)
        )  # the spread
        if codec.format == "log8":
            low, high = (torch.ceil(x * (codec.unit / LOG8_SPAN)) for x in (least, most))
        else:
            low, high = (torch.floor(codec.k_numerator / x) for x in (most, least))
            high = torch.where(least > 0, high, 255.0)
        k = got.k.double()
        inside = (k >= low.clamp(1, 255)) & (k <= high.clamp(1, 255))
        kept = (
            (got.k == before.k) & (got.k == wanted.k)
            if codec.keep_grid
            else torch.zeros_like(tie_a)
        )
        assert (inside | kept | tie_a | (wide.amax(1) == 0)).all()
    assert not codec.expand or tie_k.sum() <= 0.01 * tie_k.numel()

    different = (got.q != wanted.q) & ~(tie_a | tie_k)[:, None]
    assert different.sum() <= 2e-3 * different.numel()
    mine, theirs = ordinals(got.q, codec), ordinals(wanted.q, codec)
    cancelled = noise > 0.01 * wide  # nothing is left of the terms but their rounding
    assert ((mine - theirs)[different & ~cancelled].abs() <= 1).all()
    k = wanted.k.double()[:, None]
    if codec.format == "log8":
        y = 255 + torch.log2(wide / a[:, None]) * codec.unit / k
        allowed = codec.unit / k * (1.5 * noise / wide.clamp(min=TINY) + 3e-5) + 1e-4
    else:
        power = k / codec.unit
        y = codec.kind.max * (wide / a[:, None]) ** power
        allowed = y * (1e-4 * (1 + power) + power * noise / wide.clamp(min=TINY))
    if seed is None:
        upper = torch.maximum(mine.abs(), theirs.abs())
        if codec.format in ("e4m3", "e5m2"):
            upper, lower = (
                x.byte().view(codec.kind.fp8.dtype).double() for x in (upper, upper - 1)
            )
        else:
            lower = upper - 1
        assert ((y - (upper + lower) / 2).abs() <= allowed)[different].all()


def ordinals(q, codec):
    """Codes as signed counts of values above zero."""
    if codec.format == "int8":
        return q.view(torch.int8).int()
    return q.int() if codec.format == "log8" else (q & 0x7F).int() * (1 - 2 * (q >> 7).int())


def tensors_of(value):
    return list(value) if isinstance(value, Moment) else [value]


def check_many(name):
    """Tensors that share a launch, and those that cannot, get the bytes that a launch of their
    own gives them.
    """
    device, variant = DEVICE, VARIANTS[name]
    together = [problem(n, device, **variant) for n in (128, 16, 2048, 1040, 129, 0, 4096)]
    # Of a fitting size, but not at a multiple of 16 bytes.
    shifted = problem(257, device, **variant)
    shifted[:2] = shifted[0][1:], shifted[1][1:]
    together.append(shifted)
    alone = [clone(x) for x in together]
    more, more_alone = (
        [extras(x[0].numel(), device, **variant) for x in together] for _ in range(2)
    )
    numbers, first = numbers_of(variant), variant.get("seed")
    for _ in range(2):  # the second time the table is kept
        seeds = [None if first is None else (first + i) % 2**32 for i in range(len(together))]
        many = [
            AdamWTensors(*x[:4], seed, **e)
            for x, seed, e in zip(together, seeds, more, strict=True)
        ]
        kinds, single = table.sort(many)
        assert [len(x) for x in kinds.values()] == [5] and len(single) == 2
        kernels.adamw_steps(many, *together[0][4:], numbers)
        for x, seed, e in zip(alone, seeds, more_alone, strict=True):
            one_step(kernels, *x, numbers, seed, **e)
        for e, other in zip(more, more_alone, strict=True):
            assert equal(e, other)
        for mine, theirs in zip(together, alone, strict=True):
            for a, b in zip(mine[:4], theirs[:4], strict=True):
                assert equal(tensors_of(a), tensors_of(b))


SOME = (
    *("default", "e5m2", "groups of 64", "bf16", "lr tensor", "int8, log8"),
    *("remainder, copy, stochastic", "normalized, stochastic"),
    "normalized, int8, log8, stochastic",
)
ROWS = {
    **{
        f"{name}, {n}": (check, n, name)
        for name in VARIANTS
        for n in on_device([1, 129, 1025, 1_000_003], [128 * 21 + 1])
    },
    # Around groups and tiles.
    **{f"{n} elements": (check, n, "default") for n in (0, 1, 127, 128, 129, 1023, 1024, 1025)},
    **{f"{name}, many tensors": (check_many, name) for name in on_device(tuple(VARIANTS), SOME)},
}
