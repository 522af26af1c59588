"""Files of ``configs/`` by their name, in a clone and in an installed package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from coat_dist import CoatConfigError
from coat_dist.config import load_json

# setup.py puts the project's `configs` into this package; in a clone, installed as editable or not,
# it is beside it.
_HERE = Path(__file__).resolve()  # `launch` may be a link in somebody's folder
_IN_PACKAGE, _BESIDE_IT = _HERE.parents[1] / "configs", _HERE.parents[2] / "configs"
_FOLDER = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _BESIDE_IT


def find_config(
    option: str, given: str | os.PathLike, kind: Literal["models", "deepspeed"]
) -> Path:
    """The file that an option of a command line means.

    That is the path of a file that exists, or a file of ``configs/<kind>`` by its name
    (``llama2-7b``) or by its path in the project (``configs/models/llama2-7b.json``), whatever the
    current folder is.

    Raises:
        CoatConfigError: neither; names the option and lists the names.
    """
    path = Path(given)
    if os.path.exists(path) and not path.is_dir():
        return path
    names = sorted(file.stem for file in (_FOLDER / kind).glob("*.json"))
    name = path.name.removesuffix(".json")
    if name in names and path.parent in (Path(), Path(kind), Path("configs", kind)):
        return _FOLDER / kind / f"{name}.json"
    raise CoatConfigError(
        f"{option}: got {given}, accepted: a file, or one of configs/{kind}: {', '.join(names)}"
    )


def read_config(
    option: str, given: str | os.PathLike, kind: Literal["models", "deepspeed"]
) -> dict[str, Any]:
    """The object in the file that :func:`find_config` gives.

    Raises:
        CoatConfigError: there is no such file, or it holds no JSON object; names the option.
    """
    path = find_config(option, given, kind)
    try:
        return load_json(path)
    except CoatConfigError as problem:
        raise CoatConfigError(f"{option}: {str(problem).removeprefix('config: ')}") from None
