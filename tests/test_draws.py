"""A comparison that a tie may decide otherwise is tried on two draws; an error fails on both."""

import pytest
import torch

from tests.support.draws import ties_may_differ


@pytest.mark.parametrize(("bad", "runs"), [(0, 1), (1, 2)])
def test_one_bad_draw_is_a_warning(bad, runs, recwarn):
    draws = []

    @ties_may_differ
    def test(size):
        draws.append(torch.rand(size))
        assert len(draws) > bad, "a tie"

    test(size=3)
    assert len(draws) == runs
    assert ["a tie" in str(w.message) for w in recwarn] == [True] * bad
    assert runs == 1 or not torch.equal(*draws)


def test_two_bad_draws_fail():
    @ties_may_differ
    def test(size):
        assert size < 3

    with pytest.warns(UserWarning, match="drawn again"), pytest.raises(AssertionError):
        test(3)
