"""The runs that ``planner.py`` and ``pretrain.py --dry-run`` plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from coat_dist import CoatConfig, CoatConfigError
from launch.command_line import RunOptions, options_parser, out_of_range
from launch.find_config import read_config
from launch.log_level import set_log_level
from launch.model.config import ModelConfig, described_model, load_model_config

from .gpus import GPU, GPUS, find_gpu, memory_bytes
from .options import PlannerOptions
from .report import show
from .run import Run
from .search import with_largest_micro_batch

__all__ = ["chosen_gpu", "dry_run", "parse", "silence_deepspeed"]

_CONTEXT = 2**29  # bytes of this process's own CUDA context
_MEGATRONS = (
    "tensor_parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "model_override",
)


def chosen_gpu(args: Any) -> GPU:
    """The GPU that ``--gpu`` and ``--gpu-memory`` mean; without either the one of this machine,
    else an H100.
    """
    import torch

    gpu, changes = GPUS["h100"] if args.gpu is None else find_gpu(args.gpu), {}
    if args.gpu is None and args.gpu_memory is None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        with suppress(CoatConfigError):  # an unknown GPU has an H100's rates
            gpu = find_gpu(torch.cuda.get_device_name())
        changes = {"memory": total, "in_use": max(0, total - free - _CONTEXT)}
    if args.gpu_memory is not None:
        changes["memory"] = memory_bytes(args.gpu_memory)
    if args.other_memory is not None:
        changes["other"] = memory_bytes(args.other_memory, "--other-memory")
    return gpu.but(**changes)


def silence_deepspeed() -> None:
    """Suppress DeepSpeed's message that it found no GPU; call it before DeepSpeed is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def parse(argv: Sequence[str] | None = None) -> tuple[Run, GPU, PlannerOptions]:
    """The run that ``planner.py``'s command line describes: that of ``pretrain.py`` with the same
    options.

    Raises:
        CoatConfigError: settings that cannot be used or planned.
        CheckpointError: --model is a folder without weights.
    """
    args = PlannerOptions(**vars(options_parser(PlannerOptions, "planner.py").parse_args(argv)))
    set_log_level(args.log_level)
    silence_deepspeed()
    from launch.train.arguments import PretrainOptions
    from launch.train.plan import assemble
    from launch.train.settings import MICRO, STEPS, TOTAL, load_settings

    problems = out_of_range(args)
    problems += [
        f"--{name.replace('_', '-')}: got {getattr(args, name)}, accepted: 1 (the planner knows "
        "runs of one stage)"
        for name in ("pipeline_parallel", "virtual_stages")
        if getattr(args, name) != 1
    ]
    if args.library == "transformers":
        given = [(name, getattr(args, name)) for name in _MEGATRONS]
        wrong = [one for one in given if one[1] not in (None, 1, [], "full")]
        problems += [
            f"--{k.replace('_', '-')}: got {v}, accepted: only with --library megatron"
            for k, v in wrong
        ]
    if problems:
        raise CoatConfigError("\n".join(problems))
    shared = {one.name: getattr(args, one.name) for one in fields(RunOptions)}
    shared |= {"data": [], "train_steps": 1, "lr": 1e-4, "dry_run": True}
    options = PretrainOptions(model=args.model, deepspeed_config=args.deepspeed_config, **shared)
    options.check()
    configuration: Any = args.deepspeed_config
    if args.library == "transformers":
        from .library import read_model, read_settings

        library, model = read_model(args.model, args.seq_length)
        configuration, note = read_settings(configuration, model.hidden_size), None
    else:
        library, (model, note) = None, _model(args)
    settings, coat = load_settings(configuration, tp=args.tensor_parallel, stage=args.zero_stage)
    coat = _with_activation(args, settings, coat)
    if args.accumulation is not None:
        settings[STEPS] = args.accumulation
        if args.micro_batch is not None or settings.get(MICRO) is not None:
            settings.pop(TOTAL, None)  # it follows
    gpu = chosen_gpu(args)
    return (
        _planned(
            assemble(options, args.gpus or 1, settings, coat, model, warning=note), gpu, library
        ),
        gpu,
        args,
    )


def _planned(p: Any, gpu: GPU, library: Any = None) -> Run:
    run = Run.of_plan(p).but(library=library)
    return with_largest_micro_batch(run, gpu) if p.auto else run


def _model(args: PlannerOptions) -> tuple[ModelConfig, str | None]:
    """The model of a description or of a folder of weights (config.json is enough), and a note
    about it.
    """
    overrides, path, note = list(args.model_override), Path(args.model), None
    overrides += [f"seq_length={args.seq_length}"] if args.seq_length else []
    if (
        path.name == "config.json"
        and path.is_file()
        and "model_type" in read_config("--model", path, "models")
    ):
        path = path.parent
    if path.is_dir():
        from launch.train.initial import length_note
        from launch.weights import open_weights

        weights = open_weights(path, tensors=False)
        model = described_model(weights.model.model_dump(exclude_defaults=True), overrides)
        note = length_note(model.seq_length, weights, "--model")
    else:
        model = load_model_config(args.model, overrides)
    if args.vocab_size is not None:
        model = model.with_vocab(args.vocab_size)
    if model.vocab_size is None:
        raise CoatConfigError("model.vocab_size: got null, accepted: a number, or --vocab-size")
    return model, note


def _with_activation(
    args: PlannerOptions, settings: dict[str, Any], coat: CoatConfig | None
) -> CoatConfig | None:
    """The block with ``--attention`` and ``--loss``, which also go into ``settings``."""
    given = {
        key: value for key in ("attention", "loss") if (value := getattr(args, key)) is not None
    }
    if not given:
        return coat
    if coat is None or not coat.activation.enabled:
        key, value = next(iter(given.items()))
        raise CoatConfigError(
            f'--{key}: got {value}, accepted: only with a "coat" block that has activation.enabled'
        )
    settings["coat"] = {
        **settings["coat"],
        "activation": {**settings["coat"].get("activation", {}), **given},
    }
    return CoatConfig.parse(settings["coat"])


def dry_run(p: Any, rank: int = 0) -> int:
    """Print, on rank 0, what a ``launch.train`` plan needs, without a process group, a GPU or a
    model; exit status.
    """
    gpu = chosen_gpu(p.args)
    run = _planned(p, gpu)
    if rank == 0:
        show(run, gpu, p.args.json)
    return 0
