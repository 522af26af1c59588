"""Pretrain a GPT with DeepSpeed and Megatron-core; with a "coat" block, in FP8.

    deepspeed launch/pretrain.py --deepspeed --deepspeed_config configs/deepspeed/zero2.json \\
        --model configs/models/tiny.json --data DATA_PREFIX --train-steps 100 --output runs/first

Exit status: 0 done, or stopped and saved on request; 2 a setting, file or checkpoint that cannot be used; 3 too many
steps in a row with a non-finite loss or gradient norm; 4 another rank has ended or does not answer; 5 out of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.interrupts import leave_quietly
from launch.log_level import SlowPhase, set_log_level, shows
from launch.planning.allocator import expandable_segments

if __name__ == "__main__":
    leave_quietly("pretrain")
    importing = SlowPhase("importing torch, Megatron-core and DeepSpeed")
    expandable_segments()  # read when torch's allocator begins

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

# Warnings of torch's C++ threads about a connection that has ended with its rank, in place of the line that says why.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.deepspeed import heartbeat
from coat_dist.deepspeed.monitors import make_folders
from coat_dist.deepspeed.slurm import take_ranks
from coat_dist.ranks import check_same_on_all_ranks, of_another_rank, on_rank_0
from launch.data import dataset as data
from launch.model.gpt import flops_per_token
from launch.planning.arguments import silence_deepspeed
from launch.planning.dry_run import dry_run
from launch.training import (
    arguments,
    auto,
    build,
    checkpoint,
    exhausted,
    failing,
    joining,
    layout,
    pipeline,
    runtime,
    stages,
)
from launch.training.folders import Folders
from launch.training.loop import BadSteps, Batch, Loop, Progress
from launch.training.memory import MemoryReport
from launch.training.metrics import MetricsLog
from launch.training.node_folders import open_on_nodes, team_of_checkpoints
from launch.training.plan import Plan, plan
from launch.training.profile import StepProfiler
from launch.training.rank_times import RankTimes
from launch.training.wandb_log import start_wandb

__all__ = ["USER_ERRORS", "main", "run", "say", "train"]

USER_ERRORS = (CoatConfigError, CheckpointError, data.DataError)


def train(
    p: Plan,
    device: torch.device,
    stop: runtime.StopSignal | None = None,
    interfere: Callable[[Loop], None] | None = None,
    source_of_data: Any = build,
) -> str:
    """Build everything, continue from a checkpoint if asked to, train. torch.distributed is initialized before.

    Args:
        source_of_data: has ``datasets`` and ``batch_iterator``, called as :mod:`launch.training.build` has them.
        interfere: called with the loop before it runs (tests).

    Returns:
        How it ended, a sentence.

    Raises:
        USER_ERRORS, BadSteps: see :func:`main`.
    """
    from megatron_patches import initialize_model_parallel

    check_ranks_agree(p)
    heartbeat.start()  # a rank may also hang before there is an engine
    runtime.seed_python_and_numpy(p.args.seed)
    # Gloo twins of the groups are for Megatron's own optimizers, and cost start-up time.
    experts = {"expert_model_parallel_size": p.args.expert_parallel} if p.args.expert_parallel > 1 else {}
    initialize_model_parallel(
        p.args.tensor_parallel, seed=p.args.seed, create_gloo_process_groups=False, **experts, **stages.groups(p.args)
    )
    with ExitStack() as locks:
        folders = open_on_nodes(p.args, p.settings, locks)
        on_rank_0(lambda: make_folders(p.settings))
        source = folders.source
        p = auto.settle(p, device, source, say)
        explain = exhausted.Explain(p)
        locks.push(explain.leave)
        team = team_of_checkpoints(p.settings)
        examined = None if source is None else checkpoint.examine(layout.fitting(source, p), p.identity(), team)
        begun = Progress() if examined is None else Progress(**examined.manifest["progress"])
        with SlowPhase("indexing the data"):
            sets = source_of_data.datasets(p, begun)
        if p.warning is not None:
            say(p.warning, "warning")
        say(p.describe())
        with SlowPhase("building the engine"):
            engine = build.build_engine(
                p,
                say,
                universal=examined is not None and examined.universal,
                weights=p.weights if examined is None else None,
            )
        progress = Progress() if examined is None else resume(engine, examined)
        loop = make_loop(p, device, engine, sets, progress, folders, source_of_data.batch_iterator)
        locks.callback(loop.log.close)  # before the locks go
        if loop.profiler is not None:
            locks.callback(loop.profiler.close)  # a run that fails within the chosen steps has a trace, too
        loop.stop, loop.last_checkpoint = stop, source
        explain.watch(loop)
        if interfere is not None:
            interfere(loop)
        try:
            why = loop.run()
        except BadSteps:
            loop.log.finish("too many non-finite steps in a row", progress.step, loop.last_checkpoint, failed=True)
            raise
        ending = f"stopped by {why} after step {progress.step}" if why else f"finished {progress.step} steps"
        loop.log.finish(ending, progress.step, loop.last_checkpoint if p.args.save else None)
    return ending + (f"; checkpoint {loop.last_checkpoint}" if p.args.save else "; nothing saved (no --save)")


def say(text: str, level: str = "info") -> None:
    """Print on rank 0; a warning on stderr."""
    if torch.distributed.get_rank() == 0 and shows(level):
        print(text, file=sys.stderr if level == "warning" else sys.stdout, flush=True)


def check_ranks_agree(p: Plan) -> None:
    """Raise on every rank where one was started with other settings."""
    shared = {k: v for k, v in vars(p.args).items() if k != "local_rank"}
    check_same_on_all_ranks({**p.identity(), "arguments": shared})


def resume(engine: Any, examined: checkpoint.Examined) -> Progress:
    """Restore ``engine`` and random states; where the run is."""
    saved = checkpoint.restore(engine, examined)
    changed = [f"  changed: {line}" for line in examined.changed]
    say("\n".join([f"continuing after step {saved['step']} from {examined.path}", *changed]))
    return Progress(**saved)


def make_loop(
    p: Plan,
    device: torch.device,
    engine: Any,
    sets: Sequence[Any],
    progress: Progress,
    folders: Folders,
    batches: Callable[..., Iterator[Batch]],
) -> Loop:
    """The training loop over train, valid and test ``sets`` (the last two may be None)."""
    from megatron.core import parallel_state

    a, dp_rank = p.args, parallel_state.get_data_parallel_rank()
    superseded = list(folders.superseded)
    active, continues = torch.distributed.get_rank() == 0, folders.source is not None and not a.overwrite
    carried = p.carried(folders.source)  # read now: the source may be removed meanwhile

    def evaluation(dataset: Any) -> Callable[[], Iterator[Batch]] | None:
        return None if dataset is None else lambda: batches(p, dataset, dp_rank)

    def save() -> Path:
        saved = checkpoint.save(engine, str(a.save), p.identity(), progress.to_dict(), a.keep_last, superseded, carried)
        superseded.clear()  # from now on their names may be this run's
        if active:
            layout.forget(str(a.save))
        return saved

    return Loop(
        engine=engine,
        loss=build.language_model_loss(a.tensor_parallel, device),
        pipeline=pipeline.steps(p, engine, build.forward_step(a.tensor_parallel, device)),
        train=batches(p, sets[0], dp_rank, progress.consumed_samples),
        valid=evaluation(sets[1]),
        test=evaluation(sets[2]),
        schedule=p.schedule,
        log=MetricsLog(
            a.output,
            a.tensorboard,
            start_step=progress.step,
            total_steps=a.train_steps,
            stop_at_step=a.stop_at_step,
            active=active,
            continues=continues,
            wandb=start_wandb(p, continues),
        ),
        times=RankTimes(
            device,
            whole_forward=a.tensor_parallel == a.expert_parallel == 1 and p.settings["zero_optimization"]["stage"] < 3,
        ),
        more=None
        if p.model.num_moe_experts is None
        else lambda: p.model.router_losses(
            p.model.num_layers, a.tensor_parallel, p.batch.accumulation, a.pipeline_parallel
        ),
        memory=MemoryReport(engine, p.batch.micro * p.model.seq_length),
        progress=progress,
        total_steps=a.train_steps,
        stop_at_step=a.stop_at_step,
        accumulation=p.batch.accumulation,
        samples_per_step=p.batch.total,
        samples=p.samples,
        tokens=p.tokens,
        flops_per_token=flops_per_token(p.model, p.model.seq_length),
        device=device,
        eval_interval=a.eval_interval,
        eval_steps=a.eval_steps,
        save=save if a.save else None,
        save_interval=a.save_interval,
        max_bad_steps=a.max_bad_steps,
        profiler=StepProfiler(a.profile_steps, str(a.output), active) if a.profile_steps else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    return run(lambda: arguments.parse(argv), plan, train)


def run(
    parse: Callable[[], Any],
    make_plan: Callable[[Any, int], Any],
    work: Callable[[Any, torch.device, runtime.StopSignal], str],
) -> int:
    """A program that trains: read the command line, plan, join the other ranks, work; the exit status.

    Args:
        parse: the command line's arguments.
        make_plan: what is to be done, of the arguments and the number of ranks; touches no device.
        work: does it; how it ended, a sentence.
    """
    task = os.environ.get("SLURM_PROCID", "")
    rank = int(task) if task.isdecimal() else 0  # until it is known: all tasks may find the same wrong
    try:
        take_ranks()
        rank = int(os.environ.get("RANK", 0))
        args = parse()
        set_log_level(args.log_level)
        if args.dry_run:
            silence_deepspeed()
        p = make_plan(args, args.gpus or int(os.environ.get("WORLD_SIZE", 1)))
        if args.dry_run:
            return dry_run(p, rank)
        with SlowPhase("joining the other ranks"):
            device = runtime.start(args.local_rank, args.distributed_timeout_minutes)
        stop = runtime.StopSignal()
        ending = work(p, device, stop)
    except SystemExit as ended:  # of the command line, which has said why
        if ended.code and joining.needed():
            joining.say_why("its command line cannot be used")
            joining.stay()
        raise
    except joining.NotComing as problem:
        failing.end(str(problem), rank, elsewhere=True)
        return 4
    except (*USER_ERRORS, BadSteps) as problem:
        failing.end(str(problem), rank)
        return 3 if isinstance(problem, BadSteps) else 2
    except exhausted.OutOfMemory as problem:
        failing.end(str(problem), rank, once=True)
        return exhausted.STATUS
    except (torch.distributed.DistError, RuntimeError) as problem:
        if failing.of_a_port(problem):
            failing.end(failing.PORT.format(port=os.environ.get("MASTER_PORT")), rank)
            return 2
        if not of_another_rank(problem):
            raise
        failing.end_of_collective(problem, rank)
        return 4
    stop.leave()
    if rank == 0 and shows("info"):
        print(ending, flush=True)
    runtime.finish()
    return 0


if __name__ == "__main__":
    importing.cancel()
    status = main()
    sys.stdout.flush()
    if status:
        os._exit(status)  # no waiting for ranks that will not come: the launcher ends them when this one is gone
