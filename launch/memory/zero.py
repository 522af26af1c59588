"""What DeepSpeed's ZeRO optimizers and our optimizer keep on a rank.

From `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `bf16_optimizer.py` of DeepSpeed
0.19.8, and from `coat_dist/optim/state.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil

from coat_dist.config import OptimizerConfig
from coat_dist.optim.host import CHUNK

from .run import Run, parameters

# Elements by DeepSpeed's defaults.
BUCKET, _SUB_GROUP = 500_000_000, 10**9
_LIVE = 10**9 + 50_000_000  # and prefetched


@dataclass(frozen=True)
class States:
    """Bytes of one rank, unless another unit is named."""

    elements: int  # parameters of the rank before ZeRO shards them
    weights: int
    master: int
    moments: int  # with states in host memory, the buffers through which they travel
    hosted: int  # of states in host memory
    gradients: int  # what waits for the step after the last backward
    shard: int  # elements that this rank updates, padding included
    largest: int  # elements of the largest gradient whose norm this rank takes
    bucket: int  # elements of a bucket
    gathered: int  # ZeRO-3: weights that are whole between their uses
    sub_group: int  # elements that are stepped at a time, at most
    last: dict[str, int]  # ZeRO-1 and 2: elements of each parameter that the last rank owns


def states(run: Run) -> States:
    """What ZeRO's stages make of a run's parameters.

    Matrices and vectors are two groups: vectors neither decay nor have 8-bit moments
    (``coat_dist.param_groups``).
    """
    found = parameters(run)
    groups = [[p for p in found if p.matrix is matrix] for matrix in (True, False)]
    elements, largest = sum(p.numel for p in found), max(p.numel for p in found)
    # Of parameters that two ranks share, each has the whole gradient while it is in BF16.
    whole, last = Counter[int](), dict[str, int]()
    gathered = sub_group = 0
    if run.stage == 3:
        shards = [sum(ceil(p.numel / run.dp) for p in group) for group in groups]
        weights, now = 2 * sum(shards), 0
        if run.dp > 1:
            persistent = run.zero("stage3_param_persistence_threshold", 100_000)
            weights += 2 * sum(p.numel for p in found if p.numel < persistent)
            gathered = 2 * min(elements, _LIVE)
        for p in groups[0]:  # a sub-group is closed by the parameter that makes it large enough
            now += ceil(p.numel / run.dp)
            sub_group, now = max(sub_group, now), now * (now < _SUB_GROUP)
        largest = ceil(largest / run.dp)
    else:
        shards = [2 * ceil(sum(p.numel for p in group) / (2 * run.dp)) for group in groups]
        for group, size in zip(groups, shards, strict=True):
            end = 0
            for p in group:
                begin, end = end, end + p.numel
                for rank in range(begin // size, (end - 1) // size + 1):
                    whole[rank] += p.numel
                last[p.name] = max(0, end - max(begin, (run.dp - 1) * size))
        weights, sub_group = 2 * run.dp * sum(shards), sum(shards)
        largest = min(largest, shards[0])
    shard = sum(shards)
    if run.fp32_gradients:
        gradients = 4 * shard * (run.dp if run.fp32_gradients_whole else 1)
    else:
        gradients = 2 * (shard if run.stage == 3 else max(whole.values()))
    (low, moments), (low_vectors, moments_vectors) = (
        _kept(run, shards[0], run.fp8_moments),
        _kept(run, shards[1], False),
    )
    hosted = run.hosted * (low + moments)
    if hosted:  # three chunks travel at a time
        low, moments = 0, 3 * sum(_kept(run, CHUNK, True))
    return States(
        elements=elements,
        weights=weights,
        master=low + low_vectors if run.remainder else 4 * shard,
        moments=moments + moments_vectors,
        hosted=hosted,
        gradients=gradients,
        shard=shard,
        largest=largest,
        bucket=run.zero("reduce_bucket_size", BUCKET),
        gathered=gathered,
        sub_group=sub_group,
        last=last,
    )


def _kept(run: Run, elements: int, codes: bool) -> tuple[int, int]:
    """Bytes of remainders, and of both moments: codes, a bf16 amax, an exponent; or fp32."""
    block = OptimizerConfig() if run.coat is None else run.coat.optimizer
    group = run.get("optimizer.params.group_size") or block.group_size
    groups = ceil(elements / group)
    return 2 * group * groups * run.remainder, 2 * groups * (group + 3) if codes else 8 * elements
