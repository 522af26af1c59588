"""Numbers of tokens that vary compile nothing anew. What Triton would compile for is noted;
nothing is launched.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime import jit as runtime  # noqa: E402

from coat_dist.formats import E3M4, E4M3, INT8, QuantizedTensor  # noqa: E402
from coat_dist.kernels import activation, cross_entropy, launch, norm, quantize, rope  # noqa: E402
from coat_dist.reference.rope import HeadNorms, Heads, rope_table  # noqa: E402
from tests.support import run_ranks  # noqa: E402

if not triton.__version__.startswith(launch.COMPARED):
    pytest.skip(f"Triton {triton.__version__} was not compared", allow_module_level=True)

H, F, HEADS = 64, 96, Heads(groups=2, per_group=1, size=16)


@contextmanager
def compiled():
    """A set of (kernel, what Triton specializes on, constants and options) of all launches."""
    seen, binders = set(), {}

    def note(self, grid, *args, **kwargs):
        if self not in binders:
            backend = CUDABackend(GPUTarget("cuda", 90, 32))
            binders[self] = runtime.create_function_from_signature(
                self.jit.signature, self.jit.params, backend
            )
        _, specialization, options = binders[self](*args, **kwargs)
        seen.add((f"{self.jit.module}.{self.jit.__name__}", str(specialization), str(options)))

    with mock.patch.object(launch.FastLaunch, "_launch", note):
        yield seen


def run_all(tokens):
    """Every kernel of the flow, on this number of tokens."""
    x, dy, gain = (
        torch.randn(tokens, H).bfloat16(),
        torch.randn(tokens, H).bfloat16(),
        torch.ones(H),
    )
    scale = torch.ones(())
    for kind, bias in (("rmsnorm", None), ("layernorm", gain)):
        first = kind, 1e-5, gain, bias
        norm.norm_forward(x, *first)
        norm.norm_compress_rows(x, *first, E4M3, 32, "e8m0", True, E3M4)
        x8, stats, _ = norm.norm_compress(x, *first, E4M3, 32, "e8m0", True, E3M4)
        for source in (x, x8):
            for turn in (False, True):
                norm.norm_quantize(source, stats, gain, bias, E4M3, scale, turn)
            for residual in (None, x):
                norm.norm_backward(
                    dy, source, kind, stats, gain, bias=bias is not None, residual=residual
                )
    quantize.amax(x)
    quantize.quantize_rows(x, E4M3)
    quantize.quantize_both(x, E4M3, scale)
    quantize.quantize_tensor(x, E4M3, scale, transpose=True)
    quantize.transpose(QuantizedTensor(x.to(torch.float8_e4m3fn), scale, "tensor"))
    quantize.dequantize(quantize.quantize_groups(x, E3M4, 32, "e8m0"))
    pre, da = torch.randn(tokens, 2 * F).bfloat16(), torch.randn(tokens, F).bfloat16()
    activation.activation_compress_rows(pre, "swiglu", E4M3, 32, "e8m0", True, None, INT8)
    pre8, _ = activation.activation_compress(pre, "swiglu", E4M3, 32, "e8m0", True, None, INT8)
    activation.activation_quantize(pre, "swiglu", E4M3, scale)
    activation.activation_grad_amax(da, pre8, "swiglu")
    activation.activation_backward(da, pre8, "swiglu", E4M3, scale, E4M3, scale)
    table = rope_table(torch.randn(tokens, 1, 1, 16))
    mixed = torch.randn(tokens, 1, HEADS.width).bfloat16()
    for norms in (None, HeadNorms(torch.ones(2, 16), (1.0, 1.0))):
        heads = rope.split_rope(mixed, HEADS, table, norms)
        rope.split_rope_backward(*heads, HEADS, table, norms, mixed)
    labels = torch.zeros(tokens, dtype=torch.long)
    exponent, total, _ = cross_entropy.logit_stats(x, labels, 0)
    cross_entropy.logit_grad(x, labels, 0, exponent, total.float(), None, exponent)


def compare(rank, world, counts):
    with compiled() as seen:
        run_all(counts[0])
        first = set(seen)
        assert len({name for name, *_ in first}) >= 15, {name for name, *_ in first}
        for tokens in counts[1:]:
            run_all(tokens)
            assert seen == first, (tokens, sorted(name for name, *_ in seen - first))


@pytest.mark.parametrize(
    "counts", [(16, 272, 528, 4096, 4224), (20, 268, 1000, 4100), (7, 263, 265, 1001, 4227)]
)
def test_more_tokens_compile_nothing_anew(counts):
    """Multiples of 16, which Triton tells apart; multiples of 4, by which codes are transposed;
    others.

    On a rank, where kernels are not interpreted.
    """
    run_ranks(1, compare, counts)
