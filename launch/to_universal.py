"""Convert a checkpoint of pretrain.py so that it continues at another number of ranks, ZeRO stage or optimizer.

    python launch/to_universal.py --load runs/first/checkpoints --output runs/first/universal
    deepspeed --num_gpus 4 launch/pretrain.py ... --load runs/first/universal

The output is in DeepSpeed's universal format, with a manifest of checksums. One process, no GPU; needs memory for the
largest parameter and disk space for 14 bytes a parameter (12 from fp32 moments). FP8 moments are decoded to fp32;
groups of codes that the loading run finds again keep their bytes, others are encoded again then.
Exit status: 0 done, 2 a checkpoint that cannot be converted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from launch import checkpoint

__all__ = ["convert", "main"]


def convert(source: Path, folder: Path) -> Path:
    """Convert one checkpoint into ``folder``, under the same name.

    A kill leaves at most a folder whose name starts with ``.unfinished-``, which the next conversion removes.

    Args:
        source: folder of a finished checkpoint.
        folder: holds universal checkpoints and their ``latest``.

    Returns:
        The folder of the universal checkpoint.

    Raises:
        CheckpointError: ``source`` is damaged, universal already or of a kind that cannot be converted; ``folder``
            cannot be written. Nothing is changed then.
    """
    from coat_dist import convert_to_universal

    manifest = checkpoint.read_manifest(source)
    if manifest.get("universal"):
        raise checkpoint.CheckpointError(f"{source}: is universal already, accepted: a checkpoint of pretrain.py")
    if folder.resolve() == source.resolve().parent:
        raise checkpoint.CheckpointError(f"--output: got {folder}, where the source is, accepted: another folder")
    checkpoint.verify(source, manifest["files"])
    final = folder / source.name
    temporary = folder / f".unfinished-{source.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        convert_to_universal(source, temporary)
        names = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file())
        sums = checkpoint.checksums(temporary, names, sync=True)
        checkpoint.publish(temporary, final, {**manifest, "files": sums, "universal": True})
    except (OSError, RuntimeError, ValueError) as problem:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise checkpoint.CheckpointError(f"cannot convert {source}: {problem}") from problem
    return final


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, metavar="DIR", help="a checkpoint, or a folder with `latest`")
    parser.add_argument("--output", required=True, metavar="DIR", help="gets the universal checkpoint and `latest`")
    args = parser.parse_args(argv)
    try:
        source = checkpoint.find(args.load)
        if source is None:
            raise checkpoint.CheckpointError(f"--load: got {args.load}, accepted: a checkpoint of pretrain.py")
        final = convert(source, Path(args.output))
    except checkpoint.CheckpointError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    size = sum(p.stat().st_size for p in final.rglob("*") if p.is_file())
    print(f"{source} -> {final} ({size:,} bytes); load it with --load {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
