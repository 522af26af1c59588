"""Evaluate a model: loss and perplexity of held-out text, accuracy of multiple choice; in BF16, in
FP8 or in fp32.

    python launch/evaluate.py --load runs/7b/checkpoints --text wiki.txt \\
        --choices questions.jsonl --output eval/bf16
    python launch/evaluate.py --load runs/7b/checkpoints --text wiki.txt \\
        --choices questions.jsonl --forward fp8 \\
        --output eval/fp8 --baseline eval/bf16
    deepspeed launch/evaluate.py --load HF_FOLDER --data data/corpus

--load takes a training checkpoint of pretrain.py, a universal checkpoint, a
converted folder or a Hugging Face folder. Under a launcher, rows are dealt out to the ranks;
results do not depend on their number. Exit status: 0 done, 2 something that cannot be used, 4
another rank has ended, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would
# find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    # Or DeepSpeed, whose classes are in checkpoints, looks for GPUs.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import coat_dist
from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.checkpoint.write.durable import make_folder
from coat_dist.deepspeed.without_launcher import in_a_step, take_ranks
from coat_dist.ranks import check_same_on_all_ranks, of_another_rank, on_rank_0
from launch import failing
from launch.evaluation import arguments, model, report, rows
from launch.evaluation.arguments import EvaluateOptions
from launch.evaluation.inputs import Inputs, read_inputs
from launch.log_level import say, set_log_level
from launch.model.gpt import load_model_config
from launch.outputs import checkpoint_at
from launch.prep import DataError
from launch.train import runtime
from launch.weights import open_weights
from launch.weights.checkpoint import CheckpointWeights

__all__ = ["evaluate", "main"]

USER_ERRORS = (CoatConfigError, CheckpointError, DataError)


def evaluate(args: EvaluateOptions, device: torch.device) -> dict[str, Any]:
    """Read, build, score. torch.distributed is initialized before, Megatron's groups are not.

    Returns:
        Content of ``evaluation.json``, and each question's ``details``.

    Raises:
        USER_ERRORS: on every rank; nothing was written.
    """
    from megatron_patches import initialize_model_parallel

    check_same_on_all_ranks(
        {"arguments": {k: v for k, v in vars(args).items() if k != "local_rank"}}
    )
    world, tp, output = torch.distributed.get_world_size(), args.tensor_parallel, args.output
    if world % tp:
        raise CoatConfigError(
            f"--tensor-parallel: got {tp}, accepted: a divisor of the number of ranks ({world})"
        )
    if output is not None:
        on_rank_0(lambda: _make_output(output))
    given = args.baseline
    baseline = None if given is None else on_rank_0(lambda: report.read_report("--baseline", given))
    described = None if args.model is None else load_model_config(args.model)
    weights = open_weights(str(args.load), model=described)
    run, step = model.read_run(weights)
    coat = model.choose_coat(args.deepspeed_config, run) if args.forward == "fp8" else None
    inputs = read_inputs(args, weights, run)
    say(
        f"{weights.path}: {weights.kind}{'' if step is None else f', step {step}'}; forward: "
        f"{args.forward}"
    )
    for text in (inputs.settings[key] for key in ("tokenizer", "bos") if inputs.settings.get(key)):
        say(text)
    if coat is not None:
        say(f'"coat" block: {coat.source}')
    for line in inputs.notes:
        say(line, "warning")
    initialize_model_parallel(tp, create_gloo_process_groups=False)
    built = model.build(weights, forward=args.forward, coat=coat, tp=tp, device=device)
    model_vocab = weights.model.vocab_size or 0
    losses = model.token_losses(
        built, device, model_vocab if weights.model.padded_vocab > model_vocab else None
    )
    # Prepared data is scored as the run that trained the model scores it.
    as_trained = (
        model.token_losses(built, device) if isinstance(weights, CheckpointWeights) else losses
    )
    results = score_all(args, inputs, losses, as_trained)
    result = {
        "format": report.FORMAT,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "checkpoint": {"path": str(weights.path), "kind": weights.kind, "step": step},
        "model": weights.model.model_dump(),
        "forward": args.forward,
        "coat": None
        if coat is None
        else {"source": coat.source, **coat.config.activation.model_dump()},
        "settings": {**inputs.settings, "batch_size": args.batch_size},
        "ranks": world,
        "tensor_parallel": tp,
        "versions": {
            "python": platform.python_version(),
            "coat_dist": coat_dist.__version__,
            **{name: version(name) for name in ("torch", "megatron-core")},
        },
        **results,
    }
    if baseline is not None:
        result["differences"] = report.differences(result, baseline)
        say_missing(result, baseline, "--baseline")
    return result


def score_all(
    args: EvaluateOptions, inputs: Inputs, losses: model.Losses, of_data: model.Losses
) -> dict[str, list[dict[str, Any]]]:
    """Results of all inputs by kind; ``of_data`` is for prepared data.

    Raises:
        CoatConfigError: the model gives losses that are no numbers.
    """
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in report.KINDS}
    for one in inputs.found:
        own = of_data if one.kind == "data" else losses
        sums = rows.score(own, one.rows, args.batch_size, one.name, args.tensor_parallel)
        if bad := sum(not math.isfinite(value) for value in sums):
            raise CoatConfigError(
                f"{one.name}: the loss of {bad} of {len(sums)} rows is not finite"
            )
        if one.kind == "choices":
            result = report.choices_result(one.name, one.questions, sums)
        else:
            result = report.tokens_result(one.name, one.rows, sums, one.counts.get("bytes"))
        results[one.kind].append({**result, **one.counts})
    return results


def say_missing(result: Mapping[str, Any], baseline: Mapping[str, Any], option: str) -> None:
    """Print which inputs are not compared."""
    if names := report.not_in(result, baseline):
        say(
            f"note: {option}: has no {', '.join(names)} with the same content: no difference there",
            "warning",
        )


def _make_output(folder: str) -> None:
    """Make the folder now: after hours of scoring an error would be too late."""
    if (outer := checkpoint_at(Path(os.path.realpath(folder)))) is not None:
        which = f"which is, or is in, the checkpoint {outer}"  # its run may remove both
        raise CoatConfigError(f"--output: got {folder}, {which}, accepted: another folder")
    try:
        make_folder(Path(folder))
    except OSError as problem:
        raise CoatConfigError(
            f"--output: got {folder}, accepted: a folder to write to ({problem})"
        ) from None


def alone() -> None:
    """Without a launcher this process is the only rank."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        device = torch.device("cuda", 0) if backend == "nccl" else None
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(
            backend, store=store, rank=0, world_size=1, device_id=device
        )


def compare(baseline: str, other: str) -> None:
    """Print the differences of two evaluations."""
    first, second = (report.read_report("--compare", path) for path in (baseline, other))
    say_missing(second, first, f"--compare: {baseline}")
    print(report.comparison(report.differences(second, first)))


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    rank = 0
    try:
        if in_a_step():  # else a batch script's own process, which evaluates alone
            take_ranks()
        rank = int(os.environ.get("RANK", 0))
        args = arguments.parse(argv)
        set_log_level(args.log_level)
        if args.compare is not None:
            compare(*args.compare)
            return 0
        alone()
        device = runtime.start(args.local_rank)
        result = evaluate(args, device)
        try:
            # Before anything is printed: a pipe may have been closed.
            if (output := args.output) is not None:
                written = on_rank_0(lambda: report.write_report(output, result, args.details))
                say(f"written: {written}")
        finally:  # also to a full disk
            if rank == 0:
                print(report.table(result))
                if "differences" in result:
                    print(f"\nbeside {args.baseline}:\n{report.comparison(result['differences'])}")
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
