"""Command line of ``finetune.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from coat_dist import CoatConfigError
from launch.command_line import LocalPath, Parser, one_stage_only, option, options_parser
from launch.train.arguments import DEEPSPEED_KEYS, TrainingOptions

__all__ = ["LONGEST_DEFAULT", "FinetuneOptions", "parse", "parser"]

LONGEST_DEFAULT = 4096
"""Of --seq-length: models that take more tokens than this are given so many unless asked for
more.
"""

_model, _data, _length, _export = (
    partial(option, group=name) for name in ("model", "data", "length", "export")
)


@dataclass(kw_only=True)
class FinetuneOptions(TrainingOptions):
    """Fine-tune a model on conversations, with DeepSpeed and Megatron-core. Started by `deepspeed
    launch/finetune.py ...` or `torchrun launch/finetune.py ...`.
    """

    model: LocalPath = _model(
        metavar="DIR",
        meant="init-from finetune-from from-pretrained init-from-hf model-config "
        "model-name-or-path "
        "pretrained-checkpoint",
    )
    """what to start from: a Hugging Face folder, one of convert_hf.py, or a checkpoint of
    pretrain.py
    """
    tokenizer: LocalPath | None = _model(None, metavar="DIR", meant="tokenizer-name")
    """its folder (default: the model's)"""
    chat_template: LocalPath | None = _model(None, metavar="FILE|plain")
    """Jinja template in place of the tokenizer's; plain = the built-in one, taken also where
    there is none
    """
    data: list[LocalPath] = _data(metavar="FILE", meant="data-path dataset train-file")
    """conversations: JSON lines with messages, prompt and completion, or conversations; or
    folders of such
    """
    valid: list[LocalPath] | None = _data(
        None, metavar="FILE", meant="eval-file valid-file validation-file"
    )
    """held-out conversations, evaluated"""
    valid_share: float = _data(0.0, least=0.0, meant="split validation-split")
    """share of --data's conversations to hold out"""
    seq_length: int | None = _data(None, least=2, meant="max-length max-seq-length")
    """tokens of a sequence (default: the model's, at most 4096)"""
    no_packing: bool = _data(False, meant="no-pack")
    """one conversation a sequence, padded"""
    too_long: Literal["drop", "truncate"] = _data("drop")
    """what to do with conversations of more than --seq-length tokens"""
    skip_bad: bool = _data(False)
    """list malformed lines and go on, instead of stopping"""
    train_steps: int | None = option(  # type: ignore[assignment]
        None, group="schedule", least=1, meant="max-steps train-iters iterations steps"
    )
    """optimizer steps of the whole run (default: those that --epochs makes)"""
    eval_interval: int | None = option(None, group="schedule", least=0)  # type: ignore[assignment]
    """steps between evaluations on the held-out data, which the last step is followed by, too; 0 =
    never (default: about an epoch)
    """
    eval_steps: int | None = option(None, group="schedule", least=1, meant="eval-iters")  # type: ignore[assignment]
    """micro-batches a rank and evaluation (default: all of the held-out data)"""
    output: LocalPath = option(group="output", flags=("--output", "--run"), metavar="DIR")
    """folder for metrics.jsonl, memory.json, checkpoints and the exported model"""
    epochs: float | None = _length(None, meant="n-epochs num-epochs num-train-epochs")
    """how often each conversation is trained on (default: 3, without --train-steps)"""
    export_to: LocalPath | None = _export(None, metavar="DIR")
    """folder for the trained model in Hugging Face's layout (default: hf in --output)"""
    no_export: bool = _export(False)
    """end with the checkpoint"""

    def problems(self) -> list[str]:
        """Those of every program, of the data and of the export."""
        held_out = self.valid is not None or self.valid_share
        return [
            *one_stage_only(
                self, "finetune.py has one stage: its packed sequences are needed in every layer"
            ),
            *self.refused(
                ("epochs", self.epochs is None or self.epochs > 0, "a number above 0"),
                ("valid_share", self.valid_share < 1, "a number from 0 to below 1"),
                ("valid_share", not self.valid_share or self.valid is None, "0 with --valid"),
                (
                    "eval_interval",
                    held_out or not self.eval_interval,
                    "0 without --valid or --valid-share",
                ),
                (
                    "no_export",
                    self.export_to is None or not self.no_export,
                    "absent with --export-to",
                ),
            ),
            *super().problems(),
        ]


def parser() -> Parser:
    """The parser of ``finetune.py``."""
    return options_parser(FinetuneOptions, "finetune.py", DEEPSPEED_KEYS)


def parse(argv: Sequence[str] | None = None) -> FinetuneOptions:
    """Parse and check the command line. What is typed wrong is printed by rank 0, with status 2.

    ``save`` becomes ``checkpoints`` in --output where it is not given: the export reads the last
    checkpoint.

    Raises:
        CoatConfigError: one line for each argument that cannot be used.
    """
    options = FinetuneOptions(**vars(parser().parse_args(argv)))
    if options.epochs is not None and options.train_steps is not None:
        raise CoatConfigError(
            f"--epochs: got {options.epochs}, accepted: nothing with --train-steps"
        )
    if options.train_steps is None and options.epochs is None:
        options.epochs = 3.0
    options.save = options.save or f"{options.output}/checkpoints"
    if not options.no_export:
        options.export_to = options.export_to or f"{options.output}/hf"
    options.check()
    return options
