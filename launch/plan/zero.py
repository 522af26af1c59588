"""What DeepSpeed's ZeRO optimizers and our optimizer keep on a rank, and what they take for a
moment.

From `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `bf16_optimizer.py` of DeepSpeed
0.19.8, and from `coat_dist/optim/state.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from coat_dist.optim.host import CHUNK

from .run import Parameter, Run, parameters

__all__ = ["BUCKET", "GROUPS", "States", "local_elements", "states"]

# Matrices decay and may have 8-bit moments, vectors have neither (coat_dist.param_groups).
GROUPS = (True, False)
_PERSISTENT = 100_000
_SUB_GROUP = 1_000_000_000
BUCKET = 500_000_000  # elements, unless reduce_bucket_size says otherwise
_LIVE = 1_000_000_000
_PREFETCH = 50_000_000


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
    bucket_bytes: int  # of all buckets that exist at a time
    gathered: int  # ZeRO-3: weights that are whole between their uses
    sub_group: int  # ZeRO-3: elements that are stepped at a time
    full_gradients: int  # ZeRO-1: bytes of all bfloat16 gradients, before they are reduced


def states(run: Run) -> States:
    """What ZeRO's stages make of a run's parameters."""
    found = parameters(run)
    groups = [[p for p in found if p.matrix is matrix] for matrix in GROUPS]
    elements, bucket = sum(p.numel for p in found), int(run.zero("reduce_bucket_size", BUCKET))
    gradient, buckets = (
        4 if run.fp32_gradients else 2,
        1 if run.stage == 3 or not run.overlap else 2,
    )
    if run.stage == 3:
        shards = [sum(ceil(p.numel / run.dp) for p in group) for group in groups]
        threshold = int(run.zero("param_persistence_threshold", _PERSISTENT))
        persistent = sum(p.numel for p in found if p.numel < threshold) if run.dp > 1 else 0
        live = int(run.zero("max_live_parameters", _LIVE)) + int(
            run.zero("prefetch_bucket_size", _PREFETCH)
        )
        size = int(run.zero("sub_group_size", _SUB_GROUP))
        weights, gradients = 2 * sum(shards) + 2 * persistent, gradient * sum(shards)
        gathered = 2 * min(elements, live) if run.dp > 1 else 0
        sub_group = max(_sub_groups(group, run.dp, size) for group in groups if group)
        largest = max(ceil(p.numel / run.dp) for p in found)
    else:
        shards = [_padded_shard(group, run.dp) for group in groups]
        weights, gathered, sub_group = 2 * run.dp * sum(shards), 0, sum(shards)
        largest = max(min(p.numel, shards[not p.matrix]) for p in found)
        if run.fp32_gradients_whole:
            gradients = 4 * run.dp * sum(shards)
        else:  # of parameters that two ranks share, each has the whole gradient in BF16
            gradients = 4 * sum(shards) if run.fp32_gradients else 2 * _most_whole(groups, shards)
    shard = sum(shards)
    low = [ceil(n / run.group_size) * 2 * run.group_size * run.remainder for n in shards]
    moments = [_moments(run, n, matrix) for n, matrix in zip(shards, GROUPS, strict=True)]
    hosted = (low[0] + moments[0]) * run.hosted  # of matrices, the first group
    if hosted:
        low[0], moments[0] = 0, 3 * (_moments(run, CHUNK, True) + 2 * CHUNK * run.remainder)
    return States(
        elements=elements,
        weights=weights,
        master=sum(low) if run.remainder else 4 * shard,
        moments=sum(moments),
        hosted=hosted,
        gradients=gradients,
        shard=shard,
        largest=largest,
        bucket=bucket,
        bucket_bytes=2 * bucket * buckets if run.zero("contiguous_gradients", True) else 0,
        gathered=gathered,
        sub_group=sub_group,
        full_gradients=2 * elements if run.stage == 1 else 0,
    )


def _padded_shard(group: list[Parameter], dp: int) -> int:
    """Elements of a rank's shard of a group under ZeRO-1 and 2."""
    return ceil(sum(p.numel for p in group) / (2 * dp)) * 2


def _most_whole(groups: list[list[Parameter]], shards: list[int]) -> int:
    """Elements of all parameters of which a rank holds a part, of the rank where they are most."""
    more = Counter[int]()  # than on the rank before, by rank where it changes
    for group, size in zip(groups, shards, strict=True):
        begin = 0
        for p in group:
            more[begin // size] += p.numel
            begin += p.numel
            more[(begin - 1) // size + 1] -= p.numel
    return max(accumulate((more[rank] for rank in sorted(more)), initial=0))


def local_elements(run: Run, rank: int) -> dict[str, int]:
    """Elements of each parameter that ZeRO-1 and 2 give to a rank, which holds one stretch of
    each group.
    """
    found: dict[str, int] = {}
    for matrix in GROUPS:
        group = [p for p in parameters(run) if p.matrix is matrix]
        size, begin = _padded_shard(group, run.dp), 0
        for p in group:
            found[p.name] = max(
                0, min(begin + p.numel, (rank + 1) * size) - max(begin, rank * size)
            )
            begin += p.numel
    return found


def _moments(run: Run, elements: int, matrices: bool) -> int:
    if not run.fp8_moments or not matrices:
        return 8 * elements
    # Codes, a bf16 amax, an exponent.
    return 2 * ceil(elements / run.group_size) * (run.group_size + 3)


def _sub_groups(group: list[Parameter], dp: int, size: int) -> int:
    """Elements of the largest sub-group, which is closed by the parameter that makes it large
    enough.
    """
    largest = now = 0
    for p in group:
        now += ceil(p.numel / dp)
        largest = max(largest, now)
        now = 0 if now >= size else now
    return largest
