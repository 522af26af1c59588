"""Bare numbers read with another width than they were written with: which are told, and which are let through."""

from __future__ import annotations

import numpy as np
import pytest

from launch.prep import DataError
from launch.prep.widths import check_width

IDS = np.random.default_rng(0).integers(4, 50_000, 4000)
LARGE = np.random.default_rng(1).integers(70_000, 150_000, 4000)


def padded(ids, share, value=0):
    """Some ids of padding, in places drawn at random."""
    out = ids.copy()
    out[np.random.default_rng(2).random(len(ids)) < share] = value
    return out


@pytest.mark.parametrize("ids", [IDS, LARGE, padded(IDS, 0.95), padded(LARGE, 0.5, 1), IDS[:20]])
@pytest.mark.parametrize("written, read", [("int64", "uint16"), ("int64", "uint32"), ("uint32", "uint16")])
def test_wider_numbers_are_told(ids, written, read):
    name = "int64" if written == "int64" else "uint32"
    with pytest.raises(DataError, match=f"^a.npy: .* when it is read as {read}: it looks like {name}, accepted: "):
        check_width(ids.astype(written).view(read), "a.npy")


@pytest.mark.parametrize(
    "tokens",
    [
        *(padded(IDS, share, value).astype(d) for share in (0.0, 0.9, 0.999) for value in (0, 1) for d in ("u2", "u4")),
        LARGE.astype("u4"),
        np.array([50, *[1] * 19], "u2"),  # one id, then padding
        np.array([7, 0, 8, 0, 9, *[0] * 35], "u2"),
        np.stack([IDS, IDS % 4], 1).reshape(-1).astype("u4"),  # each with a class of its own
        np.arange(12, dtype="u2"),
        np.zeros(1000, "u4"),
        np.empty(0, "u2"),
    ],
)
def test_others_are_let_through(tokens):
    check_width(tokens, "a.npy")
