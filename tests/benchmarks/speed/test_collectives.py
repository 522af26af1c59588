"""Collectives of a layer, counted exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.speed import collectives
from benchmarks.speed.collectives import recorded
from coat_dist.flow import TensorParallel
from megatron_patches import initialize_model_parallel
from tests.support import run_ranks

H, ROWS = 64, 64
SMALL = [f"hidden_size={H}", "ffn_hidden_size=192", "num_attention_heads=4", "num_query_groups=2"]


def measured(rank, world):
    initialize_model_parallel(world)
    variants = ["coat", "coat over NCCL", "coat tensor scales"]
    found = collectives.measure("llama2-7b", ROWS, ROWS // 2, variants, 2, SMALL)
    with recorded() as seen:
        tp = TensorParallel(dist.group.WORLD)
        tp.max_(torch.ones(3))
        tp.sum(torch.ones(5))
        dist.all_reduce(torch.ones(7), op=dist.ReduceOp.MAX)
    with recorded() as nothing:
        TensorParallel().sum(torch.ones(5))
    return found, [tuple(c) for c in seen], list(nothing)


def test_collectives_of_a_layer() -> None:
    bf16, codes, scales = ROWS * H * 2, ROWS * H, ROWS * 4
    scattered = {"bytes": bf16, "kind": "reduce-scatter", "dtype": "bfloat16", "count": 2}
    amaxes = {"bytes": 4, "kind": "max", "dtype": "float32", "count": 2}

    def gathered(nbytes, dtype, count):
        return {"bytes": nbytes, "kind": "gather", "dtype": dtype, "count": count}

    for found, seen, nothing in run_ranks(2, measured):
        base, ours, tensor = found["bf16"], found["coat"], found["coat tensor scales"]
        assert base["forward"] == [gathered(bf16, "bfloat16", 2), scattered]
        assert base["backward"] == [gathered(bf16, "bfloat16", 4), scattered]
        # Row scales travel with their codes, and no amax does; one of each gathered gradient.
        assert ours["forward"] == [scattered, gathered(codes + scales, "uint8", 2)]
        assert ours["backward"] == [scattered, gathered(codes, "uint8", 4), amaxes]
        assert ours == found["coat over NCCL"]
        # With scales of tensors one amax of each forward input, and the same backward.
        assert tensor["forward"] == [scattered, gathered(codes, "uint8", 2), amaxes]
        assert tensor["backward"] == ours["backward"]
        # Half of BF16's bytes, and scales.
        assert base["gathered_bytes"] == 6 * bf16
        assert ours["gathered_bytes"] == 3 * bf16 + 2 * scales
        assert (base["calls"], ours["calls"], tensor["calls"]) == (10, 12, 14)
        assert seen == [("max", 12, "float32"), ("sum", 20, "float32"), ("max", 28, "float32")]
        assert nothing == []
