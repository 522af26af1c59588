"""What a run is: every setting read and checked before a device is touched."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from coat_dist import CoatConfig, CoatConfigError
from coat_dist.settings import Settings
from launch.common.errors import DataError
from launch.common.settings import (
    STEPS,
    TOTAL,
    BatchSizes,
    auto_batch,
    batch_sizes,
    load_settings,
    peak_lr,
)
from launch.convert.weights import CARRIED, files_in
from launch.data.blend import check_one_tokenizer, parse_blend, read_info, telling
from launch.data.mixture import is_mixture, read_mixture
from launch.model.gpt import ModelConfig, parameter_count
from launch.train.initial import initial_weights, length_note, tokenizer_warning
from launch.train.layout import KeptBatch, keep_batch
from launch.train.pretrain_options import PretrainOptions
from launch.train.recompute import recompute_options

_OPTIONS = {"data": "--data", "split": "--split", "cache_dir": "--data-cache"}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate as a pure function of the step, so that a restart needs no state: warm-up,
    then ``kind``.
    """

    lr: float
    """Peak learning rate, reached at step ``warmup_steps``."""
    min_lr: float = 0.0
    """Learning rate at and after ``decay_steps``."""
    warmup_steps: int = 0
    decay_steps: int = 1
    """Step at which ``min_lr`` is reached, counted from the start of training."""
    kind: Literal["cosine", "linear", "constant"] = "cosine"

    def __call__(self, step: int) -> float:
        """The learning rate of step ``step``, the first being 1."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        left = 1.0 - min(
            1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps)
        )
        share = left if self.kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
        return self.min_lr + (self.lr - self.min_lr) * share


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is decided before a device is touched; the same on all ranks."""

    args: PretrainOptions
    settings: dict[str, Any]
    """The DeepSpeed configuration, "coat" block included."""
    coat: CoatConfig | None
    model: ModelConfig
    schedule: Schedule
    batch: BatchSizes
    dp: int
    """Data-parallel ranks."""
    eod: int | None = None
    """The id with which documents end that are kept apart (``--separate-documents``); None =
    they are not.
    """
    sources: dict[str, Any] = field(default_factory=dict)
    """What descriptions of token files among ``--data`` say, by the sources' names."""
    weights: Any = None
    """Weights of a fresh start, :class:`launch.convert.weights.Weights`; None = random ones."""
    warning: str | None = None
    """Lines for stderr."""
    kept: KeptBatch | None = None
    """Batch sizes of a checkpoint of another number of ranks."""
    auto: bool = False
    """The micro-batch is to be found, or was."""
    recompute: dict[str, Any] = field(default_factory=dict)
    """What backward computes again: arguments of Megatron's ``TransformerConfig``."""

    def describe(self) -> str:
        """One line for the log, and another before it where batch sizes are not those of the
        configuration.
        """
        a = self.args
        stages = f" x {a.pipeline_parallel} pipeline stages" if a.pipeline_parallel > 1 else ""
        stages += f" of {a.virtual_stages} parts" if a.virtual_stages > 1 else ""
        divided = f", experts divided over {a.expert_parallel}" if a.expert_parallel > 1 else ""
        return (f"{self.kept.line}\n" if self.kept else "") + (
            f"model: {parameter_count(self.model):,} parameters; {self.dp} data- x "
            f"{a.tensor_parallel} "
            f"tensor-parallel ranks{stages}{divided}; {self.batch.total} samples of "
            f"{self.model.seq_length} "
            f"tokens a step ({self.batch.micro} a "
            f"micro-batch{'' if self.eod is None else '; documents apart'})"
        )

    def carried(self, source: Path | None) -> dict[str, bytes]:
        """Tokenizer files and the like, which every checkpoint keeps so that it can become a
        Hugging Face folder: those of the checkpoint that is continued, or of the initial weights.
        """
        own = self.weights.travelling() if self.weights is not None else {}
        files = own if source is None else files_in(source / CARRIED)
        return {name: content for name, path in files.items() if (content := path.read_bytes())}

    def data_identity(self) -> dict[str, Any]:
        """Which data this run trains on."""
        apart = {} if self.eod is None else {"separate_documents": True}
        sources = {"sources": self.sources} if self.sources else {}
        return {"paths": self.args.data, "split": self.args.split, **apart, **sources}

    def identity(self) -> dict[str, Any]:
        """Plain values that say what this run is; kept in checkpoints."""
        settings = {k: v for k, v in self.settings.items() if k != "coat"}
        if self.coat is not None:
            settings["coat"] = self.coat.model_dump()
        a = self.args
        pipeline = {"pipeline": a.pipeline_parallel, "virtual_stages": a.virtual_stages}
        return {
            "model": self.model.identity(),
            "parallel": {
                "tensor": a.tensor_parallel,
                "data": self.dp,
                "sequence_parallel": a.sequence_parallel,
                **(pipeline if a.pipeline_parallel > 1 else {}),
                **({"expert": a.expert_parallel} if a.expert_parallel > 1 else {}),
            },
            "deepspeed": json.loads(json.dumps(settings)),
            "schedule": asdict(self.schedule),
            "batch": asdict(self.batch)
            | ({"found": "auto"} if self.auto else {})
            | ({"given": self.kept.given} if self.kept else {}),
            "data": self.data_identity(),
            "seed": a.seed,
        }


@contextmanager
def as_typed() -> Iterator[None]:
    """Errors of data name what was typed, not the parameter of a function that it became."""
    try:
        yield
    except DataError as problem:
        name, colon, rest = str(problem).partition(":")
        raise DataError(f"{_OPTIONS.get(name, name)}{colon}{rest}") from None


def plan(args: PretrainOptions, world: int) -> Plan:
    """Read and check every setting.

    Raises:
        CoatConfigError, DataError: names what cannot be used.
    """
    tp = args.tensor_parallel
    settings, coat = load_settings(args.deepspeed_config, tp=tp)
    model, weights = initial_weights(args)
    with as_typed():
        prefixes, _ = parse_blend(args.data)
        infos = [read_info(prefix) for prefix in prefixes]
        check_one_tokenizer(prefixes, infos)
        mixtures = {p: read_mixture(p).identity() for p in prefixes if is_mixture(p)}
    model = model.with_vocab(max(info.vocab_size for info in infos))
    eod = infos[0].eod if args.separate_documents else None
    warnings = (
        tokenizer_warning(weights, *telling(prefixes, infos)),
        length_note(model.seq_length, weights, "--init-from"),
    )
    warning = "\n".join(filter(None, warnings)) or None
    sources = {}
    for path, mixture in mixtures.items():
        for name, source in mixture.items():
            # Of several descriptions names may be the same.
            sources[name if len(mixtures) == 1 else f"{path}#{name}"] = source
    return assemble(
        args,
        world,
        settings,
        coat,
        model,
        eod=eod,
        sources=sources,
        weights=weights,
        warning=warning,
    )


def assemble(
    args: PretrainOptions,
    world: int,
    settings: dict[str, Any],
    coat: CoatConfig | None,
    model: ModelConfig,
    **more: Any,
) -> Plan:
    """The plan of a known model: batch sizes, schedule, parallel sizes.

    Args:
        more: further fields of the plan.

    Raises:
        CoatConfigError: names what cannot be used.
    """
    tp, settings = args.tensor_parallel, {**settings}  # batch sizes are set below
    _check_sizes(args, world, model)
    model.check_parallel(tp, args.sequence_parallel)
    dp = world // tp // args.pipeline_parallel
    model.check_expert_parallel(args.expert_parallel, dp)
    parsed = {} if coat is None else {"coat": coat}  # which is not parsed again
    read = Settings.read({**settings, **parsed})
    read.check_parallel(stages=args.pipeline_parallel, ep=args.expert_parallel)
    lr = peak_lr(args, settings)
    if args.min_lr > lr:
        raise CoatConfigError(
            f"--min-lr: got {args.min_lr}, accepted: 0 to the peak learning rate ({lr})"
        )
    schedule = Schedule(
        lr=lr,
        min_lr=args.min_lr,
        warmup_steps=args.warmup_steps,
        # The last step has --min-lr: a single one, of a small data set, would train nothing.
        decay_steps=args.lr_decay_steps or max(args.train_steps, 2),
        kind=args.lr_schedule,
    )
    settings["optimizer"].setdefault("params", {})["lr"] = schedule.lr
    auto = auto_batch(args, settings, dp)
    kept = keep_batch(args, settings, dp, auto) if args.load == "auto" else None
    batch = batch_sizes({**settings, STEPS: None, TOTAL: None} if auto else settings, dp)
    if args.virtual_stages > 1:
        _check_interleaved(args, batch)
    more["warning"] = (
        "\n".join(filter(None, [more.get("warning"), *_notes(args, lr, batch)])) or None
    )
    return Plan(
        args=args,
        settings=settings,
        coat=coat,
        model=model,
        schedule=schedule,
        dp=dp,
        batch=batch,
        auto=auto,
        kept=kept,
        recompute=recompute_options(args, model, coat),
        **more,
    )


def _check_sizes(args: PretrainOptions, world: int, model: ModelConfig) -> None:
    """Refuse parallel sizes that do not divide the ranks or the layers.

    Raises:
        CoatConfigError: one line for each.
    """
    tp, stages, layers = args.tensor_parallel, args.pipeline_parallel, model.num_layers
    whole = f"a divisor of the number of ranks over --tensor-parallel ({world // tp})"
    parts = f"a divisor of the layers of a stage ({layers // stages})"
    wrong = args.refused(
        ("tensor_parallel", world % tp == 0, f"a divisor of the number of ranks ({world})"),
        ("pipeline_parallel", world % tp or world // tp % stages == 0, whole),
        ("pipeline_parallel", layers % stages == 0, f"a divisor of the model's layers ({layers})"),
        ("virtual_stages", layers % (stages * args.virtual_stages) == 0, parts),
        ("expert_parallel", stages == 1 or args.expert_parallel == 1, "1 with --pipeline-parallel"),
    )
    if wrong:
        raise CoatConfigError("\n".join(wrong))


def _check_interleaved(args: PretrainOptions, batch: BatchSizes) -> None:
    """Refuse numbers of micro-batches that the interleaved schedule cannot run.

    Raises:
        CoatConfigError: names the key or option.
    """
    evaluated = args.eval_steps if args.eval_interval else 0
    for name, count in {STEPS: batch.accumulation, "--eval-steps": evaluated}.items():
        if count % args.pipeline_parallel:
            accepted = (
                f"a multiple of --pipeline-parallel ({args.pipeline_parallel}) with "
                "--virtual-stages"
            )
            raise CoatConfigError(f"{name}: got {count}, accepted: {accepted}")


def _notes(args: PretrainOptions, lr: float, batch: BatchSizes) -> list[str]:
    """Lines about settings that train, but most likely not as intended."""
    initialized = args.init_from is not None and not args.eval_only
    stages = args.pipeline_parallel
    notes = {
        "--lr: 0, with which no weight changes": not lr,
        f"--warmup-steps: 0 with --init-from and a learning rate of {lr:g}: without a warm-up the "
        "first steps may undo "
        "what the weights have learnt": initialized and not args.warmup_steps and lr > 1e-4,
        f"{STEPS}: {batch.accumulation} micro-batches a step are fewer than the {stages} pipeline "
        "stages, so "
        "some of these are idle at any time": batch.accumulation < stages,
    }
    return [f"note: {line}" for line, holds in notes.items() if holds]
