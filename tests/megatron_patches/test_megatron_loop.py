"""A patched model under Megatron's own training loop, on the CPU; the same on GPUs is in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from . import megatron_loop


@pytest.mark.long  # twenty seconds
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it without stand-ins")
def test_distributed_data_parallel_and_distributed_optimizer():
    megatron_loop.check(*(megatron_loop.losses(patch, "cpu") for patch in (False, True)))
