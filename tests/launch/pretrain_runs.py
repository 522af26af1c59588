"""Pretraining on ranks: models, configurations, command lines, and `pretrain.train` in a process
group that exists.
"""

import json
import math
import zlib
from pathlib import Path
from unittest import mock

import torch

from coat_dist.checkpoint.names import names_in_whole
from launch import to_universal
from launch.train import runtime
from launch.train.metrics import read_metrics
from tests.support import run_ranks

REQUIRED = ["--deepspeed_config", "zero2", "--model", "tiny", "--data", "d", "--train-steps", "100"]
"""Options that pretrain.py needs."""
SEVEN = ["--model", "llama2-7b", "--gpus", "8", "--gpu", "h100"]
"""Options with which planner.py has an answer."""
MODEL = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 2,
    "seq_length": 32,
    "vocab_size": None,
    "hidden_dropout": 0.1,  # so that random states matter
}


COAT = {"optimizer": {}, "activation": {}}


def configuration(folder, stage, coat=True, lr=5e-3, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        # Threshold 0: ZeRO-3 would keep parameters of tests' sizes whole on every rank.
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {
            "type": "CoatAdamW" if coat else "AdamW",
            "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        **({"coat": COAT if coat is True else coat} if coat else {}),
        **more,
    }
    text = json.dumps(config)
    path = Path(folder) / f"{zlib.crc32(text.encode())}.json"
    path.write_text(text)
    return str(path)


def run_with(rank, world, argv, interfere=None):
    """``pretrain.train`` in a process group that exists; returns how it ended, or the error."""
    from launch import pretrain
    from launch.train import pretrain_options

    try:
        device = runtime.start(rank)
        p = pretrain.plan(pretrain_options.parse(argv), world)
        return pretrain.train(p, device, interfere=interfere)
    except (*pretrain.USER_ERRORS, pretrain.BadSteps) as problem:
        return f"{type(problem).__name__}: {problem}"


def held(engine):
    """This rank's part of every parameter, by its name in the whole model."""
    import deepspeed

    names = names_in_whole(engine)
    with deepspeed.zero.GatheredParameters(list(names)):
        return {name: p.detach().clone() for p, name in names.items()}


def weights_of(rank, world, argv):
    """How a run ended, and this rank's weights before its first step and after its last."""
    kept = []
    end = run_with(rank, world, argv, lambda loop: kept.extend((loop.engine, held(loop.engine))))
    if not kept:
        return end, {}, {}
    engine, before = kept
    return end, before, held(engine)


def rank_main(rank, world, argv, poisoned=()):
    """How a run ended in which steps went wrong.

    Args:
        argv: command line; "{rank}" in it is replaced.
        poisoned: (step, kind, rank) of what is to go wrong.
    """

    def interfere(loop):
        if loop.options.eval_only:
            return
        inner, seen = loop.steps.loss, [-1]

        def loss(engine, batch):
            value = inner(engine, batch)
            now = [
                kind
                for step, kind, who in poisoned
                if (step, who) == (loop.progress.step + 1, rank)
            ]
            # An evaluation, or not the first micro-batch.
            if not engine.training or loop.progress.step == seen[0]:
                return value
            seen[0] = loop.progress.step
            if "loss" in now:
                value = value + math.inf
            elif "gradient" in now:
                value.register_hook(lambda g: g * math.nan)
            elif "signal" in now:
                loop.stop.name = "SIGTERM"
            return value

        loop.steps.loss = loss
        loop.stop = runtime.StopSignal()
        before = weights(loop.engine)
        after = loop._step

        def step():
            nonlocal before
            record = after()
            now = weights(loop.engine)
            record["changed"] = any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
            before = now
            return record

        loop._step = step

    return run_with(rank, world, [a.format(rank=rank) for a in argv], interfere)


def pretrain_on(ranks, work, run, config, *more, steps=20, poisoned=()):
    """How a run of :func:`command` ended, on each of ``ranks``."""
    return run_ranks(ranks, rank_main, command(work, run, config, *more, steps=steps), poisoned)


def make_universal(load, output):
    assert to_universal.main(["--load", str(load), "--output", str(output)]) == 0


def without_a_model(rank, world, argv):
    """:func:`rank_main` of a run that is refused before a model is built, or fails here."""
    from launch.train import training_engine

    no_model = AssertionError("a model was going to be built")
    with mock.patch.object(training_engine, "build_engine", side_effect=no_model):
        return rank_main(rank, world, argv)


def hyperparameters(rank, world, argv):
    """Hyperparameters of the optimizer's groups at the start of a run."""
    seen = []

    def look(loop):
        seen.extend(
            [
                [g[k] for k in ("name", "weight_decay", "betas")]
                for g in loop.engine.optimizer.param_groups
            ]
        )

    run_with(rank, world, argv, look)
    return seen


def weights(engine):
    """Master weights and optimizer state of this rank, step counters included."""
    state = engine.optimizer.optimizer.state
    values = [torch.as_tensor(v).clone() for s in state.values() for v in s.values()]
    master = next(
        getattr(engine.optimizer, n)
        for n in (
            "single_partition_of_fp32_groups",
            "fp32_partitioned_groups_flat",
            "fp32_groups_flat_partition",
        )
        if hasattr(engine.optimizer, n)
    )
    return [*values, *(m.detach().clone() for m in master)]


def command(work, run, config, *more, steps=20):
    data = [
        "--model",
        str(work / "model.json"),
        "--data",
        str(work / "data"),
        "--split",
        "80,10,10",
    ]
    schedule = ["--train-steps", str(steps), "--warmup-steps", "1"]
    return ["--deepspeed_config", config, *data, *schedule, "--output", str(run), *map(str, more)]


def losses(run):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in read_metrics(run)]


# With ZeRO-1: another optimizer class of DeepSpeed.
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
