"""Command line of ``evaluate.py``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from coat_dist import CoatConfigError
from launch.command_line import LocalPath, local_path, option, options_parser, out_of_range

__all__ = ["EvaluateOptions", "parse"]

_model, _what, _how, _output = (
    partial(option, group=name) for name in ("model", "what is evaluated", "how", "output")
)


@dataclass(kw_only=True)
class EvaluateOptions:
    """Evaluate a model: loss and perplexity of held-out text, accuracy of multiple choice; in BF16,
    in FP8 or in fp32. Under a launcher, rows are distributed over the ranks; results do not depend
    on their number. Exit status: 0 done, 2 an error of the user's, 4 another rank has ended, 130
    interrupted.
    """

    load: LocalPath | None = _model(None, flags=("--load", "--checkpoint"), metavar="DIR")
    """a training checkpoint or the folder whose `latest` names it, a universal checkpoint, a
    converted folder, or a Hugging Face folder
    """
    model: LocalPath | None = _model(None, metavar="FILE")
    """description of the model, of a checkpoint that has none (of another program than
    pretrain.py)
    """
    forward: Literal["bf16", "fp8", "fp32"] = _model("bf16")
    """numbers of the forward pass: bf16 layers, the FP8 flow of the "coat" block, or fp32"""
    deepspeed_config: LocalPath | None = _model(
        None, flags=("--deepspeed_config", "--deepspeed-config"), metavar="FILE"
    )
    """with --forward fp8: take this file's "coat" block (default: the checkpoint's own, else the
    defaults)
    """
    tokenizer: str | None = _model(None, metavar="KIND")
    """hf:PATH, sentencepiece:FILE or bytes (default: the checkpoint's own, else that of its
    training data)
    """
    eod: str | None = _model(None, metavar="TOKEN")
    """end of document, where the tokenizer names none: a token or an id"""
    bos: str = _model("auto", metavar="TOKEN")
    """put before every text: auto = as transformers does, none, eod, a token or an id"""
    text: list[LocalPath] = _what([], action="extend", metavar="PATH")
    """perplexity of files or folders: text, JSON lines, Parquet, as prepare_data.py reads them"""
    data: list[str] = _what([], action="extend", metavar="[WEIGHT ]PREFIX")
    """loss of prepared data: the samples that training takes for valid_loss"""
    choices: list[LocalPath] = _what([], action="extend", metavar="FILE")
    """accuracy of multiple choice: JSON lines with context, choices and answer"""
    text_key: str = _what("text", metavar="KEY")
    """JSON key or Parquet column of the text"""
    separator: str | None = _what(None, metavar="TEXT")
    """what separates documents in a text file, such as '\\n\\n'"""
    skip_bad: bool = _what(False)
    """count malformed lines instead of stopping at them"""
    limit: int | None = _what(None, metavar="N", least=1)
    """first documents or questions of each file only"""
    split: str | None = _what(None)
    """with --data: parts of train, valid and test (default: the run's, else 950,40,10)"""
    part: Literal["valid", "test", "train"] = _what("valid")
    """with --data: which part"""
    samples: int | None = _what(None, metavar="N", least=1)
    """with --data: the first N samples (default: all)"""
    seed: int | None = _what(None, least=0)
    """with --data: of the order (default: the run's, else 1234)"""
    data_cache: LocalPath | None = _what(None, metavar="DIR")
    """with --data: where sample indices are kept"""
    window: int | None = _how(None, metavar="N", least=2)
    """tokens that the model sees together (default: its seq_length, with --text at most 4096)"""
    stride: int | None = _how(None, metavar="N", least=1)
    """with --text: tokens from window to window (default: half)"""
    delimiter: str = _how("", metavar="TEXT")
    """with --choices: put between context and choice (default: nothing)"""
    batch_size: int = _how(8, metavar="N", least=1)
    """rows of a forward pass"""
    tensor_parallel: int = _how(1, metavar="N", least=1)
    """ranks that share every layer"""
    local_rank: int | None = _how(
        None, flags=("--local_rank", "--local-rank"), help=argparse.SUPPRESS
    )
    """set by the launcher"""
    deepspeed: bool = _how(False, help=argparse.SUPPRESS)
    """accepted for habit"""
    output: LocalPath | None = _output(None, metavar="DIR")
    """folder for evaluation.json"""
    details: bool = _output(False)
    """also write DIR/details.jsonl, a line a question and row"""
    baseline: LocalPath | None = _output(None, metavar="FILE")
    """evaluation.json (or its folder) of another model: differences, with paired standard errors"""
    compare: Annotated[list[str], local_path] | None = _output(None, nargs=2, metavar="FILE")
    """only print the differences of the second evaluation.json from the first; no model is
    loaded
    """
    log_level: Literal["debug", "info", "warning", "error"] = _output("info")
    """debug: also what libraries' loggers print; info: this program's lines; warning, error:
    these only
    """


def parse(argv: Sequence[str] | None = None) -> EvaluateOptions:
    """Parse and check the command line. What is typed wrong is one line, with status 2.

    Raises:
        CoatConfigError: one line for each value that cannot be used, or would be ignored where a
            reader would take the results for others.
    """
    a = EvaluateOptions(**vars(options_parser(EvaluateOptions, "evaluate.py").parse_args(argv)))
    if a.load is None and a.model is not None and os.path.isdir(a.model):
        a.load, a.model = a.model, None  # other programs call a folder of weights a model
    if a.compare is not None:
        return a
    wrong = {
        "--load: missing, accepted: the folder of a checkpoint or of a Hugging Face model": a.load
        is None,
        "--text: missing, accepted: one or more of --text, --data and --choices": not (
            a.text or a.data or a.choices
        ),
        "--deepspeed_config: accepted: only with --forward fp8": a.deepspeed_config
        and a.forward != "fp8",
        "--details: accepted: only with --output": a.details and a.output is None,
    }
    if problems := out_of_range(a) + [line for line, so in wrong.items() if so]:
        raise CoatConfigError("\n".join(problems))
    return a
