"""FP8 conversion by arithmetic against the GPU's instructions: the same bits, number by number and
kernel by kernel.

``COAT_FP8_ARITHMETIC=1`` has a GPU that has the instructions run what older GPUs run.
"""

import warnings

import pytest
import torch

from tests.support.devices import CONVERTS_FP8

if not CONVERTS_FP8:
    pytest.skip("needs a GPU that converts FP8", allow_module_level=True)

import triton
import triton.language as tl

from coat_dist import ops
from coat_dist.formats import E3M4, E4M3, E5M2, INT8, QuantizedTensor
from coat_dist.kernels import activation, adamw, fp8, norm, quantize
from coat_dist.kernels.fp8 import code_bits, to_fp8
from coat_dist.kernels.launch import forget
from coat_dist.reference.gemm import scaled_mm as definition
from tests.coat_dist.ops.adamw_problems import NUMBERS, VARIANTS, clone, extras, one_step, problem

both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
BLOCK = 1024


@pytest.fixture
def ways(monkeypatch):
    """Results of a call with instructions and by arithmetic."""

    def run(call):
        results = []
        for value in ("0", "1"):
            monkeypatch.setenv("COAT_FP8_ARITHMETIC", value)
            forget()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(call())
        return results

    yield run
    forget()


def flat(result):
    """All tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, QuantizedTensor):
        return [result.codes, result.scales]
    return (
        [t for one in result or () for t in flat(one)] if isinstance(result, (tuple, list)) else []
    )


def same(results):
    """Bit for bit; of NaN, codes and numbers have several."""
    first, second = map(flat, results)
    assert first and len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype.is_floating_point:
            nan = a.float().isnan()
            assert torch.equal(nan, b.float().isnan())
            a, b = (torch.where(nan, 0, t.contiguous().view(_words(t))) for t in (a, b))
        assert torch.equal(a, b)


def _words(t):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]


@triton.jit
def _encode(first, native, arithmetic, N: tl.constexpr, A: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = (first + at.to(tl.int64)).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(native + at, to_fp8(y, N).to(tl.uint8, bitcast=True))
    tl.store(arithmetic + at, code_bits(y, A).to(tl.uint8))


@both
def test_every_fp32_number_gets_the_code_of_the_instruction_and_of_torch(fmt):
    """All 2**32, NaN aside, of which instructions make 0x7F too but torch keeps the sign."""
    chunk = 1 << 27
    native, arithmetic = (torch.empty(chunk, dtype=torch.uint8, device="cuda") for _ in range(2))
    n, a = (fp8._CONSTANTS[fmt.name, True, value] for value in (True, False))
    for first in range(-(2**31), 2**31, chunk):
        _encode[(chunk // BLOCK,)](first, native, arithmetic, N=n, A=a, BLOCK=BLOCK)
        x = (torch.arange(chunk, device="cuda") + first).to(torch.int32).view(torch.float32)
        number = ~x.isnan()
        assert torch.equal(native[number], arithmetic[number]), first
        assert (arithmetic[~number] == 0x7F).all()
        wanted = x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
        assert torch.equal(arithmetic[number], wanted[number]), first


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_of_the_optimizer(ways, name):
    options = VARIANTS[name]
    start, numbers = problem(5000, "cuda", **options), options.get("numbers", NUMBERS)

    def step():
        tensors, more = clone(start), extras(5000, "cuda", **options)
        for _ in range(3):
            one_step(adamw, *tensors, numbers, options.get("seed"), **more)
        return [tensors[0], *tensors[2], *tensors[3], *more.values()]

    same(ways(step))


@both
@pytest.mark.parametrize("scale", ["e8m0", "bf16"])
@pytest.mark.parametrize("tokens", [256, 131])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("saved", [None, E3M4, INT8], ids=["as operands", "e3m4", "int8"])
def test_kernels_of_the_flow(ways, fmt, scale, tokens, exact, saved):
    """Every kernel that converts, on numbers of many magnitudes, with infinities and NaN in one
    row.
    """
    torch.manual_seed(0)
    x = (
        (torch.randn(tokens, 256) * torch.exp2(torch.randint(-12, 12, (tokens, 256)).float()))
        .bfloat16()
        .cuda()
    )
    x[3, 5], x[3, 70] = torch.inf, torch.nan
    dy, gain, bias = (
        torch.randn_like(x),
        torch.rand(256, device="cuda"),
        torch.rand(256, device="cuda"),
    )
    pre, da = (
        torch.randn(tokens, 2 * 384, device="cuda").bfloat16(),
        torch.randn(tokens, 384, device="cuda").bfloat16(),
    )
    factor = torch.tensor(0.01, device="cuda")

    def run():
        grouped = quantize.quantize_groups(x, saved or fmt, 32, scale)
        found = [
            grouped,
            quantize.dequantize(grouped),
            quantize.dequantize(grouped, torch.bfloat16),
        ]
        found += [quantize.quantize_rows(x, fmt), quantize.quantize_both(x, fmt, factor)]
        found += [quantize.quantize_tensor(x, fmt, factor, turn) for turn in (False, True)]
        for kind, more in (("rmsnorm", None), ("layernorm", bias)):
            settings = kind, 1e-5, gain, more, fmt, 32, scale, exact, saved
            x8, stats, top = norm.norm_compress(x, *settings)
            found += [x8, tuple(stats), top, norm.norm_compress_rows(x, *settings)]
            for source in (x, x8):
                found += [
                    norm.norm_quantize(source, stats, gain, more, fmt, factor, turn)
                    for turn in (False, True)
                ]
            found.append(norm.norm_backward(dy, x8, kind, stats, gain, bias=more is not None))
        for name in ("swiglu", "geglu"):
            settings = name, fmt, 32, scale, exact, None, saved
            pre8, top = activation.activation_compress(pre, *settings)
            found += [pre8, top, activation.activation_compress_rows(pre, *settings)]
            for turn in (False, True):
                found.append(activation.activation_quantize(pre, name, fmt, factor, turn))
                found.append(activation.activation_quantize(pre8, name, fmt, factor, turn))
            found.append(activation.activation_grad_amax(da, pre8, name))
            gradients = activation.activation_backward(da, pre8, name, fmt, factor, fmt, factor)
            found += [q for q in gradients if q is not None]
        return found

    same(ways(run))


@both
@pytest.mark.parametrize("layout", ["tensor", "row"])
@pytest.mark.parametrize("shape", [(48, 32, 256), (17, 33, 100), (0, 16, 16), (5, 7, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_small_integers_are_exact_without_fp8(monkeypatch, fmt, layout, shape, dtype):
    """Sums of which fp32 loses nothing are the definition's to the bit, of any size."""
    monkeypatch.setenv("COAT_FP8_ARITHMETIC", "1")
    m, n, k = shape

    def operand(rows):
        codes = torch.randint(-4, 5, (rows, k), device="cuda").float().to(fmt.dtype)
        scales = (
            torch.rand(rows, 1, device="cuda").log2().ceil().exp2()
            if layout == "row"
            else torch.tensor(0.5).cuda()
        )
        return QuantizedTensor(codes, scales, layout)

    a, b = operand(m), operand(n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ops.scaled_mm(a, b, dtype)
    assert got.dtype == dtype and torch.equal(got, definition(a, b, dtype))
