"""Evaluate a model: loss and perplexity of held-out text, accuracy of multiple choice; in BF16, in FP8 or in fp32.

    python launch/evaluate.py --load runs/7b/checkpoints --text wiki.txt --choices questions.jsonl --output eval/bf16
    python launch/evaluate.py --load runs/7b/checkpoints --text wiki.txt --choices questions.jsonl --forward fp8 \\
        --output eval/fp8 --baseline eval/bf16
    deepspeed launch/evaluate.py --load HF_FOLDER --data data/corpus

--load takes a training checkpoint of pretrain.py or finetune.py, a universal checkpoint, a converted folder or a
Hugging Face folder. Under a launcher, rows are dealt out to the ranks; results do not depend on their number.
Exit status: 0 done, 2 something that cannot be used, 4 another rank has ended, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import argparse
import math
import os
import platform
import shlex
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, whose classes are in checkpoints, looks for GPUs

import coat_dist
from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.checkpoint.write.durable import make_folder
from coat_dist.deepspeed.build.slurm import in_a_step, take_ranks
from coat_dist.ranks import check_same_on_all_ranks, of_another_rank, on_rank_0
from launch import failing
from launch.evaluation import arguments, model, report, scoring
from launch.evaluation.inputs import Inputs, digests, notes, read_inputs
from launch.evaluation.rows import Row, distinct
from launch.log_level import set_log_level, shows
from launch.model.gpt import load_model_config
from launch.outputs import checkpoint_at
from launch.prep import DataError
from launch.train import runtime
from launch.weights import open_weights
from launch.weights.checkpoint import CheckpointWeights

__all__ = ["evaluate", "main"]

USER_ERRORS = (CoatConfigError, CheckpointError, DataError)


def evaluate(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Read, build, score. torch.distributed is initialized before, Megatron's groups are not.

    Returns:
        What ``evaluation.json`` holds, and each question's ``details``.

    Raises:
        USER_ERRORS: on every rank; nothing was written.
    """
    from megatron_patches import initialize_model_parallel

    check_same_on_all_ranks({"arguments": {k: v for k, v in vars(args).items() if k != "local_rank"}})
    world, tp = torch.distributed.get_world_size(), args.tensor_parallel
    if world % tp:
        raise CoatConfigError(f"--tensor-parallel: got {tp}, accepted: a divisor of the number of ranks ({world})")
    if args.output is not None:
        on_rank_0(lambda: _try_folder(args.output))
    baseline = None if args.baseline is None else on_rank_0(lambda: report.read_report("--baseline", args.baseline))
    described = None if args.model is None else load_model_config(args.model)
    weights = open_weights(args.load, model=described)
    if described is not None and not isinstance(weights, CheckpointWeights):
        raise CoatConfigError(f"--model: got {args.model}, accepted: absent, as {weights.kind} says what model it is")
    run, step = model.read_run(weights)
    coat = model.choose_coat(args.deepspeed_config, run) if args.forward == "fp8" else None
    inputs = read_inputs(args, weights, run)
    say(f"{weights.path}: {weights.kind}{'' if step is None else f', step {step}'}; forward: {args.forward}")
    for text in (inputs.settings[key] for key in ("tokenizer", "bos") if inputs.settings.get(key)):
        say(text)
    if coat is not None:
        say(f'"coat" block: {coat.source}')
    for line in notes(inputs):
        say(line, "warning")
    if baseline is not None:  # now: after hours of scoring an error would leave nothing
        say_missing(report.not_in(baseline, digests(inputs), "--baseline"), "--baseline")
    initialize_model_parallel(tp, create_gloo_process_groups=False)
    built = model.build(weights, forward=args.forward, coat=coat, tp=tp, device=device, note=say)
    padded = weights.model.padded_vocab > (weights.model.vocab_size or 0)
    losses = scoring.token_losses(built, device, weights.model.vocab_size if padded else None)
    # Prepared data is scored as the run that trained the model scores it.
    as_trained = scoring.token_losses(built, device) if isinstance(weights, CheckpointWeights) else losses
    results = score_all(args, inputs, losses, as_trained)
    result = {
        "format": report.FORMAT,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "checkpoint": {"path": str(weights.path), "kind": weights.kind, "step": step},
        "model": weights.model.model_dump(),
        "forward": args.forward,
        "coat": None if coat is None else {"source": coat.source, **coat.config.activation.model_dump()},
        "settings": {**inputs.settings, "batch_size": args.batch_size},
        "ranks": world,
        "tensor_parallel": tp,
        "versions": _versions(),
        **results,
    }
    if baseline is not None:
        result["differences"] = report.differences(result, baseline, "--baseline")
    return result


def score_all(
    args: argparse.Namespace, inputs: Inputs, losses: scoring.Losses, of_data: scoring.Losses
) -> dict[str, list[dict[str, Any]]]:
    """Results of all inputs by kind; ``of_data`` is for prepared data.

    Raises:
        CoatConfigError: the model gives losses that are no numbers.
    """

    def score(rows: Sequence[Row], what: str, by: scoring.Losses = losses) -> list[float]:
        sums = scoring.score(by, rows, args.batch_size, what, args.tensor_parallel)
        if bad := sum(not math.isfinite(value) for value in sums):
            raise CoatConfigError(f"{what}: the loss of {bad} of {len(rows)} rows is not finite: the model is broken")
        return sums

    results: dict[str, list[dict[str, Any]]] = {"text": [], "data": [], "choices": []}
    for text in inputs.texts:
        one = report.tokens_result(text.name, text.rows, score(text.rows, text.name), text.bytes)
        counts = {
            "documents": text.documents,
            "tokens": text.tokens,
            "bytes": text.bytes,
            "skipped": dict(text.skipped),
        }
        results["text"].append({**one, **counts})
    if inputs.data:
        name = f"{' '.join(args.data)} ({inputs.settings['part']})"
        results["data"].append(report.tokens_result(name, inputs.data, score(inputs.data, name, of_data), None))
    for path, asked, rows, bad in inputs.questions:
        once, index = distinct(rows.rows)
        sums = score(once, path)
        one = report.choices_result(path, asked, rows, [sums[i] for i in index])
        results["choices"].append({**one, "malformed": bad})
    return results


def say(text: str, level: str = "info") -> None:
    """Print on rank 0, if ``--log-level`` shows it."""
    if torch.distributed.get_rank() == 0 and shows(level):
        print(text, flush=True)


def say_missing(names: Sequence[str], option: str) -> None:
    """Say what a baseline has not."""
    if names and os.environ.get("RANK", "0") == "0" and shows("warning"):
        print(f"note: {option}: has no {', '.join(names)} with the same content: no difference there", flush=True)


def _try_folder(folder: str) -> None:
    """Whether it can be written: after hours of scoring it would be too late."""
    if (outer := checkpoint_at(Path(os.path.realpath(folder)))) is not None:
        which = f"which is, or is in, the checkpoint {outer}"  # its run may remove both
        raise CoatConfigError(f"--output: got {folder}, {which}, accepted: another folder")
    try:
        make_folder(Path(folder))
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as problem:
        raise CoatConfigError(f"--output: got {folder}, accepted: a folder to write to ({problem})") from None


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "megatron-core")}
    return {"python": platform.python_version(), "coat_dist": coat_dist.__version__, **packages}


def alone() -> None:
    """Without a launcher this process is the only rank."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        device = torch.device("cuda", 0) if backend == "nccl" else None
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)


def compare(baseline: str, other: str) -> None:
    """Print the differences of two evaluations.

    Raises:
        CoatConfigError: a file that cannot be used, or nothing in common.
    """
    first, second = (report.read_report("--compare", path) for path in (baseline, other))
    option = f"--compare: {baseline}"
    found = report.differences(second, first, option)
    say_missing(report.not_in(first, report.digests(second), option), option)
    print(report.table_of_differences(found))


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    rank = 0
    try:
        if in_a_step():  # else a batch script's own process, which evaluates alone
            take_ranks()
        rank = int(os.environ.get("RANK", 0))
        args = arguments.parse(argv, __doc__)
        set_log_level(args.log_level)
        if args.compare is not None:
            compare(*args.compare)
            return 0
        alone()
        device = runtime.start(args.local_rank)
        result = evaluate(args, device)
        written = unwritten = None
        if args.output is not None:  # before anything is printed: a pipe may have been closed
            try:
                written = on_rank_0(lambda: report.write_report(args.output, result, args.details))
            except CoatConfigError as problem:  # a full disk, say: hours of scoring are not lost, they are printed
                unwritten = problem
        if rank == 0:
            print(report.table(result))
            if "differences" in result:
                print(f"\nbeside {args.baseline}:\n{report.table_of_differences(result['differences'])}")
        if written is not None:
            say(f"written: {written}")
        if unwritten is not None:
            raise unwritten
    except USER_ERRORS as problem:
        failing.end(str(problem), rank)
        return 2
    except KeyboardInterrupt:
        print("evaluate: interrupted; nothing was written", file=sys.stderr)
        return 130
    except (torch.distributed.DistError, RuntimeError) as problem:
        if not of_another_rank(problem):
            raise
        failing.end_of_collective(problem, rank)
        return 4
    runtime.finish()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status:
        os._exit(status)  # no waiting for ranks that will not come
