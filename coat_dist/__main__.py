"""Run any program as if it began with ``import coat_dist``: ``python -m coat_dist PROGRAM ...`` or
``-m MODULE ...``.

For programs that nobody wants to edit, such as ``llamafactory-cli`` and ``accelerate launch``.
Works under ``torchrun ... -m coat_dist PROGRAM`` and ``deepspeed --module coat_dist PROGRAM`` as
well, and in the Python processes that the program starts: these find
``coat_dist/children/sitecustomize.py`` on ``PYTHONPATH``. What PROGRAM, ``-m`` and ``-c`` mean is
Python's own: files, folders and zip files run as under ``python`` alone.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import shutil
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

USAGE = (
    "usage: python -m coat_dist PROGRAM [ARGUMENT ...], or -m MODULE or -c CODE in place of PROGRAM"
)


def main() -> None:
    """Find the program, and become it."""
    given = sys.argv[1:]
    ranks = []
    # Of the deepspeed launcher.
    while given and given[0].startswith(("--local_rank", "--local-rank")):
        ranks.append(given.pop(0))
    flag = given.pop(0) if given and given[0] in ("-m", "--module", "-c") else None
    if not given or given[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    name, *arguments = given
    program = flag or _find(name)
    sys.argv = [program, *ranks, *arguments]
    _reach_children()
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    # For good: classes that the program pickles are looked up there.
    sys.modules["__main__"] = module
    # What `python -m coat_dist` put first on sys.path, the current folder, gives way to what Python
    # has there.
    safe, path = sys.flags.safe_path, os.path.join(os.getcwd(), program)
    if flag == "-c":
        sys.path[:1] = sys.path[:1] if safe else [""]
        exec(compile(name, "<string>", "exec", dont_inherit=True), vars(module))
    elif flag is not None:
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # `python -m` itself calls it
    elif pkgutil.get_importer(path) is not None:  # a folder or a zip file
        sys.path[: not safe] = [path]
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.path[:1] = sys.path[:1] if safe else [os.path.dirname(os.path.realpath(path))]
        loader = SourceFileLoader("__main__", path)
        vars(module).update(__file__=path, __cached__=None, __loader__=loader)
        exec(loader.source_to_code(loader.get_data(path), path), vars(module))


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


def _reach_children() -> None:
    """Let Python processes that the program starts import coat_dist, too, before they import
    DeepSpeed.
    """
    os.environ["COAT_DIST_PREFIX"] = sys.prefix
    folder, given = str(Path(__file__).parent / "children"), os.environ.get("PYTHONPATH", "")
    if folder not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{given}" if given else folder


if __name__ == "__main__":
    main()
