"""Rows of experts by blocks, and products of each expert's rows."""

import pytest
import torch

from coat_dist import ops
from coat_dist.ops import expert_rows
from coat_dist.reference.grouped import BLOCK


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


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(40, 2, 4), (1, 1, 1), (0, 2, 3)])
def test_route_sorts_choices_by_expert_and_drops_others(tokens, choices, experts):
    index = torch.randint(-1, experts + 1, (tokens, choices))
    rows = ops.route(index, experts)
    flat = index.flatten()
    sent = ((flat >= 0) & (flat < experts)).nonzero().flatten()
    assert (rows.place >= 0).nonzero().flatten().tolist() == sent.tolist()
    assert torch.equal(rows.source[rows.place[sent].long()].long(), sent)
    assert int((rows.source >= 0).sum()) == len(sent)
    owner = rows.blocks.repeat_interleave(BLOCK)[rows.place[sent].long()]
    assert torch.equal(owner.long(), flat[sent])
    for expert, at in rows.pieces():
        mine = rows.source[at]
        mine = mine[mine >= 0]
        assert torch.equal(mine, mine.sort().values) and (flat[mine.long()] == expert).all()
