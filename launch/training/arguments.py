"""Command line of ``pretrain.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec

from coat_dist import CoatConfigError
from launch.command_line import Parser, local_path, number, whole_number
from launch.data.dataset import without_suffix

__all__ = ["MEANT", "check_arguments", "deepspeed_options", "output_options", "parse", "parser", "schedule_options"]

# What Megatron's programs and transformers call these options.
MEANT = {
    "config": "--deepspeed_config",
    "data-path": "--data",
    "decay-steps": "--lr-decay-steps",
    "eval-iters": "--eval-steps",
    "eod-mask-loss": "--separate-documents",
    "iterations": "--train-steps",
    "finetune-from": "--init-from",
    "from-pretrained": "--init-from",
    "init-from-hf": "--init-from",
    "learning-rate": "--lr",
    "load-checkpoint": "--load",
    "logging-dir": "--tensorboard",
    "lr-decay-iters": "--lr-decay-steps",
    "lr-decay-style": "--lr-schedule",
    "lr-scheduler-type": "--lr-schedule",
    "lr-warmup-iters": "--warmup-steps",
    "max-steps": "--train-steps",
    "model-config": "--model",
    "model-name-or-path": "--init-from",
    "out": "--output",
    "pretrained-checkpoint": "--init-from",
    "output-dir": "--output",
    "reset-attention-mask": "--separate-documents",
    "reset-position-ids": "--separate-documents",
    "resume": "--load",
    "resume-from-checkpoint": "--load",
    "save-steps": "--save-interval",
    "save-total-limit": "--keep-last",
    "steps": "--train-steps",
    "tensor-model-parallel-size": "--tensor-parallel",
    "tensorboard-dir": "--tensorboard",
    "tp": "--tensor-parallel",
    "train-iters": "--train-steps",
}


def parser() -> argparse.ArgumentParser:
    """The options, in the groups that ``--help`` shows."""
    p = Parser(
        prog="pretrain.py",
        description="Pretrain a GPT with DeepSpeed and Megatron-core. Started by "
        "`deepspeed launch/pretrain.py ...` or `torchrun launch/pretrain.py ...`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        meant=MEANT,
    )
    deepspeed_options(p)
    _model_and_data(p)
    schedule_options(p)
    output_options(p)
    return p


def deepspeed_options(p: argparse.ArgumentParser) -> None:
    """Of every program that trains."""
    g = p.add_argument_group("DeepSpeed")
    g.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        type=local_path,
        required=True,
        metavar="FILE",
        help='DeepSpeed JSON, with or without a "coat" block: a path, or a name in configs/deepspeed such as zero2',
    )
    g.add_argument("--deepspeed", action="store_true", help="accepted for habit; DeepSpeed always runs")
    g.add_argument(
        "--local_rank",
        "--local-rank",
        type=whole_number,
        default=None,
        help="set by the launcher; LOCAL_RANK works as well",
    )
    g.add_argument(
        "--distributed-timeout-minutes",
        type=number,
        default=None,
        metavar="MINUTES",
        help="how long ranks wait for one that does not come (default: torch's, 10 with NCCL and 30 with gloo)",
    )


def _model_and_data(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("model")
    g.add_argument(
        "--model",
        type=local_path,
        default=None,
        metavar="FILE",
        help="description: a path, or a name in configs/models such as llama2-7b (default: that of --init-from)",
    )
    g.add_argument(
        "--init-from",
        type=local_path,
        default=None,
        metavar="DIR",
        help="weights to start with, at step 0 with a new optimizer: a Hugging Face folder, one that convert_hf.py "
        "wrote, or a training checkpoint. With --load auto, where there is nothing to continue",
    )
    g.add_argument(
        "--model-override",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="replace values of the description",
    )
    g.add_argument("--tensor-parallel", type=whole_number, default=1, metavar="N", help="ranks that share every layer")
    g.add_argument("--sequence-parallel", action="store_true", help="also share the tokens between layers")
    g.add_argument("--seed", type=whole_number, default=1234, help="of initial weights, data order and dropout")

    g = p.add_argument_group("data")
    g.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[WEIGHT ]PREFIX",
        help="output prefix of prepare_data.py, .bin and .idx may follow; several are blended by weight",
    )
    g.add_argument("--split", default="950,40,10", help="parts of train, valid and test")
    g.add_argument(
        "--data-cache",
        type=local_path,
        default=None,
        metavar="DIR",
        help="where sample indices are kept (default: beside the data)",
    )
    g.add_argument(
        "--separate-documents",
        action="store_true",
        help="keep the documents of a sequence apart: attention within each, positions that begin again, no loss for "
        "what follows the end of one",
    )
    g.add_argument("--num-workers", type=whole_number, default=0, help="data loader processes of a rank")


def schedule_options(p: argparse.ArgumentParser, *, steps: bool = True) -> None:
    """Of every program that trains; ``steps``: whether --train-steps has to be given."""
    g = p.add_argument_group("schedule")
    g.add_argument("--train-steps", type=whole_number, required=steps, help="optimizer steps of the whole run")
    g.add_argument(
        "--stop-at-step",
        type=whole_number,
        default=None,
        help="save and leave after this step; the schedule stays that of --train-steps",
    )
    g.add_argument("--lr", type=number, default=None, help="peak learning rate (default: optimizer.params.lr)")
    g.add_argument("--min-lr", type=number, default=0.0, help="learning rate at the end of the decay")
    g.add_argument(
        "--lr-schedule", choices=["cosine", "linear", "constant"], default="cosine", help="shape after warm-up"
    )
    g.add_argument("--warmup-steps", type=whole_number, default=0, help="steps from 0 to the peak")
    g.add_argument(
        "--lr-decay-steps",
        type=whole_number,
        default=None,
        help="step at which --min-lr is reached (default: --train-steps)",
    )
    g.add_argument(
        "--max-bad-steps",
        type=whole_number,
        default=5,
        help="stop after so many steps in a row with a non-finite loss or gradient norm",
    )
    g.add_argument(
        "--eval-interval", type=whole_number, default=0, help="steps between evaluations on the valid split; 0 = never"
    )
    g.add_argument("--eval-steps", type=whole_number, default=10, help="micro-batches a rank and evaluation")


def output_options(p: argparse.ArgumentParser) -> None:
    """Of every program that trains."""
    g = p.add_argument_group("output")
    g.add_argument(
        "--output",
        "--run",
        type=local_path,
        default=None,
        metavar="DIR",
        help="folder for metrics.jsonl and memory.json (under torchrun write --output: it takes --run for its own)",
    )
    g.add_argument("--tensorboard", type=local_path, default=None, metavar="DIR", help="also write TensorBoard events")
    g.add_argument(
        "--save",
        type=local_path,
        default=None,
        metavar="DIR",
        help="folder for checkpoints; also saves at the end and on SIGTERM, SIGINT",
    )
    g.add_argument(
        "--save-interval", type=whole_number, default=0, help="steps between checkpoints; 0 = only at the end"
    )
    g.add_argument("--keep-last", type=whole_number, default=0, help="checkpoints kept in --save; 0 = all")
    g.add_argument(
        "--load",
        type=local_path,
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
    minutes = args.distributed_timeout_minutes
    require("distributed-timeout-minutes", minutes is None or 0.1 <= minutes <= 1e5, "minutes, 0.1 or more")
    for name in ("warmup-steps", "eval-interval", "save-interval", "keep-last", "num-workers"):
        require(name, getattr(args, name.replace("-", "_")) >= 0, "an integer >= 0")
    for name in ("lr", "min-lr"):
        value = getattr(args, name.replace("-", "_"))
        require(name, value is None or value >= 0, "a number >= 0")
    require("lr-decay-steps", args.lr_decay_steps is None or args.lr_decay_steps >= 1, "an integer >= 1")
    end = args.lr_decay_steps or args.train_steps
    require(
        "warmup-steps",
        args.lr_schedule == "constant" or args.warmup_steps <= max(end, 0),
        f"0 to {'--lr-decay-steps' if args.lr_decay_steps else '--train-steps'} ({end})",
    )
    require("seed", 0 <= args.seed < 2**31, "an integer from 0 to 2^31 - 1")
    require(
        "stop-at-step", args.stop_at_step is None or 1 <= args.stop_at_step <= args.train_steps, "1 to --train-steps"
    )
    require("save-interval", not args.save_interval or args.save is not None, "0 without --save")
    require("keep-last", not args.keep_last or args.save is not None, "0 without --save")
    require("load", args.load != "auto" or args.save is not None, "auto only with --save")
    require(
        "init-from",
        args.init_from is None or args.load in (None, "auto"),
        f"absent with --load {args.load}, which continues with the weights there",
    )
    if args.model is None and args.init_from is None:
        problems.append("--model: missing, accepted: a description, or --init-from, which has one")
    require("overwrite", not args.overwrite or args.load != "auto", "not with --load auto, which continues")
    require(
        "sequence-parallel",
        not args.sequence_parallel or args.tensor_parallel > 1,
        "only with --tensor-parallel 2 or more",
    )
    if args.tensorboard is not None and find_spec("tensorboard") is None:
        problems.append("--tensorboard: needs the package of that name: pip install tensorboard")
    if problems:
        raise CoatConfigError("\n".join(problems))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line. What is typed wrong is printed by rank 0, with status 2.

    Raises:
        CoatConfigError: see :func:`check_arguments`.
    """
    args = parser().parse_args(argv)
    args.data = [without_suffix(given) for given in args.data]
    check_arguments(args)
    return args
