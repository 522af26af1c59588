"""Norms: the definition's two passes against their parts. The whole is compared with torch in
``tests/coat_dist/flow/test_gradients.py``, kernels with the definition in ``agreement/norm.py``,
a residual's gradient with its sum in ``tests/coat_dist/flow/test_residual.py``.
"""

import pytest
import torch

from coat_dist.formats import E4M3
from coat_dist.reference.norm import (
    norm_apply,
    norm_backward,
    norm_compress,
    norm_stats,
)
from coat_dist.reference.quantize import (
    dequantize,
    quantize_groups,
)

from .agreement import compare

EPS = 1e-5


def inputs(h=72):
    # No row is nearly constant.
    x = torch.randn(4, 3, h) * (torch.rand(4, 3, 1) * 5 + 0.5) + torch.randn(4, 3, 1)
    return x, torch.rand(h) + 0.5, torch.randn(h)


def test_norm_stats_beside_other_rows():
    x = torch.randn(37, 72, dtype=torch.bfloat16)
    for kind in ("rmsnorm", "layernorm"):
        together = norm_stats(x, kind, EPS)
        alone = [norm_stats(row[None], kind, EPS) for row in x]
        for i, whole in enumerate(together):
            assert whole is None or torch.equal(whole, torch.cat([stats[i] for stats in alone]))


def test_norm_forward_of_zeros():
    stats = norm_stats(torch.zeros(2, 8), "rmsnorm", EPS)
    torch.testing.assert_close(stats.rstd, torch.full((2, 1), EPS**-0.5))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("exact", [True, False])
def test_norm_compress_is_its_parts(kind, exact):
    x, weight, bias = inputs()
    found = norm_compress(x, kind, EPS, weight, bias, E4M3, 32, "e8m0", exact)
    whole = norm_stats(x, kind, EPS)
    x8 = quantize_groups(x if whole.mean is None else x - whole.mean, E4M3, 32, "e8m0")
    source = x if exact else dequantize(x8)
    stats = whole if exact else norm_stats(source, "rmsnorm", EPS)
    compare(found.x8, x8)
    assert torch.equal(found.stats.rstd, stats.rstd)
    assert torch.equal(found.amax, norm_apply(source, stats, weight, bias).abs().max())
    assert exact == torch.equal(found.stats.rstd, whole.rstd)
    assert found.stats.mean is whole.mean is None or torch.equal(found.stats.mean, whole.mean)


def test_norm_backward_sums_in_fp64():
    x, weight, _ = inputs()
    dy = torch.randn_like(x)
    stats = norm_stats(x, "rmsnorm", EPS)
    whole = norm_backward(dy, x, "rmsnorm", stats, weight, torch.float64)
    halves = [
        norm_backward(
            dy[part], x[part], "rmsnorm", type(stats)(stats.rstd[part], None), weight, torch.float64
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    assert torch.equal(whole[0], torch.cat([h[0] for h in halves]))
    for i in (1, 2):
        assert whole[i].dtype == torch.float64
        assert torch.equal(whole[i].float(), (halves[0][i] + halves[1][i]).float())
