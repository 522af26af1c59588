"""Weights in shards, with the kernels and NCCL: codes of shards are those of the whole weight,
to the bit.
"""

import torch

from tests.coat_dist.flow.test_gathered import SHAPES, check_gathered
from tests.support import run_ranks
from tests.support.devices import two_gpus


def _on_gpus(rank, world):
    torch.set_default_device("cuda")
    # More tiles than a kernel's grid has in one direction of a single row.
    SHAPES.append((20_000, 4096))
    check_gathered(rank, world)


@two_gpus
def test_codes_of_shards_are_those_of_the_whole_weight():
    run_ranks(2, _on_gpus, backend="nccl")
