"""Command line of ``pretrain.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from launch.common.command_line import (
    LocalPath,
    Parser,
    RunOptions,
    check_recompute,
    option,
    options_parser,
    out_of_range,
)
from launch.data.blend import without_suffix

_deepspeed, _memory, _data = (
    partial(option, group=name) for name in ("DeepSpeed", "memory", "data")
)
_model, _schedule, _output = (
    partial(option, group=name) for name in ("model", "schedule", "output")
)


def step_range(text: str) -> tuple[int, int]:
    """First and last step of "10-12" or "10", as a type of an option."""
    first, dash, last = text.partition("-")
    if (
        first.isdecimal()
        and (last.isdecimal() or not dash)
        and 1 <= int(first) <= int(last or first)
    ):
        return int(first), int(last or first)
    raise argparse.ArgumentTypeError(
        f"got {text!r}, accepted: FIRST-LAST, such as 10-12, or one step, from 1"
    )


@dataclass(kw_only=True)
class PretrainOptions(RunOptions):
    """Pretrain a GPT with DeepSpeed and Megatron-core. Started by `deepspeed launch/pretrain.py
    ...` or `torchrun launch/pretrain.py ...`.
    """

    deepspeed_config: LocalPath = _deepspeed(
        flags=("--deepspeed_config", "--deepspeed-config"), metavar="FILE"
    )
    """DeepSpeed JSON, with or without a "coat" block: a path, or a name in configs/deepspeed
    such as zero2
    """
    deepspeed: bool = _deepspeed(False)
    """accepted for habit; DeepSpeed always runs"""
    local_rank: int | None = _deepspeed(None, flags=("--local_rank", "--local-rank"))
    """set by the launcher; LOCAL_RANK works as well"""
    distributed_timeout_minutes: float | None = _deepspeed(None, metavar="MINUTES", least=0.1)
    """how long ranks wait for one that does not come (default: torch's, 10 with NCCL and 30 with
    gloo)
    """
    model: LocalPath | None = _model(None, metavar="FILE")
    """description: a path, or a name in configs/models such as llama2-7b (default: that of
    --init-from)
    """
    init_from: LocalPath | None = _model(None, metavar="DIR")
    """weights to start with, at step 0 with a new optimizer: a Hugging Face folder or a training
    checkpoint. With --load auto, where there is nothing to
    continue
    """
    model_override: list[str] = _model([], metavar="KEY=VALUE", action="extend")
    """replace values of the description"""
    seed: int = _model(1234, least=0)
    """of initial weights, data order and dropout"""
    dry_run: bool = _memory(False)
    """print what the run needs (launch/planner.py), and end"""
    json: bool = _memory(False)
    """with --dry-run: as plain values"""
    data: list[str] = _data(metavar="[WEIGHT ]PREFIX")
    """output prefix of prepare_data.py, .bin and .idx may follow, or a description of Dolma's token
    files (JSON, YAML; docs/data.md); several are blended by weight
    """
    split: str = _data("950,40,10")
    """parts of train, valid and test"""
    separate_documents: bool = _data(False)
    """keep the documents of a sequence apart: attention within each, positions that begin again, no
    loss for what follows the end of one
    """
    num_workers: int = _data(0, least=0)
    """data loader processes of a rank"""
    data_cache: LocalPath | None = _data(None, metavar="DIR")
    """where sample indices are kept (default: beside the data)"""
    train_steps: int = _schedule(least=1)
    """optimizer steps of the whole run"""
    stop_at_step: int | None = _schedule(None, least=1)
    """save and leave after this step; the schedule stays that of --train-steps"""
    lr: float | None = _schedule(None, least=0.0)
    """peak learning rate (default: optimizer.params.lr)"""
    min_lr: float = _schedule(0.0, least=0.0)
    """learning rate at the end of the decay"""
    lr_schedule: Literal["cosine", "linear", "constant"] = _schedule("cosine")
    """shape after warm-up"""
    warmup_steps: int = _schedule(0, least=0)
    """steps from 0 to the peak"""
    lr_decay_steps: int | None = _schedule(None, least=1)
    """step at which --min-lr is reached (default: --train-steps, at least 2)"""
    max_bad_steps: int = _schedule(5, least=1)
    """stop after so many steps in a row with a non-finite loss or gradient norm"""
    eval_interval: int = _schedule(0, least=0)
    """steps between evaluations on the held-out data, which the last step is followed by, too; 0
    = never
    """
    eval_steps: int = _schedule(10, least=1)
    """micro-batches a rank and evaluation"""
    eval_only: bool = _schedule(False)
    """evaluate the weights of --load, which may be all that --init-from takes, and end; nothing is
    saved
    """
    output: LocalPath | None = _output(None, flags=("--output", "--run"), metavar="DIR")
    """folder for metrics.jsonl and memory.json (under torchrun write --output: it takes --run
    for its own)
    """
    tensorboard: LocalPath | None = _output(None, metavar="DIR")
    """also write TensorBoard events; `wandb sync --sync-tensorboard DIR` takes them to W&B"""
    profile_steps: Annotated[tuple[int, int], step_range] | None = _output(
        None, metavar="FIRST-LAST"
    )
    """write a trace of these steps of rank 0 into --output, for chrome://tracing or Perfetto"""
    log_level: Literal["debug", "info", "warning", "error"] = _output("info")
    """debug: also what DeepSpeed's, Megatron's and torch's loggers say; info: this program's lines,
    and libraries' warnings; warning: warnings and errors only; error: errors only
    """
    save: LocalPath | None = _output(None, metavar="DIR")
    """folder for checkpoints; also saves at the end and on SIGTERM, SIGINT"""
    save_interval: int = _output(0, least=0)
    """steps between checkpoints; 0 = only at the end"""
    keep_last: int = _output(0, least=0)
    """checkpoints kept in --save; 0 = all"""
    load: LocalPath | None = _output(None, metavar="DIR|auto")
    """continue from this folder's latest checkpoint; auto = from --save where it has one, else
    start
    """
    overwrite: bool = _output(False)
    """start anew where an earlier run has written: its checkpoints go when the first new one is
    complete, its metrics.jsonl is kept under another name
    """

    def check(self) -> None:
        """Refuse values that contradict each other or are out of range, all at once.

        Raises:
            CoatConfigError: one line for each.
        """
        last = self.train_steps
        end, saves, several = (
            self.lr_decay_steps or last,
            self.save is not None,
            self.tensor_parallel > 1,
        )
        fresh = self.init_from is None or self.load in (None, "auto")
        continues = f"absent with --load {self.load}, which continues with the weights there"
        problems = [
            *out_of_range(self),
            *self.refused(
                (
                    "warmup_steps",
                    self.lr_schedule == "constant" or self.warmup_steps <= end,
                    f"0 to the end ({end})",
                ),
                (
                    "stop_at_step",
                    (self.stop_at_step or 1) <= last,
                    f"1 to the run's last step ({last})",
                ),
                ("save_interval", saves or not self.save_interval, "0 without --save"),
                ("load", saves or self.load != "auto", "auto only with --save"),
                ("init_from", fresh, continues),
                (
                    "eval_only",
                    not self.eval_only or self.load or self.init_from,
                    "only with --load or --init-from",
                ),
                (
                    "overwrite",
                    not self.overwrite or self.load != "auto",
                    "not with --load auto, which continues",
                ),
                (
                    "sequence_parallel",
                    several or not self.sequence_parallel,
                    "only with --tensor-parallel 2 or more",
                ),
                (
                    "virtual_stages",
                    self.pipeline_parallel > 1 or self.virtual_stages <= 1,
                    "1 with one pipeline stage",
                ),
                (
                    "profile_steps",
                    self.profile_steps is None or self.output is not None,
                    "only with --output",
                ),
                *(
                    (n, self.dry_run or not getattr(self, n), "only with --dry-run")
                    for n in ("json", "gpu", "gpus")
                ),
            ),
            *check_recompute(self),
        ]
        if not (self.model or self.init_from or self.eval_only):
            problems.append(
                "--model: missing, accepted: a description, or --init-from, which has one"
            )
        if problems:
            from coat_dist import CoatConfigError  # late: it imports torch

            raise CoatConfigError("\n".join(problems))

    def refused(self, *checks: tuple[str, object, str]) -> list[str]:
        """A line for each field that does not hold: its name, whether it holds, what is
        accepted.
        """
        return [
            f"--{name.replace('_', '-')}: got {getattr(self, name)!r}, accepted: {accepted}"
            for name, good, accepted in checks
            if not good
        ]


def parser() -> Parser:
    """The parser of ``pretrain.py``."""
    return options_parser(PretrainOptions, "pretrain.py")


def parse(argv: Sequence[str] | None = None) -> PretrainOptions:
    """The command line, parsed and checked; rank 0 prints typing errors, with status 2.

    Raises:
        CoatConfigError: see :meth:`PretrainOptions.check`.
    """
    options = PretrainOptions(**vars(parser().parse_args(argv)))
    options.data = [without_suffix(given) for given in options.data]
    options.check()
    if options.eval_only:
        # Without the optimizer's state: any layout, and numerics that did not train the weights.
        continued = options.save if options.load == "auto" else options.load
        options.init_from, options.load = continued or options.init_from, None
        options.save, options.eval_interval = None, 1
    return options
