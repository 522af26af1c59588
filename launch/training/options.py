"""Options that every program that trains has: of DeepSpeed, memory, the schedule and the output."""

from __future__ import annotations

import argparse

from launch.command_line import local_path, number, whole_number
from launch.log_level import add_log_level
from launch.planning.arguments import add_gpu_options, micro_batch
from launch.planning.recompute import add_recompute_options

__all__ = ["MEANT", "deepspeed_options", "memory_options", "output_options", "schedule_options"]

# What Megatron's programs and transformers call these options.
MEANT = {
    **dict.fromkeys(("adam-beta1", "adam-beta2", "adam-eps", "weight-decay"), "optimizer.params in the DeepSpeed file"),
    **dict.fromkeys(("clip-grad", "max-grad-norm"), "gradient_clipping in the DeepSpeed file"),
    "config": "--deepspeed_config",
    "data-path": "--data",
    "decay-steps": "--lr-decay-steps",
    "eval-iters": "--eval-steps",
    "eod-mask-loss": "--separate-documents",
    "global-batch-size": "train_batch_size in the DeepSpeed file",
    "gradient-accumulation-steps": "gradient_accumulation_steps in the DeepSpeed file",
    "iterations": "--train-steps",
    **dict.fromkeys(("ep", "ep-size", "expert-model-parallel-size", "expert-parallel-size"), "--expert-parallel"),
    "finetune-from": "--init-from",
    "from-pretrained": "--init-from",
    "init-from-hf": "--init-from",
    "learning-rate": "--lr",
    "load-checkpoint": "--load",
    "logging-dir": "--tensorboard",
    "logging-level": "--log-level",
    "lr-decay-iters": "--lr-decay-steps",
    "lr-decay-style": "--lr-schedule",
    "lr-scheduler-type": "--lr-schedule",
    "lr-warmup-iters": "--warmup-steps",
    "max-steps": "--train-steps",
    "micro-batch-size": "--micro-batch",
    "model-config": "--model",
    "model-name-or-path": "--init-from",
    "out": "--output",
    "pretrained-checkpoint": "--init-from",
    "output-dir": "--output",
    "reset-attention-mask": "--separate-documents",
    "reset-position-ids": "--separate-documents",
    "num-layers-per-virtual-pipeline-stage": "--virtual-stages",
    "num-virtual-stages-per-pipeline-rank": "--virtual-stages",
    "pipeline-model-parallel-size": "--pipeline-parallel",
    "pp": "--pipeline-parallel",
    "virtual-pipeline-model-parallel-size": "--virtual-stages",
    "vpp": "--virtual-stages",
    "profile": "--profile-steps",
    "profile-step-end": "--profile-steps",
    "profile-step-start": "--profile-steps",
    "report-to": "--wandb",
    "per-device-train-batch-size": "--micro-batch",
    "recompute": "--recompute-granularity",
    "recompute-activations": "--recompute-granularity",
    "resume": "--load",
    "resume-from-checkpoint": "--load",
    "run-name": "--wandb-name",
    "save-steps": "--save-interval",
    "save-total-limit": "--keep-last",
    "steps": "--train-steps",
    "tensor-model-parallel-size": "--tensor-parallel",
    "tensorboard-dir": "--tensorboard",
    "tp": "--tensor-parallel",
    "train-iters": "--train-steps",
    "use-distributed-optimizer": "zero_optimization.stage in the DeepSpeed file",
    "verbosity": "--log-level",
    "wandb-exp-name": "--wandb-name",
    "wandb-project": "--wandb",
    "wandb-run-name": "--wandb-name",
    "wandb-save-dir": "--output",
}


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


def memory_options(p: argparse.ArgumentParser) -> None:
    """Of every program that trains."""
    g = p.add_argument_group("memory")
    g.add_argument(
        "--micro-batch",
        type=micro_batch,
        default=None,
        metavar="N|auto",
        help="samples of a forward pass on a rank, in place of train_micro_batch_size_per_gpu; auto = the largest that "
        "fits, by the planner and a trial step",
    )
    add_recompute_options(g)
    g.add_argument("--dry-run", action="store_true", help="print what the run needs (launch/planner.py), and end")
    g.add_argument("--json", action="store_true", help="with --dry-run: as plain values")
    add_gpu_options(g)


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
        help="step at which --min-lr is reached (default: --train-steps, at least 2)",
    )
    g.add_argument(
        "--max-bad-steps",
        type=whole_number,
        default=5,
        help="stop after so many steps in a row with a non-finite loss or gradient norm",
    )
    g.add_argument(
        "--eval-interval",
        type=whole_number,
        default=0,
        help="steps between evaluations on the valid split, which the last step is followed by, too; 0 = never",
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
    g.add_argument("--wandb", default=None, metavar="PROJECT", help="also log to Weights & Biases (pip install wandb)")
    g.add_argument("--wandb-name", default=None, metavar="NAME", help="of the run there (default: W&B makes one up)")
    g.add_argument("--wandb-entity", default=None, metavar="NAME", help="user or team there (default: yours)")
    g.add_argument(
        "--wandb-mode",
        choices=["online", "offline"],
        default=None,
        help="offline: into files below --output, for `wandb sync` later (default: what WANDB_MODE says, else online)",
    )
    g.add_argument(
        "--profile-steps",
        default=None,
        metavar="FIRST-LAST",
        help="write a trace of these steps of rank 0 into --output, for chrome://tracing or Perfetto",
    )
    add_log_level(g)
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
