"""Command line of ``pretrain.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec

from coat_dist import CoatConfigError
from launch.command_line import (
    DefaultsHelp,
    Parser,
    add_parallel_options,
    add_pipeline_options,
    local_path,
    whole_number,
)
from launch.data.dataset import without_suffix
from launch.model.experts import ExpertsConfig
from launch.planning.recompute import check_recompute
from launch.training.options import MEANT, deepspeed_options, memory_options, output_options, schedule_options
from launch.training.profile import parse_steps

__all__ = ["UNKNOWN_STEPS", "check_arguments", "parse", "parser"]

UNKNOWN_STEPS = 10**9
"""``train_steps`` of a run whose data have not been read: any number will do for checks and batch sizes."""

_SAME = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length",
         "vocab_size", "normalization", "rotary_base", "hidden_dropout", "attention_dropout")  # fmt: skip
# Megatron-LM's options of a model, and what its description calls them here.
_OF_THE_MODEL = {
    **{name.replace("_", "-"): name for name in _SAME},
    "disable-bias-linear": "linear_bias",
    "group-query-attention": "num_query_groups",
    "init-method-std": "init_std",
    "kv-channels": "head_size",
    "make-vocab-size-divisible-by": "vocab_multiple",
    "max-position-embeddings": "seq_length",
    "norm-epsilon": "norm_eps",
    "num-experts": "num_moe_experts",
    **{
        name.replace("_", "-"): name
        for name in ExpertsConfig.model_fields
        if name.startswith("moe_") or name == "num_moe_experts"
    },
    "qk-layernorm": "qk_norm",
    "swiglu": "activation",
    "untie-embeddings-and-output-weights": "tie_embeddings",
}


def parser() -> argparse.ArgumentParser:
    """The options, in the groups that ``--help`` shows."""
    p = Parser(
        prog="pretrain.py",
        description="Pretrain a GPT with DeepSpeed and Megatron-core. Started by "
        "`deepspeed launch/pretrain.py ...` or `torchrun launch/pretrain.py ...`.",
        formatter_class=DefaultsHelp,
        meant={**MEANT, **{name: f"--model-override {key}=..." for name, key in _OF_THE_MODEL.items()}},
    )
    deepspeed_options(p)
    _model_and_data(p)
    schedule_options(p)
    output_options(p)
    return p


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
    add_parallel_options(g)
    add_pipeline_options(g)
    g.add_argument("--seed", type=whole_number, default=1234, help="of initial weights, data order and dropout")

    memory_options(p)
    g = p.add_argument_group("data")
    g.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[WEIGHT ]PREFIX",
        help="output prefix of prepare_data.py, .bin and .idx may follow, or a description of Dolma's token files "
        "(JSON, YAML; docs/data.md); several are blended by weight",
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


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse values that make no sense, all at once.

    Raises:
        CoatConfigError: one line for each argument.
    """
    problems = []

    def require(name: str, good: bool, accepted: str) -> None:
        if not good:
            problems.append(f"--{name}: got {getattr(args, name.replace('-', '_'))!r}, accepted: {accepted}")

    steps = f"--train-steps ({args.train_steps})"
    if getattr(args, "epochs", None) is not None:  # of finetune.py, whose steps follow from the data
        known = "" if args.train_steps == UNKNOWN_STEPS else f"{args.train_steps} "
        steps = f"the {known}steps that --epochs makes"
    for name in (
        "tensor-parallel",
        "pipeline-parallel",
        "virtual-stages",
        "expert-parallel",
        "train-steps",
        "max-bad-steps",
        "eval-steps",
    ):
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
        f"0 to {f'--lr-decay-steps ({end})' if args.lr_decay_steps else steps}",
    )
    require("seed", 0 <= args.seed < 2**31, "an integer from 0 to 2^31 - 1")
    require("stop-at-step", args.stop_at_step is None or 1 <= args.stop_at_step <= args.train_steps, f"1 to {steps}")
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
    require(
        "virtual-stages",
        args.virtual_stages <= 1 or args.pipeline_parallel > 1,
        "1 without --pipeline-parallel 2 or more",
    )
    for name in ("tensorboard", "wandb"):
        if getattr(args, name) is not None and not _installed(name):
            problems.append(f"--{name}: needs the package of that name: pip install {name}")
    for name in ("wandb-name", "wandb-entity", "wandb-mode"):
        require(name, getattr(args, name.replace("-", "_")) is None or args.wandb is not None, "only with --wandb")
    require("wandb", args.wandb is None or args.wandb.strip() != "", "the name of a project")
    if args.profile_steps is not None:
        require("profile-steps", args.output is not None, "only with --output")
        try:
            possible = parse_steps(args.profile_steps)[1] <= args.train_steps
        except ValueError:
            possible = False
        require("profile-steps", possible, f"FIRST-LAST, such as 10-12, or one step, from 1 to {steps}")
    problems += check_recompute(args)
    require("json", not args.json or args.dry_run, "only with --dry-run")
    require("gpu", args.gpu is None or args.dry_run, "only with --dry-run")
    require("gpus", args.gpus is None or args.dry_run, "only with --dry-run (a launcher says how many there are)")
    require("gpus", args.gpus is None or args.gpus >= 1, "an integer >= 1")
    if problems:
        raise CoatConfigError("\n".join(problems))


def _installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name is none: W&B leaves one where it has run."""
    try:
        spec = find_spec(package)
    except ValueError:  # a module without one, put there by hand
        return True
    return spec is not None and spec.origin is not None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line. What is typed wrong is printed by rank 0, with status 2.

    Raises:
        CoatConfigError: see :func:`check_arguments`.
    """
    args = parser().parse_args(argv)
    args.data = [without_suffix(given) for given in args.data]
    check_arguments(args)
    return args
