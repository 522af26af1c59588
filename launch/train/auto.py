"""The micro-batch "auto": the planner's largest one that fits, tried before training.

The trial is two steps with random tokens on an engine of its own, which is thrown away: weights, moments, data order
and random states of the run are those of a run that was given the number.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import read_manifest
from launch.plan.gpus import GPU, GPUS, memory_bytes
from launch.plan.report import size
from launch.plan.run import Run
from launch.plan.search import candidates, need, savings
from launch.train import build, runtime
from launch.train.exhausted import OutOfMemory, explanation, is_out_of_memory
from launch.train.plan import Plan
from launch.train.settings import MICRO, STEPS, TOTAL, batch_sizes

__all__ = ["random_batch", "settle"]

PATIENCE = 60.0
"""Seconds in which all ranks have to have said how their trial ended, after the first has."""


def settle(p: Plan, device: torch.device, source: Path | None, say: Any) -> Plan:
    """The plan with a micro-batch, where it is to be found; collective. Process groups are set up before.

    Args:
        source: the checkpoint that the run continues from; if the micro-batch of that was found, it stays.

    Raises:
        CoatConfigError: nothing fits, or this run cannot be planned; names the key.
        OutOfMemory: a trial failed on some ranks while others wait for them.
    """
    if not p.auto:
        return p
    if (micro := _recorded(p, source)) is not None:
        say(f"micro-batch: {micro}, found by the run that is continued")
        return _with_micro(p, micro)
    run, gpu = Run.of_plan(p), _usable(p, device)
    smallest, failed = run.but(micro=1), 0
    for found in candidates(smallest, gpu, p.settings.get(TOTAL), p.settings.get(STEPS)):
        chosen = _with_micro(p, found.micro)
        if (problem := _agree(f"{found.micro}", _trial(chosen, device), chosen)) is None:
            say(_why(chosen, found, gpu, failed))
            return chosen
        failed = found.micro
        say(f"micro-batch: {found.micro} does not fit: {problem}")
    least = need(smallest, gpu).total
    said = "\n".join(f"  {size(one.bytes):>11}  {one.what}" for one in savings(smallest))
    raise CoatConfigError(
        f'{MICRO}: got "auto", accepted: settings with which a micro-batch fits that divides {TOTAL} by the ranks; '
        f"1 sample needs {size(least)} and {size(gpu.memory)} are there. What would save most:\n{said}"
    )


def _recorded(p: Plan, source: Path | None) -> int | None:
    """The micro-batch of the run that is continued, if it was found in the same way and for as many ranks."""
    if source is None:
        return None
    earlier = read_manifest(source)["run"]
    batch, ours = earlier.get("batch", {}), p.identity()
    if batch.get("found") != "auto" or earlier.get("parallel") != ours["parallel"]:
        return None
    total, steps = p.settings.get(TOTAL), p.settings.get(STEPS)
    micro = batch["micro"]
    if total is not None and (total % (micro * p.dp) or (steps and total != micro * p.dp * steps)):
        return None
    return micro


def _with_micro(p: Plan, micro: int) -> Plan:
    settings = {**p.settings, MICRO: micro}
    if settings.get(TOTAL) is not None:
        settings[STEPS] = settings[TOTAL] // (micro * p.dp)
    batch = batch_sizes(settings, p.dp)
    return replace(p, settings={**settings, STEPS: batch.accumulation}, batch=batch)


def _usable(p: Plan, device: torch.device) -> GPU:
    """A GPU with the memory that this run may use, the least of all ranks."""
    other = memory = 0
    if p.args.other_memory is not None:
        other = memory_bytes(p.args.other_memory, "--other-memory")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        # In use now, and an allowance for what comes later; never less than was measured elsewhere.
        now = total - free - torch.cuda.memory_reserved() + 2**30
        memory, other = total, other or max(now, need(Run.of_plan(p)).not_torchs)
    elif p.args.gpu_memory is None:
        raise CoatConfigError(
            f'{MICRO}: got "auto" without a GPU, accepted: an integer >= 1, or --gpu-memory with what may be used'
        )
    if p.args.gpu_memory is not None:
        memory = memory_bytes(p.args.gpu_memory)
    usable = torch.tensor([memory - other], dtype=torch.int64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(usable, dist.ReduceOp.MIN)
    return GPUS["h100"].but(memory=int(usable), other=0)


def _trial(p: Plan, device: torch.device) -> BaseException | None:
    """Two steps on an engine of its own; why they did not fit, or None. Random states are as before."""
    state, engine, problem = runtime.get_random_state(), None, None
    try:
        few = min(p.batch.accumulation, 2)  # more micro-batches need no more memory
        settings = {**p.settings, STEPS: few}
        settings.pop(TOTAL, None)
        short = replace(p, settings=settings, batch=batch_sizes(settings, p.dp))
        engine = build.build_engine(short, lambda text: None)
        loss_of = build.language_model_loss(p.args.tensor_parallel, device)
        batch = random_batch(p)
        for _ in range(2 * few):
            engine.backward(loss_of(engine, batch))
            engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        problem = torch.OutOfMemoryError(str(error).split("\n")[0])  # without the frames, which hold tensors
    if engine is not None:
        with contextlib.suppress(Exception):  # it may have stopped anywhere
            engine.destroy()
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    runtime.set_random_state(state)
    return problem


def random_batch(p: Plan) -> dict[str, torch.Tensor]:
    """A micro-batch of random tokens: ``[micro, seq]`` int64, on the CPU."""
    shape = (p.batch.micro, p.model.seq_length)
    assert p.model.vocab_size is not None
    generator = torch.Generator().manual_seed(p.args.seed)
    drawn = torch.randint(0, p.model.vocab_size, (shape[0], shape[1] + 1), generator=generator)
    return {
        "tokens": drawn[:, :-1].contiguous(),
        "labels": drawn[:, 1:].contiguous(),
        "loss_mask": torch.ones(shape),
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
    }


def _agree(name: str, problem: BaseException | None, p: Plan) -> str | None:
    """Why the trial failed on some rank, the same answer on all; None if on none.

    Ranks tell one another through the store and not in a collective: where one has run out of memory, others may wait
    for it in a collective that it will never come to. Then there is no way on, and the run ends.
    """
    said = "" if problem is None else str(problem).split(". ")[0]
    world = dist.get_world_size()
    if world == 1:
        return said if problem is not None else None
    store, key = dist.distributed_c10d._get_default_store(), f"coat_dist/micro-batch/{name}"
    store.set(f"{key}/{dist.get_rank()}", f"{'no' if problem else 'ok'} {said}")
    keys = [f"{key}/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timedelta(seconds=PATIENCE))
    except RuntimeError:
        if problem is None:
            raise
        raise OutOfMemory(
            explanation(p, "in a trial step (--micro-batch auto), while other ranks wait for this one", problem)
        ) from None
    answers = [store.get(one).decode() for one in keys]
    failed = [f"rank {rank}: {text[3:]}" for rank, text in enumerate(answers) if text.startswith("no")]
    return failed[0] if failed else None


def _why(p: Plan, run: Run, gpu: GPU, failed: int) -> str:
    found = need(run, gpu)
    text = (
        f"micro-batch: {p.batch.micro} found ({p.batch.accumulation} a step), needs {size(found.total)} of "
        f"{size(gpu.memory)} by the plan; two trial steps fitted"
    )
    return text + (f"; {failed} did not" if failed else "")
