"""Products of row scales on a GPU, against their definition."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs compute capability 8.9: FP8 conversion", allow_module_level=True)

from coat_dist.formats import E4M3, E5M2, QuantizedTensor
from coat_dist.ops import scaled_mm
from coat_dist.reference import gemm as reference_gemm
from coat_dist.reference.quantize import quantize_rows


@pytest.mark.parametrize("a_fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("b_fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 512), (48, 64, 4096), (17, 33, 100), (1, 16, 16), (5, 7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_row_scales_against_the_definition(a_fmt, b_fmt, m, n, k, dtype):
    """Rows of very different magnitudes; each element's error is measured by its own row's and column's scale."""
    a, b = (
        quantize_rows(torch.randn(rows, k) * torch.exp2(torch.randint(-20, 20, (rows, 1)).float()), f)
        for rows, f in ((m, a_fmt), (n, b_fmt))
    )
    expected = reference_gemm.scaled_mm(a, b, torch.float32)
    typical = reference_gemm.code_products(a, b).square().mean().sqrt().float() * a.scales * b.scales.t()
    for fast_accum in (False, True):
        got = scaled_mm(*(QuantizedTensor(q.codes.cuda(), q.scales.cuda(), "row") for q in (a, b)), dtype, fast_accum)
        assert got.dtype == dtype and got.shape == (m, n) and got.is_contiguous()
        # The same bounds as for one scale a tensor, in test_flow.py.
        rounding = 2.0**-8 * expected.abs() if dtype == torch.bfloat16 else 0.0
        error = (got.cpu().float() - expected).abs()
        assert (error <= rounding + (0.05 if fast_accum else 0.003) * typical).all(), (error / typical).max()


def test_products_of_a_bad_row_and_of_no_rows():
    a, b = torch.randn(6, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    a[4, 9] = torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        got = scaled_mm(quantize_rows(a, E4M3), quantize_rows(b, E4M3), dtype)
        assert got[4].isnan().all() and got[[0, 1, 2, 3, 5]].isfinite().all()
        assert scaled_mm(quantize_rows(a[:0], E4M3), quantize_rows(b, E4M3), dtype).shape == (0, 32)
    with pytest.raises(ValueError, match="b: got layout 'tensor', accepted: 'row', as a has"):
        one = quantize_rows(b, E4M3)
        scaled_mm(quantize_rows(a, E4M3), QuantizedTensor(one.codes, one.scales[0, 0], "tensor"), torch.bfloat16)
