"""Fixtures of the tests of cached weights."""

import pytest

from coat_dist.flow import invalidate_weights, weights


@pytest.fixture
def empty_cache():
    invalidate_weights()
    yield
    invalidate_weights()


@pytest.fixture
def quantized(monkeypatch):
    """Shapes of the weights that were quantized for forward."""
    seen = []
    original = weights.quantize_input
    monkeypatch.setattr(
        weights,
        "quantize_input",
        lambda w, *rest: (seen.append(tuple(w.shape)), original(w, *rest))[1],
    )
    return seen
