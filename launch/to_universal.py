"""Convert a checkpoint of DeepSpeed's ZeRO for other numbers of ranks and pipeline stages, ZeRO stages and optimizers.

    python launch/to_universal.py --load runs/first/checkpoints --output runs/first/universal
    deepspeed --num_gpus 4 launch/pretrain.py ... --load runs/first/universal

It may be of pretrain.py, of any DeepSpeed program, or a checkpoint-N of transformers' Trainer. The options of
DeepSpeed's own ds_to_universal.py are taken too:

    python launch/to_universal.py --input_folder out/global_step100 --output_folder out/global_step100_universal

The output is in DeepSpeed's universal format, with a manifest of checksums. One process, no GPU; needs memory for the
largest parameter (twice for a tied embedding of pipeline stages) and disk space for 14 bytes a parameter (12 from
fp32 moments). FP8 moments are decoded to fp32; groups of codes that the loading run finds again keep their bytes,
others are encoded again then.
Exit status: 0 done, 2 a checkpoint that cannot be converted, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from coat_dist.checkpoint.manifest import FORMAT, CheckpointError, sync_files, verify
from coat_dist.checkpoint.write.lock import locked_folder
from launch.log_level import say, set_log_level
from launch.progress import Progress
from launch.universal.arguments import parse, without_effect
from launch.universal.output import Output
from launch.universal.room import bytes_needed, say_full
from launch.universal.source import Source, find_source, read_source
from launch.weights.source import CARRIED

__all__ = ["convert", "main"]

# What reading files of another layout than DeepSpeed 0.19's, or of damaged bytes, ends in.
_LAYOUT = (KeyError, IndexError, AttributeError, TypeError, AssertionError, StopIteration)


def convert(source: Path, folder: Path, exact: bool = False) -> Path:
    """Convert one checkpoint into ``folder``, under the name of its step or its own.

    An earlier conversion of the same checkpoint is replaced, and removed when the new one is complete. A kill leaves at
    most folders whose names start with ``.unfinished-``, which the next conversion removes.

    Args:
        source: folder of a finished checkpoint, of pretrain.py or of any program with DeepSpeed's ZeRO.
        folder: holds universal checkpoints, their ``latest`` and ``latest_universal``.
        exact: ``folder`` itself becomes the universal checkpoint, and ``latest_universal`` beside it names it.

    Returns:
        The folder of the universal checkpoint.

    Raises:
        CheckpointError: ``source`` is damaged, universal already or of a kind that cannot be converted; ``folder``
            cannot be written, has no room, is in a checkpoint, or holds those of a run, or another run's of this step.
            Nothing is changed then.
    """
    from coat_dist import convert_to_universal

    there, folder = read_source(source.resolve()), folder.resolve()
    option = "--output_folder" if exact else "--output"
    output = Output(option, folder if exact else folder / there.name, exact)
    identity, needed = _identity(there), bytes_needed(there.path)
    output.check(there, identity, needed)
    with ExitStack() as held:
        held.callback(_remove_if_empty, output.final.parent, output.final.parent.exists())
        held.enter_context(_alone(output))
        output.check(there, identity, needed)  # again: another may have written until the lock was ours
        if there.manifest is not None:
            verify(there.path, there.manifest["files"])
        try:
            if output.temporary.exists():
                shutil.rmtree(output.temporary)
            output.temporary.mkdir()
            held.callback(shutil.rmtree, output.temporary, ignore_errors=True)  # after an error; else it is gone
            convert_to_universal(there.path, output.temporary, _progress(held))
            if (there.path / CARRIED).is_dir():
                shutil.copytree(there.path / CARRIED, output.temporary / CARRIED)
            content = there.manifest if there.of_run else {"format": FORMAT, **identity}
            manifest = {**(content or {}), "files": sync_files(output.temporary), "universal": True}
            left = output.publish(manifest)
        except (OSError, RuntimeError, ValueError) as problem:  # torch.save reports a full disk as RuntimeError
            shutil.rmtree(output.temporary, ignore_errors=True)  # now, for what is said of free bytes
            if (full := say_full(problem, folder, needed)) is not None:
                raise CheckpointError(f"{option}: cannot write {output.final}: {full}") from problem
            raise CheckpointError(f"cannot convert {there.path}: {problem}") from problem
        except _LAYOUT as problem:
            raise CheckpointError(
                f"cannot convert {there.path}: {type(problem).__name__}: {problem}; accepted: files that DeepSpeed's "
                "ZeRO wrote"
            ) from problem
        for line in left:
            say(f"warning: cannot remove an old checkpoint: {line}", "warning")
    return output.final


def _progress(held: ExitStack) -> Callable[[int, int], None]:
    """For ``convert_to_universal``; what it shows ends with ``held``."""
    bar: list[Progress] = []

    def show(elements: int, of: int) -> None:
        if not bar:
            bar.append(held.enter_context(Progress(of, "convert", unit="elements")))
        bar[0].update(elements)

    return show


def _identity(source: Source) -> dict[str, Any]:
    """What tells one checkpoint from another of the same step."""
    if source.of_run:
        assert source.manifest is not None
        return {key: source.manifest[key] for key in ("run", "progress")}
    return {"progress": {"step": _global_step(source.path)}, "run": {}, "source": str(source.path)}


def _global_step(folder: Path) -> int:
    """Steps that the engine had taken; what cannot be read is named when it is converted."""
    for path in sorted(folder.glob("*model_states.pt")):
        with suppress(Exception):
            return int(torch.load(path, map_location="cpu", weights_only=False, mmap=True)["global_steps"])
    return 0


def _alone(output: Output) -> Any:
    """Keep other conversions out. A run that saves beside an exact folder does not disturb, nor is it disturbed."""
    folder = output.temporary.with_name(f".converting-{output.final.name}") if output.exact else output.final.parent
    stack = ExitStack()
    if output.exact:
        stack.callback(_remove_if_empty, folder, False)
    stack.enter_context(locked_folder(folder, output.option, CheckpointError))
    return stack


def _remove_if_empty(folder: Path, was_there: bool) -> None:
    """Leave nothing of a conversion that failed."""
    if not was_there:
        with suppress(OSError):
            folder.rmdir()


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    args = parse(argv, __doc__)
    set_log_level(args.log_level)
    for line in without_effect(args):
        say(line, "warning")
    try:
        source = find_source(args.load)
        final = convert(source.path, Path(args.output or args.output_folder), exact=args.output is None)
    except (CheckpointError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("to_universal: interrupted; nothing was changed", file=sys.stderr)
        return 130
    size = sum(p.stat().st_size for p in final.rglob("*") if p.is_file())
    say(f"{source.path} -> {final} ({size:,} bytes); {_how_to_load(source, final, exact=args.output is None)}")
    return 0


def _how_to_load(source: Source, final: Path, exact: bool) -> str:
    if source.of_run:  # the `latest` beside an exact folder is of other checkpoints
        return f"load it with --load {final if exact else final.parent}"
    return f'load it with "checkpoint": {{"load_universal": true}} and engine.load_checkpoint({str(final.parent)!r})'


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, whose classes are in the files, looks for GPUs
    sys.exit(main())
