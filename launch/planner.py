"""What a training run needs of a GPU's memory, before it is started.

    python -m launch.planner --model llama2-7b --deepspeed_config zero2 --gpus 8 --gpu h100

Exit status: 0 an answer was given, whatever it says; 2 settings that cannot be used or planned.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would
# find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dataclasses import dataclass
from typing import Literal

from launch.command_line import ConfiguredOptions, LocalPath, option, options_parser


@dataclass(kw_only=True)
class PlannerOptions(ConfiguredOptions):
    """What a training run needs of a GPU's memory, whether it fits, the largest micro-batch, and
    which ZeRO stages and states fit beside it. Needs no GPU and no data.
    """

    model: LocalPath = option(group="model", metavar="FILE", meant="model-config")
    """a path, a name such as llama2-7b, or a folder: of Hugging Face, of convert_hf.py, a
    checkpoint
    """
    library: Literal["megatron", "transformers"] = option("megatron", group="model")
    """what builds the model: Megatron-core, as in pretrain.py, or transformers, as in a
    Trainer's program
    """
    seq_length: int | None = option(None, group="model", metavar="N", least=1)
    """tokens of a sample"""
    json: bool = option(False)
    """print plain values: sizes in bytes"""


if __name__ == "__main__":
    # A misspelt option is refused before torch is imported.
    options_parser(PlannerOptions, "planner.py").parse_args()

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.command_line import RunOptions, one_stage_only, out_of_range
from launch.find_config import read_config
from launch.log_level import set_log_level, silence_deepspeed
from launch.model.config import ModelConfig, described_model, load_model_config
from launch.plan.fit import dry_run

__all__ = ["main", "parse"]

_MEGATRONS = (
    "tensor_parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "model_override",
)


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
    from launch.train.arguments import PretrainOptions
    from launch.train.plan import assemble
    from launch.train.settings import MICRO, STEPS, TOTAL, load_settings

    problems = [*out_of_range(args), *one_stage_only(args, "the planner knows runs of one stage")]
    if args.library == "transformers":
        problems += [
            f"--{name.replace('_', '-')}: got {given}, accepted: only with --library megatron"
            for name in _MEGATRONS
            if (given := getattr(args, name)) not in (None, 1, [], "full")
        ]
    if problems:
        raise CoatConfigError("\n".join(problems))
    options = PretrainOptions(
        model=args.model,
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
        from launch.plan.library import read_model, read_settings

        library, model = read_model(args.model, args.seq_length)
        configuration = read_settings(configuration, model.hidden_size)
    else:
        model, note = _model(args)
    settings, coat = load_settings(configuration, tp=args.tensor_parallel)
    if args.accumulation is not None:
        settings[STEPS] = args.accumulation
        if args.micro_batch is not None or settings.get(MICRO) is not None:
            settings.pop(TOTAL, None)  # it follows
    return assemble(options, args.gpus or 1, settings, coat, model, warning=note), library


def _model(args: PlannerOptions) -> tuple[ModelConfig, str | None]:
    """The model of a description or of a folder of weights (config.json is enough), and a note
    about it.
    """
    overrides, path, note = list(args.model_override), Path(args.model), None
    overrides += [f"seq_length={args.seq_length}"] if args.seq_length else []
    if path.name == "config.json" and "model_type" in read_config("--model", path, "models"):
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
