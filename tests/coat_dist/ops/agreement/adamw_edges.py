"""The AdamW kernel at the edges: non-finite gradients, ends of fp32's range, codes that must
stay what they are.
"""

from dataclasses import replace
from itertools import product

import torch

from coat_dist.kernels import adamw as kernels
from coat_dist.reference import adamw as reference
from coat_dist.reference.adamw import AdamWStep
from coat_dist.reference.dither import dither
from coat_dist.reference.moments import TINY, Moment, MomentCodec, decode, encode
from tests.support import equal
from tests.support.devices import DEVICE, on_device

from ..adamw_problems import NUMBERS, clone, one_step, problem

STILL = AdamWStep(lr=0.0, beta1=1 - 2**-40, beta2=1 - 2**-40, eps=1e-8, weight_decay=0.0, step=1)
"""A step that changes nothing."""
PAIRS = (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("int8", "log8"))


def check_non_finite():
    """NaN or infinity in one gradient: its group decodes to NaN, the others as if nothing had
    happened.
    """
    for bad, (m, v) in product((torch.nan, torch.inf, -torch.inf), PAIRS):
        seed = None if bad == torch.inf else 5
        clean, dirty = problem(1024, DEVICE, m, v), problem(1024, DEVICE, m, v)
        dirty[1][300] = bad
        one_step(kernels, *clean, NUMBERS, seed)
        one_step(kernels, *dirty, NUMBERS, seed)
        for i in (2, 3):
            decoded = decode(dirty[i], dirty[i + 2]).view(8, 128)
            assert decoded[2].isnan().all()
            keep = torch.arange(8, device=DEVICE) != 2
            for a, b in zip(dirty[i], clean[i], strict=True):
                assert torch.equal(a[keep], b[keep])
        assert dirty[0].isfinite().sum() == 1023


def check_non_finite_moments():
    """A square that overflows, or what is not finite, reaches every parameter of its group in
    the next step.
    """
    for bad, (m, v), normalize in product((1e25, torch.inf, torch.nan), PAIRS, (False, True)):
        kernel, definition = (problem(1024, DEVICE, m, v, normalize=normalize) for _ in range(2))
        for side, tensors in ((kernels, kernel), (reference, definition)):
            tensors[1][300] = bad
            one_step(side, *tensors, NUMBERS, 5)
            tensors[1].zero_()
            one_step(side, *tensors, NUMBERS, 5)
            finite = tensors[0].isfinite().view(8, 128).sum(1).tolist()
            assert finite == [128, 128, 0, 128, 128, 128, 128, 128], (
                bad,
                m,
                v,
                normalize,
                side,
                finite,
            )


def check_extremes():
    """A step that leaves moments alone (gradient zero, decay rates near one) keeps the ends of
    fp32's range alive.
    """
    values = [
        [3.4e38, 1.2e-38],
        [3.4028e38, 3.4028e38],
        [1.2e-38],
        [0.0, 1.2e-38],
        [1.3e-38, 1.0],
        [1e-45, 1.0],
        [0.0],
    ]
    still = replace(STILL, beta1=1 - 2**-24, beta2=1 - 2**-24)
    for (first, second), normalize in product(PAIRS, (False, True)):
        for value, seed in product(values, (None, 3) if second == "log8" else (None,)):
            x = torch.tensor(value)
            codec_m = MomentCodec(first, over_root=normalize)
            codec_v = MomentCodec(second, keep_nonzero=True, keep_grid=normalize)
            ratio = x.clamp(max=1e15) if normalize else x
            m, v = (
                Moment(*(t.to(DEVICE) for t in encode(y, c)))
                for y, c in ((ratio, codec_m), (x, codec_v))
            )
            before = decode(v, codec_v, len(value))
            zero = torch.zeros(len(value), device=DEVICE)
            for _ in range(3):
                one_step(kernels, zero.clone(), zero, m, v, codec_m, codec_v, still, seed)
            after = decode(v, codec_v, len(value))
            for moment in (decode(m, codec_m, len(value), after if normalize else None), after):
                assert moment.isfinite().all()
                assert (moment[before == 0] == 0).all()
            alive = before > 1.25e-38  # the multiplication may push the rest into the subnormals
            assert (after[alive] > 0).all(), (second, value, after)


def check_codes_survive():
    """A step that changes nothing leaves every int8 and log8 code, a and k as they were: arithmetic
    errors never carry a decoded code over to a neighbour. Each group has the largest code and one
    that pins k.
    """
    int8 = torch.arange(-127, 129).clamp(max=127).view(2, 128)
    int8[int8.abs() < 4] = 0
    int8[:, :2] = torch.tensor([127, -4])
    log8 = torch.arange(256).view(2, 128)
    log8[log8 < 2] = 0
    log8[:, :2] = torch.tensor([255, 2])
    zero = torch.zeros(256, device=DEVICE)
    spacings = [(False, k) for k in ((5, 1), (20, 7), (64, 20), (255, 60))] + [
        (True, k) for k in ((64, 7), (255, 60))
    ]
    for a, (normalize, (k_m, k_v)) in product((1.5 * 2.0**40, 2.0**-60), spacings):
        codec_m = MomentCodec("int8", over_root=normalize)
        codec_v = MomentCodec("log8", keep_nonzero=True, keep_grid=normalize)
        start = [
            Moment(
                codes.to(dtype).view(torch.uint8).to(DEVICE),
                torch.full((2,), a, dtype=torch.bfloat16, device=DEVICE),
                torch.full((2,), k, dtype=torch.uint8, device=DEVICE),
            )
            for codes, dtype, k in ((int8, torch.int8, k_m), (log8, torch.uint8, k_v))
        ]
        m, v = clone(start)
        for _ in range(2):
            one_step(kernels, zero.clone(), zero, m, v, codec_m, codec_v, STILL)
        for before, after in zip(start, (m, v), strict=True):
            assert equal(before, after), (a, normalize, k_m, k_v)


def check_amaxes_stay(every):
    """A step that changes nothing leaves every FP8 group's amax where it is, whatever its exponent:
    read as a little more, it would rise by a bfloat16 step each time.
    """
    k = torch.arange(1, 256, every).repeat(8)
    zero = torch.zeros(128 * len(k), device=DEVICE)
    for (fmt, largest), normalize in product((("e4m3", 126), ("e5m2", 123)), (False, True)):
        codec_m = MomentCodec(fmt, over_root=normalize)
        codec_v = MomentCodec(fmt, keep_nonzero=True, keep_grid=normalize)
        codes = torch.randint(1, largest + 1, (len(k), 128), dtype=torch.uint8)
        codes[:, 7] = largest
        a = (torch.rand(len(k)) * 80 - 40).exp2().bfloat16()
        m, v = ([t.clone().to(DEVICE) for t in (codes, a, k.byte())] for _ in range(2))
        m, v = Moment(*m), Moment(*v)
        for _ in range(2):
            one_step(kernels, zero.clone(), zero, m, v, codec_m, codec_v, STILL)
            for moment in (m, v):
                moved = (moment.a.cpu() != a).nonzero()[:, 0]
                assert not len(moved), (fmt, normalize, k[moved].tolist(), a[moved].tolist())


def check_largest_codes():
    """At the ends of the noise, too, a group's largest element gets the largest code or its
    neighbour.
    """
    x = torch.ones(512)
    x[::128], x[1::128] = 0.5, 2.0**-4
    ends = {1 - 2.0**-17: torch.Tensor.max, 2.0**-17: torch.Tensor.min}
    for (m, v), (end, extreme), which in product(PAIRS, ends.items(), (0, 1)):
        seed = next(
            s
            for s in range(10**5)
            if extreme(dither(s, 1, 0, 512, 128)[which].where(x == 1.0, 0.5)) == end
        )
        codec_m, codec_v = MomentCodec(m), MomentCodec(v, keep_nonzero=True)
        first, second = (Moment(*(t.to(DEVICE) for t in encode(x, c))) for c in (codec_m, codec_v))
        zero = torch.zeros(512, device=DEVICE)
        one_step(kernels, zero.clone(), zero, first, second, codec_m, codec_v, STILL, seed)
        for decoded in (decode(first, codec_m), decode(second, codec_v)):
            assert decoded[(x == 1.0).to(DEVICE)].min() > 0.9, (m, v, end, which)


def check_smallest_normals():
    """Codes that stand for subnormals decode to the smallest normal number; new subnormals are
    stored as zero.
    """
    codec_m, codec_v = MomentCodec(expand=False), MomentCodec(expand=False, keep_nonzero=True)
    q, k = (
        torch.arange(128, device=DEVICE).clamp(max=126)[None].byte(),
        torch.tensor([16], device=DEVICE).byte(),
    )
    v = Moment(q, torch.tensor([2 * TINY], device=DEVICE).bfloat16(), k)
    m, zero = codec_m.zeros(128, DEVICE), torch.zeros(128, device=DEVICE)
    one_step(kernels, zero.clone(), zero + 1.5e-19, m, v, codec_m, codec_v, NUMBERS)
    decoded = decode(v, codec_v)
    assert decoded[0] == 0 and (decoded[1:4] == decoded[4]).all() and (decoded[1:] >= TINY).all()

    codec = MomentCodec()
    grad = torch.tensor([1.0, 1e-38, 1.3e-37], device=DEVICE)
    m, v = codec.zeros(3, DEVICE), codec_v.zeros(3, DEVICE)
    one_step(kernels, grad.clone(), grad, m, v, codec, codec_v, NUMBERS)
    assert (decode(m, codec, 3) != 0).tolist() == [True, False, True]

    grad = torch.full((3,), 1e-38, device=DEVICE)
    m = codec.zeros(3, DEVICE)
    one_step(kernels, grad.clone(), grad, m, codec_v.zeros(3, DEVICE), codec, codec_v, NUMBERS)
    assert m.a == 0 and not m.q.any() and m.k == 255


ROWS = {
    "gradients that are not finite": (check_non_finite,),
    "moments that are not finite": (check_non_finite_moments,),
    "ends of the range": (check_extremes,),
    "int8 and log8 codes": (check_codes_survive,),
    "amaxes": (check_amaxes_stay, on_device(1, 127)),
    "largest codes": (check_largest_codes,),
    "smallest normal numbers": (check_smallest_normals,),
}
