"""Windows over documents, batches, and losses of padded rows."""

import math

import numpy as np
import pytest
import torch

from launch.evaluation.report import estimate
from launch.evaluation.rows import Row, batches, digest, score, score_batch, sliding_windows


def of_the_recipe(length, window, stride):
    """Positions scored and the first position of their context, written as transformers' page
    does it.
    """
    found, previous = {}, 0
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        labels = [None] * (end - begin)
        for i in range(end - previous):
            labels[-1 - i] = True
        for position in range(1, end - begin):  # the shift of labels drops the first
            if labels[position]:
                assert begin + position not in found
                found[begin + position] = begin
        previous = end
        if end == length:
            break
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(
    ("window", "stride"), [(8, 4), (8, 8), (8, 1), (8, 7), (2, 1), (2, 2), (5, 3)]
)
def test_windows_score_what_the_recipe_scores_with_the_same_context(length, window, stride):
    found = {}
    for begin, end, scored in sliding_windows(length, window, stride):
        assert scored >= 1 and end - begin <= window
        for position in range(end - scored, end):
            assert position not in found, "scored twice"
            found[position] = begin
    assert found == of_the_recipe(length, window, stride)
    if stride < window:
        assert sorted(found) == list(range(1, length))


def test_batches_are_longest_first_and_hold_every_row_once():
    rows = [Row(np.arange(n), 1) for n in (3, 9, 2, 9, 5)]
    assert batches(rows, 2) == [[1, 3], [4, 0], [2]]


def test_a_digest_is_of_ids_and_of_what_is_scored():
    row = Row(np.asarray([1, 2, 3], np.int32), 2)
    assert digest([row]) == digest([Row(np.asarray([1, 2, 3], np.int64), 2)])
    others = ([Row(row.ids, 1)], [row, row], [Row(np.asarray([1, 2, 4], np.int32), 2)])
    assert len({digest([row]), *map(digest, others)}) == 4


def pretended(tokens, labels):
    """A loss that tells which token it is for, and what was read before it."""
    return tokens.float() * 1000 + labels.float()


def test_losses_are_those_of_the_last_tokens_of_a_row_and_padding_has_none():
    rows = [Row(np.asarray([5, 6, 7, 8]), 2), Row(np.asarray([1, 2]), 1)]
    found = score_batch(pretended, rows)
    assert [one.tolist() for one in found] == [[6007.0, 7008.0], [1002.0]]
    assert found[0].dtype == torch.float64


def test_sums_come_in_the_order_of_the_rows_whatever_the_batches_are():
    rows = [Row(np.arange(n, n + 3 + n % 4), 1 + n % 2) for n in range(11)]
    expected = [
        sum(1000.0 * a + b for a, b in list(zip(r.ids, r.ids[1:], strict=False))[-r.scored :])
        for r in rows
    ]
    for size in (1, 3, 64):
        assert score(pretended, rows, size, "rows") == expected


def test_standard_errors():
    assert estimate([1.0]) == (1.0, None)
    ones = [1, 0, 0, 1, 1]
    assert estimate(ones) == pytest.approx((0.6, np.std(ones, ddof=1) / math.sqrt(5)))
    sums, counts = [3.0, 8.0, 1.0], [2, 4, 2]
    residuals = np.asarray(sums) - 1.5 * np.asarray(counts)
    assert estimate(sums, counts) == pytest.approx(
        (1.5, math.sqrt(3 / 2 * (residuals**2).sum()) / 8)
    )
