"""Convert a checkpoint of DeepSpeed's ZeRO for other numbers of ranks and pipeline stages, ZeRO
stages and optimizers.

    python launch/to_universal.py --load runs/first/checkpoints --output runs/first/universal
    deepspeed --num_gpus 4 launch/pretrain.py ... --load runs/first/universal

It may be of pretrain.py, of any DeepSpeed program, or a checkpoint-N of transformers' Trainer. The
options of DeepSpeed's own ds_to_universal.py are taken too:

    python launch/to_universal.py --input_folder out/global_step100 \\
        --output_folder out/global_step100_universal

The output is in DeepSpeed's universal format, with a manifest of checksums. One process, no GPU;
needs memory for the largest parameter (twice for a tied embedding of pipeline stages) and disk
space for 14 bytes a parameter (12 from fp32 moments). FP8 moments are decoded to fp32; groups of
codes that the loading run finds again keep their bytes, others are encoded again then. Exit status:
0 done, 2 a checkpoint that cannot be converted, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.convert.universal_options import parser

if __name__ == "__main__":
    parser(__doc__).parse_args()  # a misspelt option is refused before torch is imported

import os
import shutil
from collections.abc import Sequence

from coat_dist.checkpoint.manifest import FORMAT, CheckpointError, sync_files, verify
from launch.common.log_level import say, set_log_level
from launch.common.progress import Progress
from launch.convert.universal_folders import Source, UniversalOutput, find_source
from launch.convert.weights import CARRIED

# Raised by files of another layout than DeepSpeed 0.19's, or damaged ones.
_LAYOUT = (KeyError, IndexError, AttributeError, TypeError, AssertionError, StopIteration)


def convert(source: Path, folder: Path, exact: bool = False) -> Path:
    """Convert one checkpoint into ``folder``, under the name of its step or its own; returns the
    new folder.

    An earlier conversion of the same checkpoint is replaced, and removed when the new one is
    complete. A kill leaves at most folders whose names start with ``.unfinished-``, which the next
    conversion removes.

    Args:
        source: folder of a finished checkpoint, of pretrain.py or of any program with DeepSpeed's
            ZeRO.
        folder: holds universal checkpoints, their ``latest`` and ``latest_universal``.
        exact: ``folder`` itself becomes the universal checkpoint, and ``latest_universal`` beside
            it names it.

    Raises:
        CheckpointError: ``source`` cannot be converted, or ``folder`` cannot be written or holds
            something that would be lost or mixed up. Nothing is changed then.
    """
    from coat_dist import convert_to_universal

    there, folder = Source(source.resolve()), folder.resolve()
    output = UniversalOutput(
        "--output_folder" if exact else "--output", folder if exact else folder / there.name, exact
    )
    identity = there.identity()
    output.check(there, identity)
    bar = Progress(0, "convert", unit=" elements")

    def show(elements: int, of: int) -> None:
        bar.total = of
        bar.update(elements)

    try:
        with output.locked() as temporary, bar:
            output.check(there, identity)  # again: another may have written until the lock was ours
            if there.manifest:
                verify(there.path, there.manifest["files"])
            temporary.mkdir()
            convert_to_universal(there.path, temporary, show)
            if (there.path / CARRIED).is_dir():
                shutil.copytree(there.path / CARRIED, temporary / CARRIED)
            content = there.manifest if there.of_run else {"format": FORMAT, **identity}
            left = output.publish({**content, "files": sync_files(temporary), "universal": True})
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, *_LAYOUT) as problem:
        # The latter is torch.save's.
        if any(text in str(problem) for text in ("No space left", "unexpected pos")):
            raise CheckpointError(
                f"{output.option}: cannot write {output.final}: the disk is full"
            ) from problem
        named = f"{type(problem).__name__}: {problem}" if isinstance(problem, _LAYOUT) else problem
        raise CheckpointError(f"cannot convert {there.path}: {named}") from problem
    for line in left:
        say(f"warning: cannot remove an old checkpoint: {line}", "warning")
    return output.final


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    args = parser(__doc__).parse_args(argv)
    set_log_level(args.log_level)
    exact = args.output is None
    try:
        source = find_source(args.load)
        final = convert(source.path, Path(args.output or args.output_folder), exact)
    except (CheckpointError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("to_universal: interrupted; nothing was changed", file=sys.stderr)
        return 130
    size = sum(p.stat().st_size for p in final.rglob("*") if p.is_file())
    how = (
        f'with "checkpoint": {{"load_universal": true}} and '
        f"engine.load_checkpoint({str(final.parent)!r})"
    )
    if source.of_run:  # the `latest` beside an exact folder is of other checkpoints
        how = f"with --load {final if exact else final.parent}"
    say(f"{source.path} -> {final} ({size:,} bytes); load it {how}")
    return 0


if __name__ == "__main__":
    # Or DeepSpeed, whose classes are in the files, looks for GPUs.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
