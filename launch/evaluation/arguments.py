"""Command line of ``evaluate.py``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from coat_dist import CoatConfigError
from launch.command_line import Parser, local_path, whole_number
from launch.log_level import add_log_level

__all__ = ["parse"]


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Parse the command line. What is typed wrong is one line, with status 2.

    Raises:
        CoatConfigError: values that make no sense, one line each.
    """
    p = Parser(prog="evaluate.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    _model(p.add_argument_group("model"))
    _what(p.add_argument_group("what is evaluated"))
    _how(p.add_argument_group("how"))
    _output(p.add_argument_group("output"))
    args = p.parse_args(argv)
    if args.load is None and args.model is not None and os.path.isdir(args.model):
        args.load, args.model = args.model, None  # what other programs call a model is a folder of weights
    _check(args)
    return args


def _model(g: argparse._ArgumentGroup) -> None:
    g.add_argument(
        "--load",
        "--checkpoint",
        dest="load",
        type=local_path,
        metavar="DIR",
        help="a training checkpoint or the folder whose `latest` names it, a universal checkpoint, a converted folder, "
        "or a Hugging Face folder",
    )
    g.add_argument(
        "--model",
        type=local_path,
        metavar="FILE",
        help="description of the model, of a checkpoint that does not say (of another program than pretrain.py)",
    )
    g.add_argument(
        "--forward",
        choices=["bf16", "fp8", "fp32"],
        default="bf16",
        help='numbers of the forward pass: bf16 layers (default), the FP8 flow of the "coat" block, or fp32',
    )
    g.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        type=local_path,
        metavar="FILE",
        help="with --forward fp8: take this file's \"coat\" block (default: the checkpoint's own, else the defaults)",
    )
    g.add_argument(
        "--tokenizer",
        metavar="KIND",
        help="hf:PATH, sentencepiece:FILE or bytes (default: the checkpoint's own, else that of its training data)",
    )
    g.add_argument(
        "--eod", metavar="TOKEN", help="end of document, where the tokenizer does not tell: a token or an id"
    )
    g.add_argument(
        "--bos",
        metavar="TOKEN",
        help="put before every text: auto = what the tokenizer file puts there (default), none, eod, a token or an id",
    )


def _what(g: argparse._ArgumentGroup) -> None:
    g.add_argument(
        "--text",
        type=local_path,
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="perplexity of files or folders: text, JSON lines, Parquet, as prepare_data.py reads them",
    )
    g.add_argument(
        "--data",
        nargs="+",
        action="extend",
        default=[],
        metavar="[WEIGHT ]PREFIX",
        help="loss of prepared data: the samples that training takes for valid_loss",
    )
    g.add_argument(
        "--choices",
        type=local_path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="accuracy of multiple choice: JSON lines with context, choices and answer",
    )
    g.add_argument("--text-key", metavar="KEY", help="JSON key or Parquet column of the text (default: text)")
    g.add_argument("--separator", metavar="TEXT", help="what separates documents in a text file, such as '\\n\\n'")
    g.add_argument("--skip-bad", action="store_true", help="count malformed lines instead of stopping at them")
    g.add_argument("--limit", type=_count, metavar="N", help="first documents or questions of each file only")
    g.add_argument("--split", help="with --data: parts of train, valid and test (default: the run's, else 950,40,10)")
    g.add_argument("--part", choices=["valid", "test", "train"], help="with --data (default: valid)")
    g.add_argument("--samples", type=_count, metavar="N", help="with --data: the first N samples (default: all)")
    g.add_argument("--seed", type=whole_number, help="with --data: of the order (default: the run's, else 1234)")
    g.add_argument("--data-cache", type=local_path, metavar="DIR", help="with --data: where sample indices are kept")


def _how(g: argparse._ArgumentGroup) -> None:
    g.add_argument(
        "--window",
        type=whole_number,
        metavar="N",
        help="tokens that the model sees together (default: its seq_length, with --text at most 4096)",
    )
    g.add_argument(
        "--stride", type=_count, metavar="N", help="with --text: tokens from window to window (default: half)"
    )
    g.add_argument("--delimiter", metavar="TEXT", help="with --choices: put between context and choice")
    g.add_argument("--batch-size", type=_count, default=8, metavar="N", help="rows of a forward pass (default: 8)")
    g.add_argument("--tensor-parallel", type=_count, default=1, metavar="N", help="ranks that share every layer")
    g.add_argument("--local_rank", "--local-rank", type=whole_number, help=argparse.SUPPRESS)
    g.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # accepted for habit


def _output(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--output", type=local_path, metavar="DIR", help="folder for evaluation.json")
    g.add_argument("--details", action="store_true", help="also write DIR/details.jsonl, a line a question and row")
    g.add_argument(
        "--baseline",
        type=local_path,
        metavar="FILE",
        help="evaluation.json (or its folder) of another model: differences, with paired standard errors",
    )
    g.add_argument(
        "--compare",
        type=local_path,
        nargs=2,
        metavar=("BASELINE", "OTHER"),
        help="only print the differences of two evaluation.json; no model is loaded",
    )

    add_log_level(g)


def _count(text: str) -> int:
    if (value := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: 1 or more")
    return value


def _check(args: argparse.Namespace) -> None:
    """Refuse values that make no sense, or would be ignored where a reader would take the results for others."""
    if args.compare is not None:
        return
    wrong = {
        "--load: missing, accepted: the folder of a checkpoint or of a Hugging Face model": args.load is None,
        "--text: missing, accepted: one or more of --text, --data and --choices": not (
            args.text or args.data or args.choices
        ),
        f"--window: got {args.window}, accepted: 2 or more": args.window is not None and args.window < 2,
        f"--seed: got {args.seed}, accepted: an integer from 0 to 2^31 - 1": not 0 <= (args.seed or 0) < 2**31,
        "--separator: got '', accepted: one character or more": args.separator == "",
        f"--deepspeed_config: got {args.deepspeed_config!r}, accepted: only with --forward fp8": (
            args.deepspeed_config is not None and args.forward != "fp8"
        ),
        "--details: got True, accepted: only with --output": args.details and args.output is None,
    }
    if problems := [line for line, so in wrong.items() if so]:
        raise CoatConfigError("\n".join(problems))
