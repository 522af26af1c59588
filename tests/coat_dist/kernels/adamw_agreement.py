"""How the AdamW kernel must agree with its definition; used in the interpreter here and on the GPU in tests/gpu."""

from dataclasses import replace
from itertools import product

import torch

from coat_dist.kernels import adamw as kernels
from coat_dist.kernels import adamw_fp32, table
from coat_dist.reference import adamw as reference
from coat_dist.reference.adamw import AdamWStep, AdamWTensors, FP32Tensors
from coat_dist.reference.master import join, split
from coat_dist.reference.moments import LOG8_SPAN, TINY, Moment, MomentCodec, decode, encode

NUMBERS = AdamWStep(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
VARIANTS = {
    "default": {},
    "e5m2": {"m": "e5m2", "v": "e5m2"},
    "mixed": {"m": "e5m2"},
    "no expansion": {"expand": False},
    "groups of 64": {"size": 64},
    "groups of 256": {"size": 256},
    "maximize": {"numbers": replace(NUMBERS, maximize=True)},
    "bf16": {"param": torch.bfloat16, "grad": torch.bfloat16},
    "fp16, bf16 gradient": {"param": torch.float16, "grad": torch.bfloat16},
    "bf16 gradient": {"grad": torch.bfloat16},
    "stochastic": {"seed": 7},
    "stochastic, e5m2, large seed": {"seed": 2**32 - 5, "m": "e5m2", "v": "e5m2"},
    "int8, log8": {"m": "int8", "v": "log8"},
    "int8, log8, stochastic": {"m": "int8", "v": "log8", "seed": 7},
    "int8, log8, groups of 64": {"m": "int8", "v": "log8", "size": 64},
    "int8 without expansion": {"m": "int8", "expand": False},
    "int8, e5m2": {"m": "int8", "v": "e5m2"},
    "e4m3, log8, second moment stochastic": {
        "v": "log8",
        "seed": 11,
        "numbers": replace(NUMBERS, stochastic=(False, True)),
    },
    "second moment stochastic": {"seed": 7, "numbers": replace(NUMBERS, stochastic=(False, True))},
    "lr tensor": {"lr": "tensor"},
    "gradient factor": {"factor": 0.37},
    "remainder": {"param": torch.bfloat16, "grad": torch.bfloat16, "low": True},
    "remainder, copy, stochastic": {"param": torch.bfloat16, "low": True, "copy": torch.bfloat16, "seed": 9},
    "copy": {"copy": torch.bfloat16},
    "fp16 copy": {"copy": torch.float16, "grad": torch.float16},
}


def problem(
    n, device="cpu", m="e4m3", v="e4m3", expand=True, size=128, param=torch.float32, grad=torch.float32, spread=3.0, **_
):
    """Random parameters, gradients and moments; groups that are zero, constant, or hold one huge element."""
    g = torch.Generator().manual_seed(n)
    scale = torch.exp(spread * torch.randn(n, generator=g))
    values = [torch.randn(n, generator=g) * s for s in (1.0, scale.clamp(max=1e4), scale)]
    values.append((torch.randn(n, generator=g) * scale).square())
    for x in values[1:]:
        x[::17] = 0
        x[size : 2 * size] = 0
        x[2 * size : 3 * size] = 0.37
        x[3 * size : 3 * size + 1] = 3e4
    codec_m, codec_v = MomentCodec(m, expand, size), MomentCodec(v, expand, size, keep_nonzero=True)
    m_, v_ = (
        Moment(*(t.to(device) for t in encode(x, c))) for x, c in zip(values[2:], (codec_m, codec_v), strict=True)
    )
    return [values[0].to(device, param), values[1].to(device, grad), m_, v_, codec_m, codec_v]


def extras(n, device="cpu", low=False, copy=None, **_):
    """Keyword arguments of a step: remainders at random, and a copy full of garbage."""
    g = torch.Generator().manual_seed(n + 1)
    found = {}
    if low:
        found["low"] = torch.randint(-(2**15), 2**15, (n,), generator=g).to(torch.int16).to(device)
    if copy is not None:
        found["copy"] = torch.full((n,), 7.0, dtype=copy, device=device)
    return found


def clone(arguments):
    def one(x):
        return Moment(*map(one, x)) if isinstance(x, Moment) else x.clone() if isinstance(x, torch.Tensor) else x

    return [one(x) for x in arguments]


def check(n, device="cpu", **variant):
    """One step of both from the same start; every difference has to be one that the kernel's docstring allows."""
    numbers, seed = variant.get("numbers", NUMBERS), variant.get("seed")
    if variant.get("lr") == "tensor":
        numbers = replace(numbers, lr=torch.tensor(0.01, device=device))
    factor = variant.get("factor", 1.0)
    if factor != 1.0:
        numbers = replace(numbers, grad_factor=torch.tensor(factor, device=device))
    mine = problem(n, device, **variant)
    theirs, start = clone(mine), clone(mine)
    more, expected, before = (extras(n, device, **variant) for _ in range(3))
    kernels.adamw_step(*mine, numbers, seed, **more)
    reference.adamw_step(*theirs, numbers, seed, **expected)
    assert torch.equal(mine[1], start[1])
    check_copy(mine[0], **more)
    if "low" in more:  # from here on these are the fp32 master weights
        mine[0], theirs[0], start[0] = (
            join(mine[0], more["low"]),
            join(theirs[0], expected["low"]),
            join(start[0], before["low"]),
        )
    p, g, lr = start[0].double(), start[1].double() * factor * (-1 if numbers.maximize else 1), float(numbers.lr)
    old_m, old_v = (decode(x, codec, n).double() for x, codec in zip(start[2:4], start[4:], strict=True))
    m = numbers.beta1 * old_m + (1 - numbers.beta1) * g
    v = numbers.beta2 * old_v + (1 - numbers.beta2) * g * g
    check_params(mine[0], theirs[0], p, g, old_m, v, numbers, lr)
    noise_m = 4e-5 * (numbers.beta1 * old_m.abs() + (1 - numbers.beta1) * g.abs())  # of arithmetic, before cancellation
    check_moment(mine[2], theirs[2], m, noise_m, start[4], seed if numbers.stochastic[0] else None)
    check_moment(mine[3], theirs[3], v, 4e-5 * v, start[5], seed if numbers.stochastic[1] else None)


def check_copy(param, low=None, copy=None):
    """The copy is the new parameter as torch casts it; the interpreter truncates to bfloat16."""
    if copy is None:
        return
    master = param if low is None else join(param, low)
    if copy.dtype == torch.bfloat16 and not copy.is_cuda:
        assert torch.equal(copy.view(torch.int16), (master.view(torch.int32) >> 16).to(torch.int16))
    else:
        assert torch.equal(copy, master.to(copy.dtype))


def check_remainder(device="cpu", seed=None, n=128 * 21 + 1, **variant):
    """bfloat16 and remainder give the bits of the fp32 master weight that they stand for, step by step."""
    fp32 = problem(n, device, **variant)
    fp32[0][:2] = torch.tensor([-0.0, 1e-42])[:n]  # what weight decay leaves of them is a zero and a subnormal
    halves = clone(fp32)
    halves[0], low = split(fp32[0])
    for step in range(1, 6):
        numbers = replace(NUMBERS, step=step)
        for x in (fp32, halves):
            x[1] = torch.randn(n, generator=torch.Generator().manual_seed(step)).to(device, x[1].dtype) ** 3
        kernels.adamw_step(*fp32, numbers, seed)
        kernels.adamw_step(*halves, numbers, seed, low=low)
        assert torch.equal(join(halves[0], low).view(torch.int32), fp32[0].view(torch.int32))
        for a, b in zip((*fp32[2], *fp32[3]), (*halves[2], *halves[3]), strict=True):
            assert torch.equal(a, b)
        assert halves[0].dtype == torch.bfloat16 and low.any()


def check_split(device="cpu", every=1):
    """The kernel's division of a master weight, at ``every`` so many upper halves and at edges of both halves."""
    still = AdamWStep(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1)
    edges = torch.tensor([[x, x + 1, x + (1 << 15), x + (1 << 15) + 1] for x in (0, 0x7F7F, 0x7F81, 0x7FC0, 0x7FFE)])
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
        kernels.adamw_step(p, zero, m, v, codec_m, codec_v, still, low=low)
        wanted = split(expected)
        assert torch.equal(p.view(torch.int16), wanted[0].view(torch.int16)), lower
        assert torch.equal(low, wanted[1]), lower


def check_params(got, wanted, p, g, old_m, v, numbers, lr):
    denominator = v.sqrt() * numbers.inverse_sqrt_bias2 + numbers.eps
    update = (old_m.abs() * numbers.beta1 + g.abs() * (1 - numbers.beta1)) * numbers.inverse_bias1 / denominator
    allowed = 2**-22 * p.abs() + 4e-5 * lr * update
    if got.dtype != torch.float32:
        allowed = allowed + torch.finfo(got.dtype).eps * wanted.double().abs() + torch.finfo(got.dtype).smallest_normal
        if got.is_cuda:  # the interpreter truncates to bfloat16
            assert (got != wanted).sum() <= 0.01 * got.numel()
    assert ((got.double() - wanted.double()).abs() <= allowed).all()


def check_moment(got, wanted, exact, noise, codec, seed):
    """``exact`` fp64 values before encoding, which either side may have missed by ``noise``."""
    size = codec.group_size
    wide, noise = (torch.nn.functional.pad(x.abs(), (0, -x.numel() % size)).view(-1, size) for x in (exact, noise))
    wide = torch.where(wide < TINY, 0.0, wide)
    a = wanted.a.double()
    tie_a, tie_k = got.a != wanted.a, got.k != wanted.k
    assert ((got.a.double() - a).abs() <= a * 2**-7).all() and tie_a.sum() <= 0.01 * tie_a.numel()
    if codec.expand:
        ends = [torch.where(wide > 0, x, torch.inf).amin(1) for x in (wide + noise, wide - noise)]
        least, most = (
            torch.log2(a / x.clamp(min=TINY)) * f for x, f in zip(ends, (0.9999, 1.0001), strict=True)
        )  # the spread
        if codec.format == "log8":
            low, high = (torch.ceil(x * (codec.unit / LOG8_SPAN)) for x in (least, most))
        else:
            low, high = (torch.floor(codec.k_numerator / x) for x in (most, least))
            high = torch.where(least > 0, high, 255.0)
        k = got.k.double()
        inside = (k >= low.clamp(1, 255)) & (k <= high.clamp(1, 255))
        assert (inside | tie_a | (wide.amax(1) == 0)).all()
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
        y = codec.max * (wide / a[:, None]) ** power
        allowed = y * (1e-4 * (1 + power) + power * noise / wide.clamp(min=TINY))
    if seed is None:
        upper = torch.maximum(mine.abs(), theirs.abs())
        if codec.format in ("e4m3", "e5m2"):
            upper, lower = (x.byte().view(codec.fp8.dtype).double() for x in (upper, upper - 1))
        else:
            lower = upper - 1
        assert ((y - (upper + lower) / 2).abs() <= allowed)[different].all()


def ordinals(q, codec):
    """Codes as signed counts of values above zero."""
    if codec.format == "int8":
        return q.view(torch.int8).int()
    return q.int() if codec.format == "log8" else (q & 0x7F).int() * (1 - 2 * (q >> 7).int())


PAIRS = (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("int8", "log8"))


def check_non_finite(device="cpu"):
    """NaN or infinity in one gradient: its group decodes to NaN, the others as if nothing had happened."""
    for bad, (m, v) in product((torch.nan, torch.inf, -torch.inf), PAIRS):
        seed = None if bad == torch.inf else 5
        clean, dirty = problem(1024, device, m, v), problem(1024, device, m, v)
        dirty[1][300] = bad
        kernels.adamw_step(*clean, NUMBERS, seed)
        kernels.adamw_step(*dirty, NUMBERS, seed)
        for i in (2, 3):
            decoded = decode(dirty[i], dirty[i + 2]).view(8, 128)
            assert decoded[2].isnan().all()
            keep = torch.arange(8, device=device) != 2
            for a, b in zip(dirty[i], clean[i], strict=True):
                assert torch.equal(a[keep], b[keep])
        assert dirty[0].isfinite().sum() == 1023


def check_extremes(device="cpu"):
    """A step that leaves moments alone (gradient zero, decay rates near one) keeps the ends of fp32's range alive."""
    values = [[3.4e38, 1.2e-38], [3.4028e38, 3.4028e38], [1.2e-38], [0.0, 1.2e-38], [1.3e-38, 1.0], [1e-45, 1.0], [0.0]]
    still = AdamWStep(lr=0.0, beta1=1 - 2**-24, beta2=1 - 2**-24, eps=1e-8, weight_decay=0.0, step=1)
    for first, second in PAIRS:
        for value, seed in product(values, (None, 3) if second == "log8" else (None,)):
            x = torch.tensor(value)
            codec_m, codec_v = MomentCodec(first), MomentCodec(second, keep_nonzero=True)
            m, v = (Moment(*(t.to(device) for t in encode(x, c))) for c in (codec_m, codec_v))
            before = decode(v, codec_v, len(value))
            zero = torch.zeros(len(value), device=device)
            for _ in range(3):
                kernels.adamw_step(zero.clone(), zero, m, v, codec_m, codec_v, still, seed)
            for after in (decode(m, codec_m, len(value)), decode(v, codec_v, len(value))):
                assert after.isfinite().all()
                assert (after[before == 0] == 0).all()
            after = decode(v, codec_v, len(value))
            alive = before > 1.25e-38  # the multiplication may push the rest into the subnormals
            assert (after[alive] > 0).all(), (second, value, after)


def check_codes_survive(device="cpu"):
    """A step that changes nothing leaves every int8 and log8 code, a and k as they were: arithmetic errors never carry
    a decoded code over to a neighbour. Each group has the largest code and one that pins k."""
    still = AdamWStep(lr=0.0, beta1=1 - 2**-40, beta2=1 - 2**-40, eps=1e-8, weight_decay=0.0, step=1)
    codec_m, codec_v = MomentCodec("int8"), MomentCodec("log8", keep_nonzero=True)
    int8 = torch.arange(-127, 129).clamp(max=127).view(2, 128)
    int8[int8.abs() < 4] = 0
    int8[:, :2] = torch.tensor([127, -4])
    log8 = torch.arange(256).view(2, 128)
    log8[log8 < 2] = 0
    log8[:, :2] = torch.tensor([255, 2])
    zero = torch.zeros(256, device=device)
    for a, (k_m, k_v) in product((1.5 * 2.0**40, 2.0**-60), ((5, 1), (20, 7), (64, 20), (255, 60))):
        start = [
            Moment(
                codes.to(dtype).view(torch.uint8).to(device),
                torch.full((2,), a, dtype=torch.bfloat16, device=device),
                torch.full((2,), k, dtype=torch.uint8, device=device),
            )
            for codes, dtype, k in ((int8, torch.int8, k_m), (log8, torch.uint8, k_v))
        ]
        m, v = clone(start)
        for _ in range(2):
            kernels.adamw_step(zero.clone(), zero, m, v, codec_m, codec_v, still)
        for before, after in zip(start, (m, v), strict=True):
            assert all(map(torch.equal, before, after)), (a, k_m, k_v)


def check_smallest_normals(device="cpu"):
    """Codes that stand for subnormals decode to the smallest normal number; new subnormals are stored as zero."""
    codec_m, codec_v = MomentCodec(expand=False), MomentCodec(expand=False, keep_nonzero=True)
    q, k = torch.arange(128, device=device).clamp(max=126)[None].byte(), torch.tensor([16], device=device).byte()
    v = Moment(q, torch.tensor([2 * TINY], device=device).bfloat16(), k)
    m, zero = codec_m.zeros(128, device), torch.zeros(128, device=device)
    kernels.adamw_step(zero.clone(), zero + 1.5e-19, m, v, codec_m, codec_v, NUMBERS)
    decoded = decode(v, codec_v)
    assert decoded[0] == 0 and (decoded[1:4] == decoded[4]).all() and (decoded[1:] >= TINY).all()

    codec = MomentCodec()
    grad = torch.tensor([1.0, 1e-38, 1.3e-37], device=device)
    m, v = codec.zeros(3, device), codec_v.zeros(3, device)
    kernels.adamw_step(grad.clone(), grad, m, v, codec, codec_v, NUMBERS)
    assert (decode(m, codec, 3) != 0).tolist() == [True, False, True]

    grad = torch.full((3,), 1e-38, device=device)
    m = codec.zeros(3, device)
    kernels.adamw_step(grad.clone(), grad, m, codec_v.zeros(3, device), codec, codec_v, NUMBERS)
    assert m.a == 0 and not m.q.any() and m.k == 255


def tensors_of(value):
    return list(value) if isinstance(value, Moment) else [value]


def check_many(device="cpu", **variant):
    """Tensors that share a launch, and those that cannot, get the bytes that a launch of their own gives them."""
    together = [problem(n, device, **variant) for n in (128, 16, 2048, 1040, 129, 0, 4096)]
    shifted = problem(257, device, **variant)  # of a fitting size, but not at a multiple of 16 bytes
    shifted[:2] = shifted[0][1:], shifted[1][1:]
    together.append(shifted)
    alone = [clone(x) for x in together]
    more, more_alone = ([extras(x[0].numel(), device, **variant) for x in together] for _ in range(2))
    numbers, first = variant.get("numbers", NUMBERS), variant.get("seed")
    if variant.get("lr") == "tensor":
        numbers = replace(numbers, lr=torch.tensor(0.01, device=device))
    if "factor" in variant:
        numbers = replace(numbers, grad_factor=torch.tensor(variant["factor"], device=device))
    for _ in range(2):  # the second time the table is kept
        seeds = [None if first is None else (first + i) % 2**32 for i in range(len(together))]
        many = [AdamWTensors(*x[:4], seed, **e) for x, seed, e in zip(together, seeds, more, strict=True)]
        kinds, single = table.sort(many)
        assert [len(x) for x in kinds.values()] == [5] and len(single) == 2
        kernels.adamw_steps(many, *together[0][4:], numbers)
        for x, seed, e in zip(alone, seeds, more_alone, strict=True):
            kernels.adamw_step(*x, numbers, seed, **e)
        for e, other in zip(more, more_alone, strict=True):
            assert all(torch.equal(e[key], other[key]) for key in e)
        for mine, theirs in zip(together, alone, strict=True):
            for a, b in zip(mine[:4], theirs[:4], strict=True):
                assert all(torch.equal(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


def check_fp32_steps(
    device="cpu", param=torch.float32, grad=torch.float32, maximize=False, lr=0.01, low=False, copy=None
):
    """Many tensors with fp32 moments: batches of mixed sizes, an empty one and one larger than a batch."""
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
        p, q = ((x.param if x.low is None else join(x.param, x.low.view(x.param.shape))) for x in (a, b))
        if a.copy is not None:
            assert torch.equal(a.copy.view(p.shape), p.to(a.copy.dtype))
        for x, y in ((p, q), (a.m, b.m), (a.v, b.v)):
            if device == "cpu":
                assert torch.equal(x, y)
            else:  # an addition may or may not be contracted with the multiplication before it
                rtol = 2e-2 if x.dtype != torch.float32 else 1e-5
                assert torch.allclose(x.float(), y.float(), rtol=rtol, atol=1e-6)
