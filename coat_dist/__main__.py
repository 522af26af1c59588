"""Run any program as if it began with ``import coat_dist``: ``python -m coat_dist PROGRAM ...`` or
``-m MODULE ...``.

For programs that nobody wants to edit, such as ``llamafactory-cli`` and ``accelerate launch``.
Works under ``torchrun ... -m coat_dist PROGRAM`` and ``deepspeed --module coat_dist PROGRAM`` as
well. This process becomes ``python PROGRAM``, with the options that Python was started with, and
with ``coat_dist/children`` on ``PYTHONPATH``: its ``sitecustomize.py`` imports coat_dist before
DeepSpeed, there and in the Python processes that the program starts.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

USAGE = (
    "usage: python -m coat_dist PROGRAM [ARGUMENT ...], or -m MODULE or -c CODE in place of PROGRAM"
)


def main() -> None:
    """Find the program, and become it."""
    if sys.flags.ignore_environment:  # PYTHONPATH too: the program would run without coat_dist
        raise SystemExit("python -m coat_dist: got Python's -E or -I, accepted: neither of them")
    given = sys.argv[1:]
    options = sys.orig_argv[1 : -len(given) - 2]  # Python's own, before "-m coat_dist"
    ranks = []
    # Of the deepspeed launcher.
    while given and given[0].startswith(("--local_rank", "--local-rank")):
        ranks.append(given.pop(0))
    flag = []
    if given and given[0] in ("-m", "--module", "-c"):
        flag = ["-c" if given.pop(0) == "-c" else "-m"]
    if not given or given[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    name, *arguments = given
    program = [*flag, name] if flag else [_find(name)]
    _import_before_deepspeed()
    os.execv(sys.executable, [sys.executable, *options, *program, *ranks, *arguments])


def _find(name: str) -> str:
    """The path of a file, of a folder or zip file with ``__main__.py``, or of a command that is
    a Python script.
    """
    is_program = os.path.isfile(name) or os.path.isfile(os.path.join(name, "__main__.py"))
    path = name if is_program else shutil.which(name)
    if path is None:
        accepted = (
            "a Python file, a folder or zip file with __main__.py, or a command that is a "
            "Python script"
        )
        raise SystemExit(f"python -m coat_dist: got {name!r}, accepted: {accepted}")
    return path


def _import_before_deepspeed() -> None:
    """Let the program, and Python processes that it starts, import coat_dist before DeepSpeed."""
    os.environ["COAT_DIST_PREFIX"] = sys.prefix
    folder, given = str(Path(__file__).parent / "children"), os.environ.get("PYTHONPATH", "")
    if folder not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{given}" if given else folder


if __name__ == "__main__":
    main()
