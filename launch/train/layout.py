"""Continuing on other ranks: ``--load auto`` where another parallel layout saved the newest
checkpoint.

How a run's state lies on its ranks
    A rank of tensor parallelism has a slice of every matrix, one of a pipeline stage the layers of
    that stage, one of expert parallelism some of the experts. What such a rank has it shares with
    its data-parallel peers, and ZeRO divides it among them: stages 1 and 2 lay all parameters of an
    optimizer group one behind the other and give each peer an equal run of elements, whatever
    parameter they belong to; stage 3 gives each peer an equal part of every parameter. Master
    weights, moments and FP8 codes follow the same division, and an FP8 group is 128 consecutive
    elements of such a part. DeepSpeed writes one file of states for each rank, as it holds them.

Why another layout cannot load them
    With another number of ranks, ZeRO stage, tensor-parallel size or number of pipeline stages the
    parts begin elsewhere, so files of one layout are of no use to another. A universal checkpoint
    has whole tensors by the names that they have in the whole model, and a rank of any layout cuts
    its part out of them. Codes of groups that the new layout has as well keep their bytes; others
    are decoded and encoded again (``coat_dist/checkpoint/universal``).

What happens here
    A run that is started again with fewer or more ranks (torchrun after a node was lost, a queue
    that gave another number) is to go on without a person. ``checkpoint.of_another_layout`` finds
    whether only the layout differs; a checkpoint of another model is an error. Rank 0 then converts
    into the folder :data:`FOLDER` of ``--save``; the others wait, longer than a collective may
    take. The folder goes when the first checkpoint of the new layout is complete: until then a
    second start finds the same source again, and converts it again.

What stays as it was
    A step keeps its samples: :func:`keep_batch` makes micro-batch and accumulation follow the new
    number of data-parallel ranks. The schedule and the noise of FP8 moments go by steps, the order
    of the data by samples, so the loss goes on as if nothing had happened.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError, read_manifest
from coat_dist.ranks import alone, on_rank_0
from launch.common.log_level import say
from launch.common.settings import MICRO, STEPS, TOTAL
from launch.train import checkpoint
from launch.train.pretrain_options import PretrainOptions

FOLDER = ".converted"
"""In ``--save``; may be removed at any time."""


class KeptBatch(NamedTuple):
    """Batch sizes that are not those of the configuration."""

    line: str
    """For the log."""
    given: list[Any]
    """The three batch sizes of the configuration."""


def keep_batch(
    args: PretrainOptions, settings: dict[str, Any], dp: int, auto: bool
) -> KeptBatch | None:
    """Keep the samples of a step where ``--load auto`` continues a run of another number of
    data-parallel ranks, or of as many, if that run had kept its samples and has the same
    configuration; else None.

    ``settings`` get the three batch sizes: their train_batch_size, or the checkpoint's; their
    micro-batch, or the largest smaller one that divides the samples of a rank; and the accumulation
    that follows. With ``auto``, where the micro-batch is to be found, they get the samples of a
    step only.

    Raises:
        CoatConfigError: the ranks do not divide the samples of a step.
    """
    try:
        source = checkpoint.require_loadable("auto", args.save)
        run = {} if source is None else read_manifest(source)["run"]
    except CheckpointError:
        return None  # an error later
    saved, batch = run.get("parallel", {}).get("data"), run.get("batch", {})
    total, given = (
        settings.get(TOTAL) or batch.get("total"),
        [settings.get(key) for key in (MICRO, STEPS, TOTAL)],
    )
    again = saved == dp and batch.get("given") == given
    if saved is None or (saved == dp and not again) or type(total) is not int or total < 1:
        return None
    if total % dp:
        whose = (
            "the DeepSpeed file"
            if settings.get(TOTAL)
            else f"{source}, by {saved} data-parallel ranks"
        )
        raise CoatConfigError(
            f"{TOTAL}: got {total} (of {whose}) with {dp} data-parallel ranks, accepted: a number "
            "of data-parallel "
            f"ranks that divides it, or {TOTAL} in the DeepSpeed file as a multiple of {dp}"
        )
    settings[TOTAL], each, micro = total, total // dp, settings.get(MICRO) or batch.get("micro")
    if auto:
        settings.pop(STEPS, None)
        return KeptBatch(f"batch: {total} samples a step, as {source} has them", given)
    if type(micro) is not int or micro < 1:
        return None
    divisors = [m for m in range(min(micro, each), 0, -1) if each % m == 0]
    # The interleaved schedule takes multiples of it.
    stages = args.pipeline_parallel if args.virtual_stages > 1 else 1
    micro = next((m for m in divisors if each // m % stages == 0), divisors[0])
    settings[MICRO], settings[STEPS] = micro, each // micro
    before = f"as {source} has them" if again else f"as with {saved} data-parallel ranks; now {dp}"
    line = (
        f"batch: {total} samples a step, {before}, with micro-batches of {micro} and "
        f"{each // micro} of them a step"
    )
    return KeptBatch(line, given)


def fitting(source: Path, p: Any) -> Path:
    """The checkpoint to load where ``--load auto`` means ``source``: that one, or its conversion by
    rank 0, for which the others wait; collective.

    Args:
        p: the :class:`launch.train.plan.Plan` of this start.

    Raises:
        CheckpointError: on every rank; it cannot be converted, or there is no space for it.
    """
    return on_rank_0(
        lambda: _convert(source, checkpoint.of_another_layout(read_manifest(source), p.identity())),
        True,
    )


def _convert(source: Path, different: list[str]) -> Path:
    from launch.to_universal import convert

    forget(source.parent)
    if not different:
        return source
    say(f"converting {source}: {'; '.join(different)}")
    began = time.monotonic()
    with alone():
        made = convert(source, source.parent / FOLDER)
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    say(f"converted in {time.monotonic() - began:.1f} s: {made}, {size / 1e9:.2f} GB")
    return made


def forget(save: str | Path) -> None:
    """Remove conversions in the folder of checkpoints ``save``."""
    shutil.rmtree(Path(save, FOLDER), ignore_errors=True)
