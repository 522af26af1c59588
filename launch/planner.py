"""What a training run needs of a GPU's memory, before it is started.

    python -m launch.planner --model llama2-7b --deepspeed_config zero2 --gpus 8 --gpu h100

Exit status: 0 an answer was given, whatever it says; 2 settings that cannot be used or planned.
"""

from __future__ import annotations

import os
import sys

from launch.common.command_line import RunOptions, options_parser, out_of_range
from launch.memory.planner_options import PlannerOptions

if __name__ == "__main__":
    # A misspelt option is refused before torch is imported.
    options_parser(PlannerOptions, "planner.py").parse_args()

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.common.log_level import set_log_level, silence_deepspeed
from launch.common.settings import MICRO, STEPS, TOTAL, load_settings
from launch.memory.fit import dry_run
from launch.train.initial import initial_weights, length_note
from launch.train.plan import assemble
from launch.train.pretrain_options import PretrainOptions


def parse(argv: Sequence[str] | None = None) -> tuple[Any, Any]:
    """The ``launch.train`` plan that the command line describes, that of ``pretrain.py`` with the
    same options; and the model on paper, of ``--library transformers``.

    Raises:
        CoatConfigError: settings that cannot be used or planned.
        CheckpointError: --model is a folder without weights.
    """
    args = PlannerOptions(**vars(options_parser(PlannerOptions, "planner.py").parse_args(argv)))
    set_log_level(args.log_level)
    silence_deepspeed()
    problems = out_of_range(args)
    if (stages := args.pipeline_parallel) > 1:
        problems.append(
            f"--pipeline-parallel: got {stages}, accepted: 1 (the planner knows runs of one stage)"
        )
    if args.library == "transformers" and (tp := args.tensor_parallel) > 1:
        problems.append(f"--tensor-parallel: got {tp}, accepted: 1 with --library transformers")
    if args.library != "transformers" and args.lora:
        problems.append(f"--lora: got {args.lora}, accepted: it with --library transformers")
    if problems:
        raise CoatConfigError("\n".join(problems))
    overrides = list(args.model_override)
    overrides += [f"seq_length={args.seq_length}"] if args.seq_length else []
    folder = os.path.isdir(args.model)
    options = PretrainOptions(
        model=None if folder else args.model,
        init_from=args.model if folder else None,
        model_override=overrides,
        deepspeed_config=args.deepspeed_config,
        json=args.json,
        data=[],
        train_steps=1,
        lr=1e-4,
        dry_run=True,
        **{one.name: getattr(args, one.name) for one in fields(RunOptions)},
    )
    options.check()
    configuration: Any = args.deepspeed_config
    library = note = None
    if args.library == "transformers":
        from launch.memory.library import read_model, read_settings  # late: transformers

        library, model, note = read_model(args.model, args.seq_length, args.lora)
        configuration = read_settings(configuration, model.hidden_size)
    else:
        model, weights = initial_weights(options)
        note = length_note(model.seq_length, weights, "--model")
        if args.vocab_size is not None:
            model = model.with_vocab(args.vocab_size)
        if model.vocab_size is None:
            raise CoatConfigError("model.vocab_size: got null, accepted: a number, or --vocab-size")
    settings, coat = load_settings(configuration, tp=args.tensor_parallel)
    if args.accumulation is not None:
        settings[STEPS] = args.accumulation
        if args.micro_batch is not None or settings.get(MICRO) is not None:
            settings.pop(TOTAL, None)  # it follows
    return assemble(options, args.gpus or 1, settings, coat, model, warning=note), library


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    try:
        plan, library = parse(argv)
        return dry_run(plan, library=library)
    except (CoatConfigError, CheckpointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
