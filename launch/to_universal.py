"""Convert a checkpoint of pretrain.py so that it continues at another number of ranks, ZeRO stage or optimizer.

    python launch/to_universal.py --load runs/first/checkpoints --output runs/first/universal
    deepspeed --num_gpus 4 launch/pretrain.py ... --load runs/first/universal

The output is in DeepSpeed's universal format, with a manifest of checksums. One process, no GPU; needs memory for the
largest parameter and disk space for 14 bytes a parameter (12 from fp32 moments). FP8 moments are decoded to fp32;
groups of codes that the loading run finds again keep their bytes, others are encoded again then.
Exit status: 0 done, 2 a checkpoint that cannot be converted.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from coat_dist.checkpoint.lock import locked_folder
from coat_dist.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest, sync_files, verify
from coat_dist.checkpoint.publish import find, finished, name_of, publish, retire, unfinished

__all__ = ["convert", "main"]


def convert(source: Path, folder: Path) -> Path:
    """Convert one checkpoint into ``folder``, under the name of its step.

    An earlier conversion of the same checkpoint is replaced, and removed when the new one is complete. A kill leaves at
    most folders whose names start with ``.unfinished-``, which the next conversion removes.

    Args:
        source: folder of a finished checkpoint.
        folder: holds universal checkpoints and their ``latest``.

    Returns:
        The folder of the universal checkpoint.

    Raises:
        CheckpointError: ``source`` is damaged, universal already or of a kind that cannot be converted; ``folder``
            cannot be written, is in a checkpoint, or holds those of a run, or another run's of this step. Nothing is
            changed then.
    """
    from coat_dist import convert_to_universal

    source, folder = source.resolve(), folder.resolve()
    manifest = read_manifest(source)
    if manifest.get("universal"):
        raise CheckpointError(f"{source}: is universal already, accepted: a checkpoint of pretrain.py")
    final = folder / name_of(manifest["progress"]["step"])  # not source's name, which may be a copy's
    _check_output(source, folder, final, manifest)
    verify(source, manifest["files"])
    temporary = unfinished(final)
    with ExitStack() as held:
        held.enter_context(locked_folder(folder, "--output", CheckpointError))
        _check_output(source, folder, final, manifest)  # again: another may have written until the lock was ours
        try:
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()
            held.callback(shutil.rmtree, temporary, ignore_errors=True)  # after an error; else it is gone
            convert_to_universal(source, temporary)
            publish(temporary, final, {**manifest, "files": sync_files(temporary), "universal": True})
        except (OSError, RuntimeError, ValueError) as problem:  # torch.save reports a full disk as RuntimeError
            raise CheckpointError(f"cannot convert {source}: {problem}") from problem
        for left in retire(folder, final):
            print(f"warning: cannot remove an old checkpoint: {left}", file=sys.stderr)
    return final


def _check_output(source: Path, folder: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a folder in which something would be lost or mixed up."""

    def refuse(what: str) -> None:
        raise CheckpointError(f"--output: got {folder}, {what}, accepted: another folder")

    if folder == source.parent:
        refuse("where the source is")
    if folder.is_relative_to(source) or (folder / MANIFEST).exists():
        refuse("which is a checkpoint or in one")
    for there in finished(folder):
        its = read_manifest(there)
        if not its.get("universal"):
            refuse(f"which holds a run's own checkpoint, {there.name}")
        if there == final and any(its.get(key) != manifest[key] for key in ("run", "progress")):
            refuse(f"which holds another run's {there.name}")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, metavar="DIR", help="a checkpoint, or a folder with `latest`")
    parser.add_argument("--output", required=True, metavar="DIR", help="gets the universal checkpoint and `latest`")
    args = parser.parse_args(argv)
    try:
        source = find(args.load)
        if source is None:
            raise CheckpointError(f"--load: got {args.load}, accepted: a checkpoint of pretrain.py")
        final = convert(source, Path(args.output))
    except (CheckpointError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    size = sum(p.stat().st_size for p in final.rglob("*") if p.is_file())
    print(f"{source} -> {final} ({size:,} bytes); load it with --load {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
