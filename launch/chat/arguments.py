"""Command line of ``finetune.py``: its own options, beside those of every program that trains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from coat_dist import CoatConfigError
from launch.command_line import (
    DefaultsHelp,
    Parser,
    add_parallel_options,
    add_pipeline_options,
    local_path,
    number,
    one_stage_only,
    whole_number,
)
from launch.training.arguments import UNKNOWN_STEPS, check_arguments
from launch.training.options import MEANT, deepspeed_options, memory_options, output_options, schedule_options

__all__ = ["DEFAULT_EPOCHS", "check_steps", "parse", "parser"]

DEFAULT_EPOCHS = 3.0
LONGEST_DEFAULT = 4096
"""Of --seq-length: models that take more tokens than this are given so many unless asked for more."""

_MEANT = {
    # Conversations are always kept apart, and what to start from is --model.
    **{name: option for name, option in MEANT.items() if option not in ("--init-from", "--separate-documents")},
    "data-path": "--data",
    "dataset": "--data",
    "eval-file": "--valid",
    "finetune-from": "--model",
    "from-pretrained": "--model",
    "init-from": "--model",
    "init-from-hf": "--model",
    "max-length": "--seq-length",
    "max-seq-length": "--seq-length",
    "model-name-or-path": "--model",
    "n-epochs": "--epochs",
    "no-pack": "--no-packing",
    "num-epochs": "--epochs",
    "num-train-epochs": "--epochs",
    "pretrained-checkpoint": "--model",
    "split": "--valid-share",
    "tokenizer-name": "--tokenizer",
    "train-file": "--data",
    "valid-file": "--valid",
    "validation-file": "--valid",
    "validation-split": "--valid-share",
}


def parser() -> argparse.ArgumentParser:
    """The options, in the groups that ``--help`` shows."""
    p = Parser(
        prog="finetune.py",
        description="Fine-tune a model on conversations, with DeepSpeed and Megatron-core. Started by "
        "`deepspeed launch/finetune.py ...` or `torchrun launch/finetune.py ...`.",
        formatter_class=DefaultsHelp,
        meant=_MEANT,
    )
    deepspeed_options(p)
    g = p.add_argument_group("model")
    g.add_argument(
        "--model",
        type=local_path,
        required=True,
        metavar="DIR",
        help="what to start from: a Hugging Face folder, one of convert_hf.py, or a checkpoint of pretrain.py",
    )
    g.add_argument(
        "--tokenizer", type=local_path, default=None, metavar="DIR", help="its folder (default: the model's)"
    )
    g.add_argument(
        "--chat-template",
        type=local_path,
        default=None,
        metavar="FILE|plain",
        help="Jinja template in place of the tokenizer's; plain = the built-in one, taken also where there is none",
    )
    add_parallel_options(g)
    add_pipeline_options(g)
    g.add_argument("--seed", type=whole_number, default=1234, help="of data order, held-out share and dropout")

    memory_options(p)
    g = p.add_argument_group("data")
    g.add_argument(
        "--data",
        nargs="+",
        type=local_path,
        required=True,
        metavar="FILE",
        help="conversations: JSON lines with messages, prompt and completion, or conversations; or folders of such",
    )
    g.add_argument(
        "--valid", nargs="+", type=local_path, default=None, metavar="FILE", help="held-out conversations, evaluated"
    )
    g.add_argument("--valid-share", type=number, default=0.0, help="share of --data's conversations to hold out")
    g.add_argument(
        "--seq-length",
        type=whole_number,
        default=None,
        help=f"tokens of a sequence (default: the model's, at most {LONGEST_DEFAULT})",
    )
    g.add_argument("--no-packing", action="store_true", help="one conversation a sequence, padded")
    g.add_argument(
        "--too-long",
        choices=["drop", "truncate"],
        default="drop",
        help="what to do with conversations of more than --seq-length tokens",
    )
    g.add_argument("--skip-bad", action="store_true", help="list malformed lines and go on, instead of stopping")
    g.add_argument(
        "--data-cache",
        type=local_path,
        default=None,
        metavar="DIR",
        help="where encoded conversations are kept (default: prepared in --output)",
    )

    schedule_options(p, steps=False)
    p.add_argument_group("length").add_argument(
        "--epochs",
        type=number,
        default=None,
        help=f"how often each conversation is trained on (default: {DEFAULT_EPOCHS:g}, without --train-steps)",
    )
    output_options(p)
    g = p.add_argument_group("export")
    g.add_argument(
        "--export-to",
        type=local_path,
        default=None,
        metavar="DIR",
        help="folder for the trained model in Hugging Face's layout (default: hf in --output)",
    )
    g.add_argument("--no-export", action="store_true", help="end with the checkpoint")
    p.set_defaults(eval_interval=None, eval_steps=None, num_workers=0, init_from=None)
    return p


def _check(args: argparse.Namespace) -> None:
    problems = one_stage_only(args, "finetune.py has one stage: its packed sequences are needed in every layer")

    def require(name: str, good: bool, accepted: str) -> None:
        if not good:
            problems.append(f"--{name}: got {getattr(args, name.replace('-', '_'))!r}, accepted: {accepted}")

    require("output", args.output is not None, "a folder, always given")
    require("epochs", args.epochs is None or args.epochs > 0, "a number above 0")
    require("epochs", args.epochs is None or args.train_steps is None, "nothing with --train-steps")
    require("seq-length", args.seq_length is None or args.seq_length >= 2, "an integer >= 2")
    require("valid-share", 0 <= args.valid_share < 1, "a number from 0 to below 1")
    require("valid-share", not args.valid_share or args.valid is None, "0 with --valid")
    held_out = args.valid is not None or args.valid_share
    require("eval-interval", held_out or not args.eval_interval, "0 without --valid or --valid-share")
    require("export-to", args.export_to is None or not args.no_export, "nothing with --no-export")
    if problems:
        raise CoatConfigError("\n".join(problems))


def check_steps(args: argparse.Namespace) -> None:
    """:func:`launch.training.arguments.check_arguments` of what is known; ``train_steps`` may be None until the data
    is read.

    Raises:
        CoatConfigError: one line for each argument.
    """
    known = argparse.Namespace(**vars(args))
    if args.train_steps is None:
        known.train_steps = UNKNOWN_STEPS
    known.eval_interval = args.eval_interval or 0
    known.eval_steps = 1 if args.eval_steps is None else args.eval_steps
    check_arguments(known)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line. What is typed wrong is printed by rank 0, with status 2.

    ``save`` becomes ``checkpoints`` in --output where it is not given: the export reads the last checkpoint.

    Raises:
        CoatConfigError: one line for each argument that cannot be used.
    """
    args = parser().parse_args(argv)
    _check(args)
    if args.save is None:
        args.save = f"{args.output}/checkpoints"
    if args.export_to is None and not args.no_export:
        args.export_to = f"{args.output}/hf"
    if args.train_steps is None and args.epochs is None:
        args.epochs = DEFAULT_EPOCHS
    check_steps(args)
    return args
