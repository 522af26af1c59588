"""Rows of experts by blocks, and products of each expert's rows."""

import pytest
import torch

from coat_dist import ops
from coat_dist.formats import E4M3
from coat_dist.ops import BLOCK, expert_rows
from coat_dist.reference.quantize import quantize_rows


@pytest.mark.parametrize("counts", [[5, 0, 33, 32, 1], [0, 0, 0], [0, 40, 0], [7]])
def test_expert_rows_lie_by_blocks(counts):
    rows = expert_rows(torch.tensor(counts), sum(counts), torch.device("cpu"))
    total = rows.source.shape[0]
    assert total % BLOCK == 0 and total == rows.ends[-1] == max(
        BLOCK, sum(-(-n // BLOCK) * BLOCK for n in counts)
    )
    assert rows.known == tuple(rows.ends.tolist())
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    assert torch.equal(rows.source[rows.place.long()], torch.arange(sum(counts), dtype=torch.int32))
    assert int((rows.source >= 0).sum()) == sum(counts)
    assert torch.equal(rows.blocks.repeat_interleave(BLOCK)[rows.place.long()].long(), owner)
    for expert, at in rows.pieces():
        assert (
            at.start % BLOCK == 0
            and (rows.blocks[at.start // BLOCK : at.stop // BLOCK] == expert).all()
        )


@pytest.mark.parametrize("counts", [[1, 2], [4, -1]])
def test_expert_rows_refuse_misfits(counts):
    with pytest.raises(
        ValueError, match=r"tokens_per_expert: got \[.*\], accepted: numbers that add up to 4 rows"
    ):
        expert_rows(torch.tensor(counts), 4, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["row", "expert"])
def test_grouped_mm_is_the_product_of_each_expert(layout):
    counts, experts, k, n = [5, 0, 40], 3, 48, 16
    rows = expert_rows(torch.tensor(counts), sum(counts), torch.device("cpu"))
    x = ops.take_rows(torch.randn(sum(counts), k), rows.source)
    w = torch.randn(experts, n, k)
    if layout == "row":
        a, b = quantize_rows(x, E4M3), quantize_rows(w, E4M3)
        values, weights = a.codes.float() * a.scales, b.codes.float() * b.scales
    else:
        s, t = torch.rand(2, experts) + 0.1
        a, b = ops.quantize_experts(x, E4M3, s, rows), ops.quantize_experts(w, E4M3, t, None)
        of_rows = s[rows.blocks.long()].repeat_interleave(BLOCK)[:, None]
        values, weights = a.codes.float() * of_rows, b.codes.float() * t[:, None, None]
    y = ops.grouped_mm(a, b, rows, torch.float32)
    expected = torch.cat([values[at] @ weights[e].t() for e, at in rows.pieces()])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    if layout == "expert":
        d = torch.randn(x.shape[0], n)
        d8, d8_t = ops.quantize_experts_both(d, E4M3, t, rows)
        grad = ops.grouped_wgrad(ops.transpose(a), d8_t, rows, torch.float32)
        assert grad.shape == (experts, k, n) and not grad[1].any()
        of_rows = t[rows.blocks.long()].repeat_interleave(BLOCK)[:, None]
        for e, at in rows.pieces():
            wanted = values[at].t() @ (d8.codes.float() * of_rows)[at]
            torch.testing.assert_close(grad[e], wanted, rtol=1e-5, atol=1e-4)
