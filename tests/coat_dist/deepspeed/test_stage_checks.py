"""Which noise the copies of a tied embedding draw on two stages. (Of steps:
test_pipeline_engine.py of Megatron.)
"""

import types

import pytest
import torch
import torch.distributed as dist

from coat_dist.deepspeed.parallel.pipeline import check_noise_of_tied
from tests.support import run_ranks


def stage(groups):
    """An engine with these groups: for each, whether it is the tied embedding's, and its
    options.
    """
    held, options = [], []
    for tied, given in groups:
        p = torch.nn.Parameter(torch.ones(2, 2))
        p.shared_embedding = tied
        held.append([p])
        options.append({"moments": "fp8", "stochastic_rounding": "auto", **given})
    zero = types.SimpleNamespace(
        bit16_groups=held, optimizer=types.SimpleNamespace(param_groups=options)
    )
    mpu = types.SimpleNamespace(get_pipeline_model_parallel_group=lambda: dist.group.WORLD)
    return types.SimpleNamespace(optimizer=zero, mpu=mpu)


LAYERS, VECTORS, TIED = (False, {}), (False, {"moments": "fp32"}), (True, {})
NEAREST, WIDE = (True, {"stochastic_rounding": False}), (True, {"moments": "fp32"})
STAGES = {
    "alike": ([LAYERS, TIED, VECTORS], [LAYERS, TIED]),
    "vectors first": ([LAYERS, TIED], [VECTORS, LAYERS, TIED]),
    "nearest": ([(False, NEAREST[1]), NEAREST], [NEAREST]),
    "fp32": ([LAYERS, WIDE], [WIDE]),
    "none": ([LAYERS], [VECTORS]),
}


def checked(rank, world):
    for groups in STAGES.values():
        check_noise_of_tied(stage(groups[rank]))
    with pytest.raises(
        ValueError, match=r"than on the last \[0, 1\], so that its copies would draw other noise"
    ):
        check_noise_of_tied(stage(([LAYERS, TIED], [TIED])[rank]))


def test_check_noise_of_tied_refuses_other_noise():
    run_ranks(2, checked)
