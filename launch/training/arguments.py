"""Command line of ``pretrain.py``, and what it asks of the DeepSpeed configuration. Builds nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coat_dist import CoatConfig, CoatConfigError
from coat_dist.config import load_json, look_up
from coat_dist.deepspeed.refusals import check_deepspeed

__all__ = ["BatchSizes", "batch_sizes", "check_arguments", "load_settings", "parse", "parser", "peak_lr"]


def parser() -> argparse.ArgumentParser:
    """The options, in the groups that ``--help`` shows."""
    p = argparse.ArgumentParser(
        prog="pretrain.py",
        description="Pretrain a GPT with DeepSpeed and Megatron-core. Started by "
        "`deepspeed launch/pretrain.py ...` or `torchrun launch/pretrain.py ...`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    g = p.add_argument_group("DeepSpeed")
    g.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        required=True,
        metavar="FILE",
        help='DeepSpeed JSON, with or without a "coat" block',
    )
    g.add_argument("--deepspeed", action="store_true", help="accepted for habit; DeepSpeed always runs")
    g.add_argument(
        "--local_rank", "--local-rank", type=int, default=None, help="set by the launcher; LOCAL_RANK works as well"
    )

    g = p.add_argument_group("model")
    g.add_argument("--model", required=True, metavar="FILE", help="description in configs/models")
    g.add_argument(
        "--model-override", nargs="+", default=[], metavar="KEY=VALUE", help="replace values of the description"
    )
    g.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share every layer")
    g.add_argument("--sequence-parallel", action="store_true", help="also share the tokens between layers")
    g.add_argument("--seed", type=int, default=1234, help="of initial weights, data order and dropout")

    g = p.add_argument_group("data")
    g.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[WEIGHT ]PREFIX",
        help="output prefix of prepare_data.py; several are blended by weight",
    )
    g.add_argument("--split", default="950,40,10", help="parts of train, valid and test")
    g.add_argument(
        "--data-cache", default=None, metavar="DIR", help="where sample indices are kept (default: beside the data)"
    )
    g.add_argument("--num-workers", type=int, default=0, help="data loader processes of a rank")

    g = p.add_argument_group("schedule")
    g.add_argument("--train-steps", type=int, required=True, help="optimizer steps of the whole run")
    g.add_argument(
        "--stop-at-step",
        type=int,
        default=None,
        help="save and leave after this step; the schedule stays that of --train-steps",
    )
    g.add_argument("--lr", type=float, default=None, help="peak learning rate (default: optimizer.params.lr)")
    g.add_argument("--min-lr", type=float, default=0.0, help="learning rate at the end of the decay")
    g.add_argument(
        "--lr-schedule", choices=["cosine", "linear", "constant"], default="cosine", help="shape after warm-up"
    )
    g.add_argument("--warmup-steps", type=int, default=0, help="steps from 0 to the peak")
    g.add_argument(
        "--lr-decay-steps", type=int, default=None, help="step at which --min-lr is reached (default: --train-steps)"
    )
    g.add_argument(
        "--max-bad-steps",
        type=int,
        default=5,
        help="stop after so many steps in a row with a non-finite loss or gradient norm",
    )
    g.add_argument(
        "--eval-interval", type=int, default=0, help="steps between evaluations on the valid split; 0 = never"
    )
    g.add_argument("--eval-steps", type=int, default=10, help="micro-batches a rank and evaluation")

    g = p.add_argument_group("output")
    g.add_argument(
        "--output",
        "--run",
        default=None,
        metavar="DIR",
        help="folder for metrics.jsonl and memory.json (under torchrun write --output: it takes --run for its own)",
    )
    g.add_argument("--tensorboard", default=None, metavar="DIR", help="also write TensorBoard events")
    g.add_argument(
        "--save",
        default=None,
        metavar="DIR",
        help="folder for checkpoints; also saves at the end and on SIGTERM, SIGINT",
    )
    g.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints; 0 = only at the end")
    g.add_argument("--keep-last", type=int, default=0, help="checkpoints kept in --save; 0 = all")
    g.add_argument(
        "--load",
        default=None,
        metavar="DIR|auto",
        help="continue from this folder's latest checkpoint; auto = from --save where it has one, else start",
    )
    g.add_argument(
        "--overwrite",
        action="store_true",
        help="start anew where an earlier run has written: its checkpoints go when the first new one is complete, its "
        "metrics.jsonl is kept under another name",
    )
    return p


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse values that make no sense, all at once.

    Raises:
        CoatConfigError: one line for each argument.
    """
    problems = []

    def require(name: str, good: bool, accepted: str) -> None:
        if not good:
            problems.append(f"--{name}: got {getattr(args, name.replace('-', '_'))!r}, accepted: {accepted}")

    for name in ("tensor-parallel", "train-steps", "max-bad-steps", "eval-steps"):
        require(name, getattr(args, name.replace("-", "_")) >= 1, "an integer >= 1")
    for name in ("warmup-steps", "eval-interval", "save-interval", "keep-last", "num-workers"):
        require(name, getattr(args, name.replace("-", "_")) >= 0, "an integer >= 0")
    require("seed", 0 <= args.seed < 2**31, "an integer from 0 to 2^31 - 1")
    require(
        "stop-at-step", args.stop_at_step is None or 1 <= args.stop_at_step <= args.train_steps, "1 to --train-steps"
    )
    require("save-interval", not args.save_interval or args.save is not None, "0 without --save")
    require("keep-last", not args.keep_last or args.save is not None, "0 without --save")
    require("load", args.load != "auto" or args.save is not None, "auto only with --save")
    require("overwrite", not args.overwrite or args.load != "auto", "not with --load auto, which continues")
    require(
        "sequence-parallel",
        not args.sequence_parallel or args.tensor_parallel > 1,
        "only with --tensor-parallel 2 or more",
    )
    if problems:
        raise CoatConfigError("\n".join(problems))


def load_settings(path: str, *, tp: int) -> tuple[dict[str, Any], CoatConfig | None]:
    """The DeepSpeed configuration and its "coat" block, both checked for what this program can run.

    Raises:
        CoatConfigError: names each key, its value and what is accepted.
    """
    settings = load_json(path)
    coat = CoatConfig.from_deepspeed(settings)
    check_deepspeed(settings, tp=tp, mpu=True)
    problems = []

    def require(key: str, good: bool, accepted: str) -> None:
        if not good:
            problems.append(f"{key}: got {look_up(settings, key)!r}, accepted: {accepted}")

    require(
        "optimizer.type",
        look_up(settings, "optimizer.type") in ("AdamW", "CoatAdamW"),
        '"CoatAdamW" (FP8 moments), or "AdamW" (torch\'s, fp32 moments)',
    )
    require("bf16.enabled", look_up(settings, "bf16.enabled") is True, "true: this program trains in bf16")
    require(
        "bf16.check_grad_overflow",
        look_up(settings, "bf16.check_grad_overflow") is not False,
        "true (its default): without it a NaN gradient would be applied",
    )
    require("zero_optimization.stage", look_up(settings, "zero_optimization.stage") in (1, 2, 3), "1, 2 or 3")
    require(
        "zero_optimization.compute_grad_norm",
        look_up(settings, "zero_optimization.compute_grad_norm") is not False,
        "true (its default): the gradient norm is reported and checked",
    )
    require(
        "managed_gradient_accumulation",
        look_up(settings, "managed_gradient_accumulation") is not False,
        "true (its default)",
    )
    require("scheduler", "scheduler" not in settings, "absent: the schedule is set by --lr-schedule and its companions")
    if look_up(settings, "optimizer.type") == "AdamW":
        known = ("lr", "betas", "eps", "weight_decay")
        for key in look_up(settings, "optimizer.params") or {}:
            require(f"optimizer.params.{key}", key in known, f"no such key; AdamW here takes {', '.join(known)}")
    if problems:
        raise CoatConfigError("\n".join(problems))
    return settings, coat


@dataclass(frozen=True)
class BatchSizes:
    """Samples of one forward pass on one rank, forward passes of one step, and samples of one step on all ranks."""

    micro: int
    accumulation: int
    total: int


def batch_sizes(settings: Mapping[str, Any], dp: int) -> BatchSizes:
    """The three batch sizes for ``dp`` data-parallel ranks; DeepSpeed's rule: total = micro x accumulation x dp.

    Raises:
        CoatConfigError: too few given to know the rest, not positive integers, or contradictory.
    """
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, accumulation, total = (settings.get(k) for k in keys)
    for key, value in zip(keys, (micro, accumulation, total), strict=True):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CoatConfigError(f"{key}: got {value!r}, accepted: an integer >= 1")
    if micro is None and total is None:
        raise CoatConfigError(f"{keys[0]}: missing, accepted: an integer >= 1 (or {keys[2]})")
    if micro is None:
        assert total is not None
        micro = max(1, total // (dp * (accumulation or 1)))
    if accumulation is None:
        accumulation = max(1, (total or 0) // (micro * dp))
    expected = micro * accumulation * dp
    if expected != (total or expected):
        raise CoatConfigError(
            f"train_batch_size: got {total}, accepted: {keys[0]} ({micro}) x {keys[1]} ({accumulation}) x "
            f"data-parallel ranks ({dp}) = {expected}"
        )
    return BatchSizes(micro, accumulation, expected)


def peak_lr(args: argparse.Namespace, settings: Mapping[str, Any]) -> float:
    """``--lr``, else ``optimizer.params.lr``.

    Raises:
        CoatConfigError: neither is given.
    """
    lr = args.lr if args.lr is not None else look_up(settings, "optimizer.params.lr")
    if not isinstance(lr, int | float) or isinstance(lr, bool):
        raise CoatConfigError(f"optimizer.params.lr: got {lr!r}, accepted: a number (or --lr)")
    return float(lr)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line. argparse's own errors exit with status 2."""
    args = parser().parse_args(argv)
    check_arguments(args)
    return args
