"""Answers: whether a run fits, the largest micro-batch that does, and which settings would save
how much.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from coat_dist import CoatConfig
from coat_dist.config import OptimizerConfig, look_up

from .gpus import GPU
from .recompute import recompute_without_flow
from .run import Run
from .timeline import Peak, simulate
from .zero import BUCKET

__all__ = ["MARGIN", "candidates", "fits", "largest_micro_batch", "need", "savings", "with_block"]
__all__ += ["with_largest_micro_batch", "without_block"]

MARGIN = 0.02
"""Part of what the allocator reserves that is added before a run is said to fit: pages that are
half used.
"""
_ALONE, _TOGETHER = int(2.2 * 2**30), int(3.2 * 2**30)
"""What a rank takes that is not torch's, where nothing better is known. 2.05 GiB were seen on each
of two H200s: the CUDA context 0.51, the first process group 0.91, building the engine 0.48, later
0.15. With several ranks a GiB more, an allowance for communicators of more groups and peers.
"""
_MOST = 2**20
_REMAINDER = (
    'master_weights "bf16_remainder" with gradients in bf16, as in zero2-remainder '
    "(docs/optimizer.md)"
)


class Need(NamedTuple):
    """Bytes of one GPU that a run takes."""

    peak: Peak
    not_torchs: int
    margin: int

    @property
    def total(self) -> int:
        """Memory with which the run is predicted to fit."""
        return self.peak.reserved + self.not_torchs + self.margin


class Saving(NamedTuple):
    """A change of settings and the bytes that the peak is smaller by."""

    what: str
    bytes: int


def need(run: Run, gpu: GPU | None = None) -> Need:
    """What the rank that needs most takes; on ``gpu``, of which more may be known."""
    peak = simulate(run)
    peak = replace(peak, reserved=max(peak.reserved, peak.other_peaks["building the engine"]))
    other = _ALONE if run.dp * run.tp == 1 else _TOGETHER
    if gpu is not None:
        other = other + gpu.in_use if gpu.other is None else gpu.other
    return Need(peak, other, int(MARGIN * peak.reserved))


def fits(run: Run, gpu: GPU) -> bool:
    """Whether the GPU's memory is enough."""
    return need(run, gpu).total <= gpu.memory


def largest_micro_batch(run: Run, gpu: GPU) -> int:
    """The largest micro-batch that fits; 0 where not even one sample does."""
    low, high = 0, 1
    while high <= _MOST and fits(run.but(micro=high), gpu):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(run.but(micro=middle), gpu) else (low, middle)
    return low


def candidates(
    run: Run, gpu: GPU, total: int | None, accumulation: int | None = None
) -> Iterator[Run]:
    """Runs that fit, the largest micro-batch first.

    Args:
        total: samples of a step on all ranks (``train_batch_size``), or None. With it the
            micro-batch is a divisor of each rank's samples, and accumulation follows.
        accumulation: ``gradient_accumulation_steps`` where it is given.
    """
    for micro in range(largest_micro_batch(run, gpu), 0, -1):
        passes, rest = (accumulation or 1, 0) if total is None else divmod(total, micro * run.dp)
        found = run.but(micro=micro, accumulation=passes)
        if not rest and passes == (accumulation or passes) and fits(found, gpu):
            yield found


def with_largest_micro_batch(run: Run, gpu: GPU) -> Run:
    """The first of :func:`candidates` for the run's configuration; where nothing fits, the run
    with micro-batch 1.
    """
    from launch.train.settings import STEPS, TOTAL, batch_sizes

    # The micro-batch is 1 in settings in which it is to be found.
    smallest = batch_sizes(run.settings, run.dp)
    run = run.but(micro=smallest.micro, accumulation=smallest.accumulation)
    return next(candidates(run, gpu, run.settings.get(TOTAL), run.settings.get(STEPS)), run)


def with_block(run: Run) -> Run:
    """The run with FP8 moments and the FP8 flow, by its own block as far as it has one."""
    if run.flow is not None and run.fp8_moments:
        return run
    settings = copy.deepcopy(dict(run.settings))
    if not run.fp8_moments:
        settings["optimizer"] = {"type": "CoatAdamW", "params": _shared_params(run)}
        _drop_bf16_states(settings)
    block = settings.setdefault("coat", {})
    if run.coat is not None:
        block["activation"] = {**(block.get("activation") or {}), "enabled": True}
    return run.but(settings=settings, coat=CoatConfig.parse(block))


def _shared_params(run: Run) -> dict[str, Any]:
    """Options that torch's AdamW and ours have in common."""
    given = look_up(run.settings, "optimizer.params") or {}
    return {key: given[key] for key in ("lr", "betas", "eps", "weight_decay") if key in given}


# Keys of DeepSpeed's "bf16" block: with AdamW they mean something else than beside our remainders.
_BF16_STATES = "bf16_master_weights_and_grads", "bf16_optimizer_states"


def _drop_bf16_states(settings: dict[str, Any]) -> None:
    for key in _BF16_STATES:
        settings.get("bf16", {}).pop(key, None)


def without_block(run: Run) -> Run:
    """The run in plain BF16 with torch's AdamW."""
    settings = copy.deepcopy({key: value for key, value in run.settings.items() if key != "coat"})
    settings["optimizer"] = {
        **settings.get("optimizer", {}),
        "type": "AdamW",
        "params": _shared_params(run),
    }
    settings.get("zero_optimization", {}).pop("offload_optimizer", None)
    _drop_bf16_states(settings)
    found = run.but(settings=settings, coat=None)
    return found.but(recompute=recompute_without_flow(run.recompute, run.model))


def _with(run: Run, block: str, **changes: object) -> Run:
    return run.but(settings={**run.settings, block: {**(run.settings.get(block) or {}), **changes}})


def _with_activation(run: Run, **changes: object) -> Run:
    assert run.coat is not None
    activation = run.coat.activation.model_copy(update=changes)
    return run.but(coat=run.coat.model_copy(update={"activation": activation}))


def _with_remainder(run: Run) -> Run:
    found = _with(run, "bf16", bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    params = {
        **(look_up(run.settings, "optimizer.params") or {}),
        "master_weights": "bf16_remainder",
    }
    return _with(found, "optimizer", params=params)


def _changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Settings that may save memory, as they are written in a configuration or on a command line,
    and the changed run.

    A change keeps the samples of a step, and is accepted by
    ``coat_dist/deepspeed/config/table.py``.
    """
    flow = run.flow
    given = [f"bf16.{key}" for key in _BF16_STATES if look_up(run.settings, f"bf16.{key}")]
    optimizer = '"type": "CoatAdamW"' + (f" and without {' and '.join(given)}" if given else "")
    if flow is None:
        block = 'the "coat" block' if run.coat is None else "coat.activation.enabled true"
        yield block + ("" if run.fp8_moments else f" with {optimizer}"), with_block(run)
    elif not run.fp8_moments:
        yield optimizer, with_block(run)
    if run.fp8_moments and not run.remainder:
        # Options of the optimizer are in one of two places; all have to be in the same.
        params = look_up(run.settings, "optimizer.params") or {}
        in_params = run.coat is None or not params.keys().isdisjoint(OptimizerConfig.model_fields)
        yield (
            f"{'optimizer.params' if in_params else 'coat.optimizer'}.{_REMAINDER}",
            _with(_with_remainder(run), "data_types", grad_accum_dtype=None),
        )
    if run.fp8_moments and not run.hosted and not run.fp32_gradients_whole:
        exact = run if run.remainder else _with_remainder(run)  # the key switches remainders on
        hosted = _with(
            exact, "zero_optimization", offload_optimizer={"device": "cpu", "pin_memory": True}
        )
        yield 'zero_optimization.offload_optimizer.device "cpu"', hosted
    if run.micro > 1:
        samples = run.micro * run.accumulation
        half = max(n for n in range(1, run.micro // 2 + 1) if samples % n == 0)
        yield (
            f"train_micro_batch_size_per_gpu {half} with gradient_accumulation_steps "
            f"{samples // half}",
            run.but(micro=half, accumulation=samples // half),
        )
    if run.recompute.get("recompute_granularity") != "full":
        full = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        instead = (
            " in place of --recompute-modules" if run.recompute.get("recompute_modules") else ""
        )
        what = (
            f"--recompute-granularity full{instead}"
            if run.library is None
            else "gradient checkpointing"
        )
        yield f"{what} (a third more time)", run.but(recompute=full)
    if run.dp > 1:
        below_stage_3 = flow is not None and (flow.cuda_graphs or flow.weights == "cached")
        for later in range(run.stage + 1, 4 if run.dp > 2 else min(run.stage + 2, 4)):
            if later < 3 or not below_stage_3:
                yield (
                    f"zero_optimization.stage {later}",
                    _with(run, "zero_optimization", stage=later),
                )
    if flow is not None and flow.loss != "chunked":
        yield 'coat.activation.loss "chunked"', _with_activation(run, loss="chunked")
    if flow is not None and flow.attention == "bf16":
        yield 'coat.activation.attention "fp8"', _with_activation(run, attention="fp8")
    if flow is not None and flow.bf16_layers:
        yield "coat.activation.bf16_layers []", _with_activation(run, bf16_layers=())
    if int(run.zero("reduce_bucket_size", BUCKET)) > 100_000_000:
        smaller = _with(run, "zero_optimization", reduce_bucket_size=50_000_000)
        yield "zero_optimization.reduce_bucket_size 50000000", smaller


def savings(run: Run, most: int = 3) -> list[Saving]:
    """The settings that save most, one at a time."""
    now = need(run).total
    found = [Saving(what, now - need(changed).total) for what, changed in _changes(run)]
    return sorted((one for one in found if one.bytes > 0), key=lambda one: -one.bytes)[:most]
