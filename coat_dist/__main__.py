"""Run any program as if it began with ``import coat_dist``: ``python -m coat_dist PROGRAM ...`` or ``-m MODULE ...``.

For programs that nobody wants to edit, such as ``llamafactory-cli`` and ``accelerate launch``. Works under ``torchrun
... -m coat_dist PROGRAM`` and ``deepspeed --module coat_dist PROGRAM`` as well, and in the Python processes that the
program starts: these find ``coat_dist/children/sitecustomize.py`` on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path

USAGE = "usage: python -m coat_dist PROGRAM [ARGUMENT ...], or python -m coat_dist -m MODULE [ARGUMENT ...]"


def main() -> None:
    """Find the program, and become it."""
    given = sys.argv[1:]
    ranks = []
    while given and given[0].startswith(("--local_rank", "--local-rank")):  # of the deepspeed launcher
        ranks.append(given.pop(0))
    as_module = bool(given) and given[0] in ("-m", "--module")
    if len(given) < 1 + as_module or given[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    name, *arguments = given[as_module:]
    _reach_children()
    if as_module:
        code, module = _of_module(name)
    else:
        code, module = _of_file(name)
        sys.path[0] = str(Path(module.__file__ or "").parent)
    sys.argv = [str(module.__file__) if as_module else name, *ranks, *arguments]
    sys.modules["__main__"] = module  # for good: classes that the program pickles are looked up there
    exec(code, vars(module))


def _of_file(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Code and namespace of a file, or of a command on PATH that is a Python script."""
    path = name if os.path.exists(name) else shutil.which(name)
    if path is None:
        raise SystemExit(f"python -m coat_dist: got {name!r}, accepted: a Python file, or a command that is one")
    path = os.path.abspath(path)
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__, __cached__=None)
    return compile(Path(path).read_bytes(), path, "exec"), module


def _of_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """As :func:`_of_file`, of a module, or of a package's ``__main__``."""
    sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None or spec.loader is None else spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise SystemExit(f"python -m coat_dist: -m: got {name!r}, accepted: a module that can be run")
    module = types.ModuleType("__main__")
    vars(module).update(__file__=spec.origin, __spec__=spec, __package__=spec.parent, __loader__=spec.loader)
    vars(module)["__builtins__"] = __builtins__
    return code, module


def _reach_children() -> None:
    """Let Python processes that the program starts import coat_dist, too, before they import DeepSpeed."""
    folder = str(Path(__file__).parent / "children")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])


if __name__ == "__main__":
    main()
