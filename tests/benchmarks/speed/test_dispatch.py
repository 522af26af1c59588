"""The benchmark of tokens on their way to experts, small and over gloo."""

import torch

from tests.support import run_ranks


def measured(rank, world):
    from benchmarks.speed.dispatch import measure

    return measure(8, 32, torch.device("cpu"), 1)


def test_fp8_halves_the_bytes():
    for found in run_ranks(2, measured):
        assert found["bf16"]["forward_bytes"] == found["bf16"]["backward_bytes"] == 8 * 64
        assert found["fp8"]["forward_bytes"] == found["fp8, gradients too"]["backward_bytes"] == 8 * 36
        assert all(one["forward_ms"] > 0 and one["backward_ms"] > 0 for one in found.values())
