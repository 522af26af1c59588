"""What ``pretrain.py`` takes from the DeepSpeed configuration: the checked settings, batch
sizes, the learning rate.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coat_dist import CoatConfig, CoatConfigError
from coat_dist.config import Problem, decode_base64, load_json
from coat_dist.config_errors import got
from coat_dist.settings import Settings
from launch.common.find_config import read_config

MICRO, STEPS, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)


@dataclass(frozen=True)
class BatchSizes:
    """Samples of one forward pass on one rank, forward passes of one step, and samples of one
    step on all ranks.
    """

    micro: int
    accumulation: int
    total: int


def batch_sizes(settings: Mapping[str, Any], dp: int) -> BatchSizes:
    """The three batch sizes for ``dp`` data-parallel ranks; DeepSpeed's rule: total = micro x
    accumulation x dp.

    Raises:
        CoatConfigError: too few given to know the rest, not positive integers, or contradictory.
    """
    micro, accumulation, total = (settings.get(key) for key in (MICRO, STEPS, TOTAL))
    for key in (MICRO, STEPS, TOTAL):
        if (value := settings.get(key)) is not None and (type(value) is not int or value < 1):
            raise CoatConfigError(Problem(key, got(value), "an integer >= 1"))
    if micro is None and total is None:
        raise CoatConfigError(Problem(MICRO, "missing", f"an integer >= 1 (or {TOTAL})"))
    micro = micro or max(1, (total or 0) // (dp * (accumulation or 1)))
    accumulation = accumulation or max(1, (total or 0) // (micro * dp))
    expected = micro * accumulation * dp
    if expected != (total or expected):
        accepted = (
            f"{MICRO} ({micro}) x {STEPS} ({accumulation}) x data-parallel ranks ({dp}) = "
            f"{expected}"
        )
        raise CoatConfigError(Problem(TOTAL, got(total), accepted))
    return BatchSizes(micro, accumulation, expected)


_ADAMW = ("lr", "betas", "eps", "weight_decay")
_DEFAULT = (None, True)
_ACCEPTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "optimizer.type",
        ("AdamW", "CoatAdamW"),
        '"CoatAdamW" (FP8 moments), or "AdamW" (torch\'s, fp32 moments)',
    ),
    ("bf16.enabled", (True,), "true: this program trains in bf16"),
    (
        "bf16.check_grad_overflow",
        _DEFAULT,
        "true (its default): without it a NaN gradient would be applied",
    ),
    ("zero_optimization.stage", (1, 2, 3), "1, 2 or 3"),
    (
        "zero_optimization.compute_grad_norm",
        _DEFAULT,
        "true (its default): the gradient norm is printed and checked",
    ),
    ("managed_gradient_accumulation", _DEFAULT, "true (its default)"),
    (
        "checkpoint.use_node_local_storage",
        (None, False),
        "false: --save is a folder that all nodes share",
    ),
)
"""Keys of the DeepSpeed configuration, values that this program can run, and how an error
describes them.
"""


def load_settings(
    given: str | dict[str, Any], *, tp: int
) -> tuple[dict[str, Any], CoatConfig | None]:
    """The DeepSpeed configuration and its "coat" block, both checked for what this program can run.

    Args:
        given: value of ``--deepspeed_config``: a path, a name in ``configs/deepspeed``, or the
            content.
        tp: tensor-parallel size.

    Raises:
        CoatConfigError: names each key, its value and what is accepted.
    """
    if isinstance(given, dict):
        settings = given
    elif not os.path.exists(given) and decode_base64(given) is not None:
        settings = load_json(given)
    else:
        settings = read_config("--deepspeed_config", given, "deepspeed")
    read = Settings.read(settings)
    settings = read.for_deepspeed()
    if read.coat is not None:
        settings["coat"] = read.coat.model_dump(mode="json", exclude_unset=True)
    checked = read.changed(scheduler={})  # which is refused below, whatever it holds
    if settings.get(MICRO) == "auto":
        checked = checked.changed(**{MICRO: 1})
    coat = checked.check(tp=tp).coat
    wrong = [
        (key, accepted)
        for key, possible, accepted in _ACCEPTED
        if look_up(settings, key) not in possible
    ]
    if "scheduler" in settings:
        wrong.append(("scheduler", "absent (--lr-schedule and its companions)"))
    if look_up(settings, "optimizer.type") == "AdamW":
        accepted = f"no such key; AdamW here takes {', '.join(_ADAMW)}"
        others = [key for key in look_up(settings, "optimizer.params") or {} if key not in _ADAMW]
        wrong += [(f"optimizer.params.{key}", accepted) for key in others]
    if wrong:
        raise CoatConfigError(
            "\n".join(
                f"{key}: got {look_up(settings, key)!r}, accepted: {accepted}"
                for key, accepted in wrong
            )
        )
    return settings, coat


def auto_batch(args: Any, settings: dict[str, Any], dp: int) -> bool:
    """Whether the micro-batch is to be found; ``--micro-batch`` goes into ``settings``, which have
    1 until it is found.

    Raises:
        CoatConfigError: the other batch sizes leave no choice, or are not divisible.
    """
    if args.micro_batch is not None:
        settings[MICRO] = args.micro_batch
    if settings.get(MICRO) != "auto":
        return False
    settings[MICRO] = 1
    total, steps = settings.get(TOTAL), settings.get(STEPS)
    for key, value, step in ((STEPS, steps, 1), (TOTAL, total, dp)):
        if value is not None and (type(value) is not int or value < 1 or value % step):
            accepted = (
                f"a multiple of the data-parallel ranks ({dp})"
                if key == TOTAL
                else "an integer >= 1"
            )
            raise CoatConfigError(
                f'{key}: got {json.dumps(value)} with {MICRO} "auto", accepted: {accepted}'
            )
    if total and steps:
        raise CoatConfigError(
            f'{MICRO}: got "auto" beside {TOTAL} {total} and {STEPS} {steps}, accepted: "auto" '
            "with at most one of them"
        )
    return True


def peak_lr(args: Any, settings: Mapping[str, Any]) -> float:
    """``--lr``, else ``optimizer.params.lr``.

    Raises:
        CoatConfigError: neither is given, or it is no finite number >= 0.
    """
    lr = args.lr if args.lr is not None else look_up(settings, "optimizer.params.lr")
    if not isinstance(lr, int | float) or isinstance(lr, bool) or not math.isfinite(lr) or lr < 0:
        raise CoatConfigError(
            f"optimizer.params.lr: got {lr!r}, accepted: a finite number >= 0 (or --lr)"
        )
    return float(lr)


def look_up(config: Any, key: str) -> Any:
    """The value at a dotted key such as ``"zero_optimization.stage"``; None where a part of the
    way is missing.
    """
    for part in key.split("."):
        if not isinstance(config, Mapping):
            return None
        config = config.get(part)
    return config
