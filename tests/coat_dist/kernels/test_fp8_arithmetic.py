"""FP8 conversion by integer arithmetic: the codes of the definition, and all of them back."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from coat_dist.formats import E4M3, E5M2  # noqa: E402
from coat_dist.kernels import fp8  # noqa: E402
from coat_dist.kernels.fp8 import code_bits, from_fp8  # noqa: E402
from tests.support.devices import CONVERTS_FP8, DEVICE, ON_GPU  # noqa: E402

BLOCK = 1 << 16
TYPES = [torch.uint8]
if CONVERTS_FP8:  # the interpreter reads FP8 types without NaN
    TYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


@triton.jit
def _encode(x, out, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, code_bits(tl.load(x + at), C).to(tl.uint8))


@triton.jit
def _decode(codes, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, from_fp8(tl.load(codes + at)))


def encode(x, fmt):
    """Codes of fp32 numbers, uint8."""
    filled = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).to(DEVICE)
    out = torch.empty(len(filled), dtype=torch.uint8, device=DEVICE)
    _encode[(len(filled) // BLOCK,)](
        filled, out, C=fp8._CONSTANTS[fmt.name, ON_GPU, False], BLOCK=BLOCK
    )
    return out[: len(x)].cpu()


def check(x, fmt):
    """The codes are the definition's; of NaN, whose sign torch keeps, they are 0x7F."""
    got, wanted = encode(x, fmt), x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    wanted = torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8), wanted)
    wrong = got != wanted
    assert not wrong.any(), list(
        zip(x[wrong].tolist(), got[wrong].tolist(), wanted[wrong].tolist(), strict=True)
    )[:5]


def neighbours(x):
    """Numbers and the two fp32 numbers next to each, of both signs."""
    near = [x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(-torch.inf))]
    return torch.cat([s * y for y in near for s in (1.0, -1.0)])


@both
def test_codes_at_every_boundary(fmt):
    """Each code's number, the middles between neighbours, and a unit in the last place to either
    side of both.
    """
    table = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    table = table[table.isfinite()].abs().unique()
    middles = (table[1:] + table[:-1]) / 2
    check(neighbours(torch.cat([table, middles])), fmt)


@both
def test_codes_at_the_ends_of_fp32(fmt):
    numbers = [
        0.0,
        2.0**-149,
        2.0**-126,
        2.0**-127,
        fmt.smallest / 2,
        1.0,
        fmt.max,
        fmt.max * 1.0625,
        3.4e38,
        2.0**127,
    ]
    check(neighbours(torch.tensor(numbers)), fmt)
    nan = torch.tensor(
        [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -1], dtype=torch.int32
    )
    check(torch.cat([torch.tensor([torch.inf, -torch.inf]), nan.view(torch.float32)]), fmt)


@both
def test_codes_of_random_bits(fmt):
    """Of any fp32 number, and of numbers of every exponent that the format knows."""
    anything = torch.randint(-(2**31), 2**31, (1 << 20,)).to(torch.int32).view(torch.float32)
    inside = torch.randn(1 << 19) * torch.exp2(torch.randint(-20, 18, (1 << 19,)).float())
    check(torch.cat([anything, inside]), fmt)


@pytest.mark.parametrize("typed", TYPES)
def test_every_code_is_read_exactly(typed):
    """Bytes, which kernels get on a GPU without FP8 types, are E4M3. All but NaN bit for bit,
    zeros' signs too.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, device=DEVICE)
    _decode[(1,)](codes.view(typed).to(DEVICE), out, BLOCK=256)
    fmt = torch.float8_e4m3fn if typed == torch.uint8 else typed
    wanted, out = codes.view(fmt).float(), out.cpu()
    assert torch.equal(out.isnan(), wanted.isnan())
    number = ~wanted.isnan()
    assert torch.equal(out.view(torch.int32)[number], wanted.view(torch.int32)[number])
