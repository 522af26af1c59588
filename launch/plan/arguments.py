"""Command line of ``planner.py``, and what it and ``pretrain.py --dry-run`` make of theirs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from coat_dist import CoatConfig, CoatConfigError
from launch.command_line import (
    DefaultsHelp,
    Parser,
    RunOptions,
    add_options,
    add_parallel_options,
    add_pipeline_options,
    local_path,
    micro_batch,
    one_stage_only,
    whole_number,
)
from launch.find_config import find_config, read_config
from launch.log_level import add_log_level, set_log_level
from launch.model.config import described_model
from launch.model.gpt import ModelConfig, load_model_config

from .gpus import GPU, GPUS, find_gpu, memory_bytes
from .recompute import add_recompute_options, check_recompute, recompute_options
from .run import Run

__all__ = ["chosen_gpu", "parse", "silence_deepspeed"]

_CONTEXT = 2**29
"""Of this process, which has asked."""
_MEANT = {
    "pipeline-model-parallel-size": "--pipeline-parallel",
    "pp": "--pipeline-parallel",
    "attention-backend": "--attention",
    "config": "--deepspeed_config",
    "ds-config": "--deepspeed_config",
    "gpu-mem": "--gpu-memory",
    "memory": "--gpu-memory",
    "micro-batch-size": "--micro-batch",
    "model-config": "--model",
    "nproc-per-node": "--gpus",
    "num-gpus": "--gpus",
    "num_gpus": "--gpus",
    "per-device-train-batch-size": "--micro-batch",
    "stage": "--zero-stage",
    "expert-model-parallel-size": "--expert-parallel",
    "tensor-model-parallel-size": "--tensor-parallel",
    "tp": "--tensor-parallel",
    "world-size": "--gpus",
    "zero": "--zero-stage",
}


MOST_LAYERS = 2000
"""Layers that are gone through, one by one, for each moment of a step: more would take minutes."""


def add_gpu_options(group: Any) -> None:
    """Which GPUs are planned for."""
    add_options(group, RunOptions, ("gpus", "gpu", "gpu_memory", "other_memory"))


def chosen_gpu(args: argparse.Namespace) -> GPU:
    """The GPU that ``--gpu`` and ``--gpu-memory`` mean; without either the one of this machine, else an H100.

    Raises:
        CoatConfigError: no such GPU, or no size.
    """
    import torch

    changes: dict[str, int] = {}
    if args.gpu is not None:
        gpu = find_gpu(args.gpu)
    elif torch.cuda.is_available() and args.gpu_memory is None:
        free, total = torch.cuda.mem_get_info()
        try:
            gpu = find_gpu(torch.cuda.get_device_name(), any_memory=True)
        except CoatConfigError:
            gpu = GPUS["h100"]
        changes = {"memory": total, "in_use": max(0, total - free - _CONTEXT)}
    else:
        gpu = GPUS["h100"]
    if args.gpu_memory is not None:
        changes["memory"] = memory_bytes(args.gpu_memory)
    if args.other_memory is not None:
        changes["other"] = memory_bytes(args.other_memory, "--other-memory")
    return gpu.but(**changes)


def silence_deepspeed() -> None:
    """Before DeepSpeed is imported: it would say on the screen that it found no GPU."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _run(
    model: ModelConfig,
    settings: Mapping[str, Any],
    coat: CoatConfig | None,
    args: argparse.Namespace,
    world: int,
    micro: int,
    accumulation: int,
) -> Run:
    """The run that a command line of ``planner.py`` describes."""
    return Run(
        model=model,
        settings=settings,
        coat=coat,
        dp=world // args.tensor_parallel,
        tp=args.tensor_parallel,
        sequence_parallel=args.sequence_parallel,
        micro=micro,
        accumulation=accumulation,
        recompute=recompute_options(args, model, coat),
    )


def _parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="planner.py",
        description="What a training run needs of a GPU's memory, whether it fits, the largest micro-batch, with the "
        '"coat" block and without, and how long a step takes. Needs no GPU and no data.',
        formatter_class=DefaultsHelp,
        meant=_MEANT,
    )
    g = p.add_argument_group("the run, as for pretrain.py")
    g.add_argument(
        "--model",
        type=local_path,
        required=True,
        metavar="FILE",
        help="a path, a name such as llama2-7b, or a folder: of Hugging Face, of convert_hf.py, a checkpoint",
    )
    g.add_argument("--model-override", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="other values")
    g.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        type=local_path,
        default="zero2",
        metavar="FILE",
        help="DeepSpeed JSON: a path, or a name such as zero2-bf16",
    )
    add_parallel_options(g)
    add_pipeline_options(g)
    g.add_argument(
        "--micro-batch",
        type=micro_batch,
        default=None,
        metavar="N|auto",
        help="samples of a forward pass; auto = the largest that fits (default: the configuration's)",
    )
    g.add_argument("--accumulation", type=whole_number, default=None, metavar="N", help="forward passes of a step")
    g.add_argument("--seq-length", type=whole_number, default=None, metavar="N", help="tokens of a sample")
    g.add_argument("--vocab-size", type=whole_number, default=None, metavar="N", help="where the model names none")
    add_recompute_options(g)
    g = p.add_argument_group("in place of the configuration's")
    g.add_argument("--zero-stage", type=whole_number, default=None, choices=[1, 2, 3], help="ZeRO stage")
    g.add_argument("--attention", default=None, choices=["bf16", "fp8"], help="what attention keeps")
    g.add_argument("--loss", default=None, choices=["chunked", "plain"], help="whether all logits are held")
    add_gpu_options(p.add_argument_group("GPUs"))
    p.add_argument("--json", action="store_true", help="print plain values: sizes in bytes, times in seconds")
    add_log_level(p)
    return p


def parse(argv: Sequence[str] | None = None) -> tuple[Run, GPU, argparse.Namespace]:
    """Parse ``planner.py``'s command line; what is typed wrong is one line, with status 2.

    Raises:
        CoatConfigError: settings that cannot be used or planned.
        CheckpointError: --model is a folder without weights.
    """
    from launch.train.settings import load_settings

    args = _parser().parse_args(argv)
    set_log_level(args.log_level)
    silence_deepspeed()
    world = 1 if args.gpus is None else args.gpus
    problems = check_recompute(args)
    problems += one_stage_only(args, "the planner knows runs of one stage")
    for name in ("gpus", "tensor_parallel", "accumulation", "seq_length", "vocab_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')}: got {value}, accepted: an integer >= 1")
    if args.tensor_parallel >= 1 and world % args.tensor_parallel:
        problems.append(f"--tensor-parallel: got {args.tensor_parallel}, accepted: a divisor of --gpus ({world})")
    if args.sequence_parallel and args.tensor_parallel == 1:
        problems.append("--sequence-parallel: got True, accepted: only with --tensor-parallel 2 or more")
    if problems:
        raise CoatConfigError("\n".join(problems))
    settings, coat = load_settings(args.deepspeed_config, tp=args.tensor_parallel, stage=args.zero_stage)
    overrides = list(args.model_override)
    overrides += [f"seq_length={args.seq_length}"] if args.seq_length else []
    model, note = _model(args.model, overrides)
    if args.vocab_size is not None:
        model = model.with_vocab(args.vocab_size)
    if model.vocab_size is None:
        raise CoatConfigError("model.vocab_size: got null, accepted: a number, or --vocab-size")
    if model.num_layers > MOST_LAYERS:
        raise CoatConfigError(f"model.num_layers: got {model.num_layers}, accepted: up to {MOST_LAYERS} here")
    model.check_parallel(args.tensor_parallel, args.sequence_parallel)
    model.check_expert_parallel(args.expert_parallel, world // args.tensor_parallel)
    for key in ("attention", "loss"):
        if (value := getattr(args, key)) is None:
            continue
        if coat is None or not coat.activation.enabled:
            raise CoatConfigError(
                f'--{key}: got {value}, accepted: only with a "coat" block that has activation.enabled'
            )
        settings["coat"].setdefault("activation", {})[key] = value
        coat = CoatConfig.parse(settings["coat"])
    run, gpu, args = _with_batch(args, model, settings, coat, world)
    return (run if note is None else run.but(told=(note,))), gpu, args


def _model(given: str, overrides: Sequence[str]) -> tuple[ModelConfig, str | None]:
    """A description, or what a folder of weights says of its model: of a Hugging Face folder config.json alone is read.
    And what is to be noted."""
    if os.path.isfile(given):
        try:
            theirs = "model_type" in read_config("--model", given, "models")
        except CoatConfigError as problem:
            told = str(problem).partition(", accepted: ")[0]
            raise CoatConfigError(f"{told}, accepted: a model's description (JSON), config.json, or a folder") from None
        if theirs and os.path.basename(given) == "config.json":
            given = os.path.dirname(given) or "."
    if not os.path.isdir(given):
        return load_model_config(given, overrides), None
    try:
        find_config("--model", given, "models")  # a name of ours, beside which somebody has a folder
    except CoatConfigError:
        from launch.train.initial import length_note
        from launch.weights import open_weights

        weights = open_weights(given, tensors=False)
        model = described_model(weights.model.model_dump(exclude_defaults=True), overrides)
        note = length_note(model.seq_length, weights, "--model")
        return model, None if note is None else note.removeprefix("note: ")
    return load_model_config(given, overrides), None


def _with_batch(args: argparse.Namespace, model: ModelConfig, settings: dict[str, Any], coat: Any, world: int) -> Any:
    """The run with the batch sizes that ``pretrain.py`` would take; the GPU and the arguments."""
    from launch.train.settings import MICRO, STEPS, TOTAL, auto_batch, batch_sizes

    from .search import candidates

    gpu, dp = chosen_gpu(args), world // args.tensor_parallel
    if args.accumulation is not None:
        settings[STEPS] = args.accumulation
        if args.micro_batch is not None or settings.get(MICRO) is not None:
            settings.pop(TOTAL, None)  # it follows
    if auto_batch(args, settings, dp):
        smallest = batch_sizes(settings, dp)  # the micro-batch is 1 by now: what is told where nothing fits
        run = _run(model, settings, coat, args, world, smallest.micro, smallest.accumulation)
        return next(candidates(run, gpu, settings.get(TOTAL), settings.get(STEPS)), run), gpu, args
    sizes = batch_sizes(settings, dp)
    return _run(model, settings, coat, args, world, sizes.micro, sizes.accumulation), gpu, args


def as_json(said: Mapping[str, Any]) -> str:
    """An answer as text."""
    return json.dumps(said, indent=2)
