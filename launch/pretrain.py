"""Pretrain a GPT with DeepSpeed and Megatron-core; with a "coat" block, in FP8.

    deepspeed launch/pretrain.py --deepspeed --deepspeed_config configs/deepspeed/zero2.json \\
        --model configs/models/tiny.json --data DATA_PREFIX --train-steps 100 --output runs/first

Exit status: 0 done, or stopped and saved on request; 2 a setting, file or checkpoint that cannot be used; 3 too many
steps in a row with a non-finite loss or gradient norm; 4 another rank has ended, does not answer or cannot be met;
5 out of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.interrupts import leave_quietly
from launch.log_level import SlowPhase, say, set_log_level, shows
from launch.plan.allocator import expandable_segments

if __name__ == "__main__":
    leave_quietly("pretrain")
    importing = SlowPhase("importing torch, Megatron-core and DeepSpeed")
    expandable_segments()  # read when torch's allocator begins

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

# Warnings of torch's C++ threads about a connection that has ended with its rank, in place of the line that says why.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.deepspeed import heartbeat
from coat_dist.deepspeed.without_launcher import take_ranks
from coat_dist.ranks import check_same_on_all_ranks, of_another_rank
from launch import failing
from launch.model import gpt
from launch.model.gpt import flops_per_token
from launch.plan.arguments import dry_run, silence_deepspeed
from launch.prep import DataError
from launch.train import arguments, auto, build, checkpoint, exhausted, layout, runtime, stages
from launch.train.data_source import DataSource, Progress, TokenData
from launch.train.folders import Folders
from launch.train.loop import BadSteps, Loop
from launch.train.memory import MemoryReport
from launch.train.node_folders import open_on_nodes, team_of_checkpoints
from launch.train.plan import Plan, plan
from launch.train.rank_times import RankTimes
from launch.train.reporters import open_reporters, step_profiler
from launch.train.steps import steps_of

__all__ = ["USER_ERRORS", "Ending", "main", "run", "say", "start", "train"]

USER_ERRORS = (CoatConfigError, CheckpointError, DataError)


class Ending(NamedTuple):
    """How a run ended."""

    text: str
    finished: bool
    checkpoint: Path | None


def train(
    p: Plan,
    device: torch.device,
    stop: runtime.StopSignal | None = None,
    interfere: Callable[[Loop], None] | None = None,
) -> str:
    """:func:`start` a run of ``pretrain.py``; how it ended, a sentence."""
    return start(p, device, TokenData, stop, interfere).text


def start(
    p: Any,
    device: torch.device,
    open_data: Callable[[Any, Progress, int], DataSource],
    stop: runtime.StopSignal | None = None,
    interfere: Callable[[Loop], None] | None = None,
) -> Ending:
    """Set up groups and folders, find the micro-batch if it is "auto", and train. torch.distributed is initialized.

    Args:
        p: a :class:`Plan`, or a subclass.
        open_data: makes the batches of the plan, of where the run is and of the data-parallel rank.
        interfere: called with the loop before it runs (tests).

    Raises:
        USER_ERRORS, BadSteps: see :func:`main`.
    """
    from megatron_patches import initialize_model_parallel

    a = p.args
    check_same_on_all_ranks({**p.identity(), "arguments": {k: v for k, v in vars(a).items() if k != "local_rank"}})
    heartbeat.start()  # a rank may also hang before there is an engine
    runtime.seed_python_and_numpy(a.seed)
    # Gloo twins of the groups are for Megatron's own optimizers, and cost start-up time.
    experts = {"expert_model_parallel_size": a.expert_parallel} if a.expert_parallel > 1 else {}
    initialize_model_parallel(
        a.tensor_parallel, seed=a.seed, create_gloo_process_groups=False, **experts, **stages.groups(a)
    )
    with ExitStack() as stack:
        folders = open_on_nodes(a, p.settings, stack)
        p = auto.settle(p, device, folders.source, say)
        return _train(p, device, folders, open_data, stop, interfere, stack)


def _train(
    p: Plan,
    device: torch.device,
    folders: Folders,
    open_data: Callable[[Any, Progress, int], DataSource],
    stop: runtime.StopSignal | None,
    interfere: Callable[[Loop], None] | None,
    stack: ExitStack,
) -> Ending:
    """Build data and engine, continue from a checkpoint if there is one, train; ``stack`` closes what is opened."""
    from megatron.core import parallel_state

    a, source, loops = p.args, folders.source, list[Loop]()
    stack.enter_context(exhausted.explained(p, lambda: loops[0] if loops else None))
    team = team_of_checkpoints(p.settings)
    examined = None if source is None else checkpoint.examine(layout.fitting(source, p), p.identity(), team)
    progress = Progress() if examined is None else Progress(**examined.manifest["progress"])
    with SlowPhase("indexing the data"):
        data_source = open_data(p, progress, parallel_state.get_data_parallel_rank())
    if p.warning is not None:
        say(p.warning, "warning")
    say(p.describe())
    with SlowPhase("building the engine"):
        weights = p.weights if examined is None else None
        engine = build.build_engine(p, say, universal=examined is not None and examined.universal, weights=weights)
    if examined is not None:
        checkpoint.restore(engine, examined)
        changed = [f"  changed: {line}" for line in examined.changed]
        say("\n".join([f"continuing after step {progress.step} from {examined.path}", *changed]))
    continues = source is not None and not a.overwrite
    reporters = open_reporters(a, progress.step, continues, p.identity())
    stack.callback(reporters.close)  # before the locks go
    profiler = None
    if a.profile_steps is not None and torch.distributed.get_rank() == 0:
        profiler = stack.enter_context(step_profiler(a.profile_steps, progress.step, str(a.output)))
    whole_forward = a.tensor_parallel == a.expert_parallel == 1 and p.settings["zero_optimization"]["stage"] < 3
    times = RankTimes(device, whole_forward=whole_forward)
    loop = Loop(
        engine=engine,
        steps=steps_of(p, engine, device, times),
        data=data_source,
        schedule=p.schedule,
        reporters=reporters,
        options=a,
        progress=progress,
        times=times,
        device=device,
        samples_per_step=p.batch.total,
        flops_per_token=flops_per_token(p.model, p.model.seq_length),
        save=saving(p, engine, folders, progress) if a.save else None,
        more=None if p.model.num_moe_experts is None else lambda: router_losses(p),
        memory=MemoryReport(engine, p.batch.micro * p.model.seq_length),
        profiler=profiler,
        stop=stop,
        last_checkpoint=source,
    )
    loops.append(loop)
    if interfere is not None:
        interfere(loop)
    try:
        why = loop.run()
    except BadSteps:
        reporters.finish("too many non-finite steps in a row", progress.step, loop.last_checkpoint, failed=True)
        raise
    text = f"stopped by {why} after step {progress.step}" if why else f"finished {progress.step} steps"
    last = loop.last_checkpoint if a.save else None
    reporters.finish(text, progress.step, last)
    return Ending(f"{text}; checkpoint {last}" if a.save else f"{text}; nothing saved (no --save)", why is None, last)


def saving(p: Plan, engine: Any, folders: Folders, progress: Progress) -> Callable[[], Path]:
    """What writes a checkpoint of a run and returns its path."""
    a, superseded = p.args, list(folders.superseded)
    carried = p.carried(folders.source)  # read now: the source may be removed meanwhile

    def save() -> Path:
        folder = str(a.save)
        saved = checkpoint.save(engine, folder, p.identity(), progress.to_dict(), a.keep_last, superseded, carried)
        superseded.clear()  # from now on their names may be this run's
        if torch.distributed.get_rank() == 0:
            layout.forget(folder)
        return saved

    return save


def router_losses(p: Plan) -> dict[str, torch.Tensor]:
    """Losses of the routers of a model with experts, in the step that is done."""
    a = p.args
    return gpt.router_losses(p.model, a.tensor_parallel, p.batch.accumulation, a.pipeline_parallel)


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
        if ended.code and failing.needed():
            failing.tell_starting("its command line cannot be used", rank)
        raise
    except failing.NotComing:
        return 4
    except (*USER_ERRORS, BadSteps) as problem:
        failing.end(str(problem), rank)
        return 3 if isinstance(problem, BadSteps) else 2
    except exhausted.OutOfMemory as problem:
        failing.end(str(problem), rank, kind="out of memory")
        return exhausted.STATUS
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


if __name__ == "__main__":
    importing.cancel()
    status = main()
    sys.stdout.flush()
    if status:
        os._exit(status)  # no waiting for ranks that will not come: the launcher ends them when this one is gone
