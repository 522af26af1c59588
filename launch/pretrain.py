"""Pretrain a GPT with DeepSpeed and Megatron-core; with a "coat" block, in FP8.

    deepspeed launch/pretrain.py --deepspeed_config configs/deepspeed/zero2.json \\
        --model configs/models/tiny.json --data DATA_PREFIX --train-steps 100 --output runs/first

Exit status: 0 done, or stopped and saved on request; 2 a setting, file or checkpoint that cannot be
used; 3 too many steps in a row with a non-finite loss or gradient norm; 4 another rank has ended,
does not answer or cannot be met; 5 out of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.common.log_level import say, set_log_level, shows, silence_deepspeed
from launch.train import pretrain_options
from launch.train.allocator import expandable_segments

if __name__ == "__main__":
    pretrain_options.parser().parse_args()  # a misspelt option is refused before torch is imported
    expandable_segments()  # read when torch's allocator begins

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

# Suppresses warnings of torch's C++ threads about a connection that has ended with its rank.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch

from coat_dist import CoatConfigError, nodes
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.deepspeed import heartbeat
from coat_dist.deepspeed.without_launcher import take_ranks
from coat_dist.ranks import attempt, check_same_on_all_ranks, gather, of_another_rank, say_ranks
from launch.common import failing
from launch.common.errors import DataError
from launch.memory.fit import dry_run
from launch.model import gpt
from launch.train import auto, checkpoint, exhausted, layout, runtime, training_engine
from launch.train.data_source import Progress, TokenData
from launch.train.loop import BadSteps, Loop
from launch.train.memory_report import MemoryReport
from launch.train.plan import Plan, plan
from launch.train.reporters import open_reporters, step_profiler
from launch.train.run_folders import Folders, open_on_nodes
from launch.train.steps import steps_of

T = TypeVar("T")

USER_ERRORS = (CoatConfigError, CheckpointError, DataError)


def train(
    p: Plan,
    device: torch.device,
    stop: runtime.StopSignal | None = None,
    interfere: Callable[[Loop], None] | None = None,
) -> str:
    """Set up groups and folders, find the micro-batch if it is "auto", and train. torch.distributed
    is initialized.

    Args:
        interfere: called with the loop before it runs (tests).

    Returns:
        How it ended, a sentence.

    Raises:
        USER_ERRORS, BadSteps: see :func:`main`.
    """
    from megatron_patches import initialize_model_parallel

    a = p.args
    check_same_on_all_ranks(
        {**p.identity(), "arguments": {k: v for k, v in vars(a).items() if k != "local_rank"}}
    )
    heartbeat.start()  # a rank may also hang before there is an engine
    runtime.seed_python_and_numpy(a.seed)
    initialize_model_parallel(
        a.tensor_parallel,
        seed=a.seed,
        expert_model_parallel_size=a.expert_parallel,
        pipeline_model_parallel_size=a.pipeline_parallel,
        virtual_pipeline_model_parallel_size=a.virtual_stages if a.virtual_stages > 1 else None,
        # Megatron's own optimizers use them, and they cost start-up time.
        create_gloo_process_groups=False,
    )
    with ExitStack() as stack:
        folders = open_on_nodes(a, stack)
        if p.auto:
            p = auto.settle(p, device, folders.source)
        loops = list[Loop]()
        stack.enter_context(exhausted.explained(p, lambda: loops[0] if loops else None))
        loop = _build(p, device, folders, stack)
        loop.stop = stop
        loops.append(loop)
        if interfere is not None:
            interfere(loop)
        return _finish(loop)


def _build(p: Plan, device: torch.device, folders: Folders, stack: ExitStack) -> Loop:
    """Data, engine and reporters of a run, continued from a checkpoint if there is one;
    ``stack`` closes them.
    """
    from megatron.core import parallel_state

    a, source, examined = p.args, folders.source, None
    manifest = p.weights.manifest if a.eval_only else {}
    if source is not None:
        chosen = layout.fitting(source, p) if a.load == "auto" else source
        examined = checkpoint.examine(chosen, p.identity())
        manifest = examined.manifest
    progress = Progress(**manifest.get("progress", {}))
    data = TokenData(p, progress, parallel_state.get_data_parallel_rank())
    if p.warning is not None:
        say(p.warning, "warning")
    say(p.describe())
    weights = p.weights if examined is None else None
    engine = training_engine.build_engine(
        p, say, universal=examined is not None and examined.universal, weights=weights
    )
    if examined is not None:
        checkpoint.restore(engine, examined)
        changed = [f"  changed: {line}" for line in examined.changed]
        say("\n".join([f"continuing after step {progress.step} from {examined.path}", *changed]))
    reporters = open_reporters(a, progress.step, source is not None and not a.overwrite)
    stack.callback(reporters.close)  # before the locks go
    profiler = None
    if a.profile_steps is not None and torch.distributed.get_rank() == 0:
        profiler = stack.enter_context(step_profiler(a.profile_steps, progress.step, str(a.output)))
    router_sizes = a.tensor_parallel, p.batch.accumulation, a.pipeline_parallel
    return Loop(
        engine=engine,
        steps=steps_of(p, engine, device),
        data=data,
        schedule=p.schedule,
        reporters=reporters,
        options=a,
        progress=progress,
        device=device,
        samples_per_step=p.batch.total,
        tokens_per_step=p.batch.total * p.model.seq_length,
        flops_per_token=gpt.flops_per_token(p.model, p.model.seq_length),
        save=_saving(p, engine, folders, progress) if a.save else None,
        more=None
        if p.model.num_moe_experts is None
        else partial(gpt.router_losses, p.model, *router_sizes),
        memory=MemoryReport(engine, p.batch.micro * p.model.seq_length),
        profiler=profiler,
        last_checkpoint=source,
    )


def _finish(loop: Loop) -> str:
    """Train to the end, and report how the run ended."""
    progress, saves = loop.progress, loop.save is not None
    try:
        why = loop.run()
    except BadSteps:
        why = "too many non-finite steps in a row"
        loop.reporters.finish(why, progress.step, loop.last_checkpoint)
        raise
    text = (
        f"stopped by {why} after step {progress.step}" if why else f"finished {progress.step} steps"
    )
    last = loop.last_checkpoint if saves else None
    loop.reporters.finish(text, progress.step, last)
    return f"{text}; checkpoint {last}" if saves else f"{text}; nothing saved (no --save)"


def _saving(p: Plan, engine: Any, folders: Folders, progress: Progress) -> Callable[[], Path]:
    """The function that writes a checkpoint of a run and returns its path."""
    a, superseded = p.args, list(folders.superseded)
    carried = p.carried(folders.source)  # read now: the source may be removed meanwhile

    def save() -> Path:
        folder = str(a.save)
        saved = checkpoint.save(
            engine, folder, p.identity(), asdict(progress), a.keep_last, superseded, carried
        )
        superseded.clear()  # from now on their names may be this run's
        if torch.distributed.get_rank() == 0:
            layout.forget(folder)
        return saved

    return save


def main(argv: Sequence[str] | None = None) -> int:
    """The program: read the command line, plan, join the other ranks, train; the exit status."""
    task = os.environ.get("SLURM_PROCID", "")
    rank = int(task) if task.isdecimal() else 0  # until it is known
    try:
        take_ranks()
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        args = pretrain_options.parse(argv)
        set_log_level(args.log_level)
        silence_deepspeed()
        if args.dry_run:
            return dry_run(plan(args, args.gpus or world), rank)
        join = partial(runtime.start, args.local_rank, args.distributed_timeout_minutes)
        if nodes.several_nodes():
            # A file may be missing on one of them, and the others are to learn of it.
            device = join()
            p = _on_all(lambda: plan(args, world))
        else:
            p = plan(args, world)
            device = join()
        stop = runtime.StopSignal()
        ending = train(p, device, stop)
    except (*USER_ERRORS, BadSteps) as problem:
        failing.end(str(problem), rank)
        return 3 if isinstance(problem, BadSteps) else 2
    except exhausted.OutOfMemory as problem:
        failing.end(str(problem), rank, kind="out of memory")
        return 5
    except (torch.distributed.DistError, RuntimeError) as problem:
        if not of_another_rank(problem):
            raise
        failing.end_of_collective(problem, rank)
        return 4
    stop.leave()
    if rank == 0 and shows("info"):
        print(ending, flush=True)
    runtime.finish()
    return 0


def _on_all(make: Callable[[], T]) -> T:
    """What ``make`` returns on this rank; collective.

    Raises:
        CoatConfigError: on every rank, the errors of any.
    """
    nodes.meet(gather(nodes.my_place()))
    made, ranks = list[T](), dict[str, list[int]]()
    for rank, text in attempt(lambda: made.append(make()))[1].items():
        ranks.setdefault(text, []).append(rank)
    if ranks:
        raise CoatConfigError(
            "\n".join(f"{say_ranks(having)}: {text}" for text, having in ranks.items())
        )
    return made[0]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status:
        # No waiting for ranks that will not come: the launcher ends them when this one is gone.
        os._exit(status)
