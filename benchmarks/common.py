"""What every benchmark shares: where results and pictures go, how they are written and printed, and
what identifies a run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""The repository: programs are started from here, and their paths are relative to it."""
RESULTS = Path(__file__).with_name("results")
PATHS = "--peers", "--data", "--extend", "--folder", "--text", "--plot", "--output"
"""Options whose value is a path of this machine."""
WIDTH = 400
"""Characters up to which nested JSON stays on one line."""


def options(arguments: argparse.Namespace, *without: str) -> dict[str, Any]:
    """The options that say what was measured, to be written into the result: all but paths,
    ``--name`` and ``without``.
    """
    left_out = {"name", *(path.removeprefix("--") for path in PATHS), *without}
    return {key: value for key, value in vars(arguments).items() if key not in left_out}


def command() -> str:
    """This run's command as one would type it: the module by name, without folders of this
    machine.
    """
    words: list[str] = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        words += [option, value] if equals and option in PATHS else [word]
    arguments, rest = [], iter(words)
    for word in rest:
        if word not in PATHS:
            arguments.append(word)
        elif next(rest, None) is not None and word != "--output":
            arguments += [word, "PATH"]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return shlex.join(
        ["python", *(["-m", spec.name] if spec else [Path(sys.argv[0]).name]), *arguments]
    )


def environment() -> dict[str, Any]:
    """Command, date, commit, versions and GPUs of this run."""
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    names = "torch", "triton", "deepspeed", "megatron-core", "transformers", "peft", "liger-kernel"
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {n: version(n) for n in (*names, "trl", "torchao", "bitsandbytes")},
        "cuda": torch.version.cuda,
        "gpus": gpus(),
    }


def commit() -> str | None:
    """The commit of this code. ``COAT_COMMIT`` names it where the code was copied to without its
    history.
    """
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return os.environ.get("COAT_COMMIT") or git.stdout.strip() or None


def gpus() -> list[str]:
    """The names of the GPUs here."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def loss_gaps(losses: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """How far losses are from those of another run in the same steps, as shares: in the first, in
    any, in the last, and in the mean of the last ten, which has a sign.
    """
    gaps = [abs(a - b) / b for a, b in zip(losses, base, strict=True)]
    last, last_base = (sum(values[-10:]) / len(values[-10:]) for values in (losses, base))
    return {
        "first_loss_gap": gaps[0],
        "largest_loss_gap": max(gaps),
        "final_loss_gap": gaps[-1],
        "last_ten_loss_gap": last / last_base - 1,
    }


def show(name: str, values: Mapping[str, Any], **formats: str) -> None:
    """Print a row: a name, and the values that have a format, in the order of the formats. Values
    that are missing or None are left out.
    """
    cells = []
    for key, form in formats.items():
        if values.get(key) is not None:
            cells.append(f"{key.replace('_', ' ')} {format(values[key], form)}")
    print(f"{name:<28} {'  '.join(cells)}", flush=True)


def number(value: float, digits: int = 0) -> str:
    """With thin groups of three, as tables have it: 35 819."""
    return f"{value:,.{digits}f}".replace(",", " ")


def result_path(name: str, output: str | Path | None = None) -> Path:
    """Where the result ``ROOM/PROGRAM`` is: ``ROOM/PROGRAM.json`` below ``output`` or
    ``benchmarks/results``.
    """
    return Path(output or RESULTS) / f"{name}.json"


def write_result(
    name: str, data: dict[str, Any], output: str | Path | None = None, nan: bool = False
) -> Path:
    """Write ``{"environment": ..., **data}`` to :func:`result_path`, which is returned; see
    :func:`write_json`.
    """
    path = result_path(name, output)
    write_json(path, {"environment": environment(), **data}, nan)
    return path


def write_json(path: Path, data: dict[str, Any], nan: bool = False) -> None:
    """Write :func:`dumps` of ``data``, as :func:`write` does.

    Raises:
        ValueError: a number in it is NaN or infinite, which is a finding with ``nan`` only. Nothing
            is written.
    """
    try:
        json.dumps(data, allow_nan=nan)
    except ValueError as problem:
        raise ValueError(f"{path}: not written: {problem}") from problem
    write(path, dumps(data) + "\n")


def write(path: Path, content: str | bytes) -> None:
    """Write a file at once: a run that is cut here, or a full disk, leaves what was there.

    Raises:
        OSError: it cannot be written; names it.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except OSError as problem:  # which names the other file, or none
        raise OSError(problem.errno, problem.strerror, str(path)) from problem
    finally:
        with suppress(OSError):
            part.unlink()


def write_figure(path: Path, figure: Any, dpi: int) -> None:
    """Write one of Matplotlib's figures, as :func:`write` does."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=path.suffix.removeprefix(".") or None)
    write(path, drawn.getvalue())


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """The JSON object of a file, which has ``keys``.

    Raises:
        ValueError: it is none; names the file and what is missing.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path}: got {problem}, accepted: JSON of a benchmark") from problem
    if missing := [key for key in keys if key not in found]:
        raise ValueError(
            f"{path}: got JSON without {', '.join(missing)}, accepted: what its program writes"
        )
    return found


def dumps(value: Any, indent: str = "") -> str:
    """JSON with one record, or one curve, on a line, so that files stay short and differences can
    be read.

    A list or object stays on one line if it holds neither lists nor objects, or if the line has at
    most :data:`WIDTH` characters; plain values of a longer object share lines of that length. Every
    number keeps all its digits.
    """
    line, nested = json.dumps(value), (list, tuple, dict)
    if not isinstance(value, nested):
        return line
    inside = list(value.values() if isinstance(value, dict) else value)
    if len(line) <= WIDTH or not any(isinstance(one, nested) for one in inside):
        return line
    items = [dumps(one, indent + " ") for one in inside]
    if isinstance(value, dict):
        named = [f"{json.dumps(str(key))}: {item}" for key, item in zip(value, items, strict=True)]
        items = named[:1]
        for before, one, item in zip(inside, inside[1:], named[1:], strict=False):
            if (
                isinstance(before, nested)
                or isinstance(one, nested)
                or len(indent + items[-1] + item) > WIDTH
            ):
                items.append(item)
            else:
                items[-1] += f", {item}"
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{indent} " + f",\n{indent} ".join(items) + f"\n{indent}{last}"


def python_path(*folders: str | Path) -> str:
    """``PYTHONPATH`` of a process that finds ``folders`` before what this one's ``PYTHONPATH``
    names.
    """
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def prepare_text(prefix: Path, tokenizer: str, inputs: list[str], *more: str) -> None:
    """Tokens of ``inputs`` as ``PREFIX.bin`` and ``PREFIX.json``, by ``launch.prepare_data`` with
    ``more`` options.

    Raises:
        subprocess.CalledProcessError: the preparation failed; it has printed why.
    """
    line = [
        sys.executable,
        "-m",
        "launch.prepare_data",
        "--input",
        *inputs,
        "--tokenizer",
        tokenizer,
    ]
    subprocess.run([*line, "--output", str(prefix), "--quiet", *more], check=True, cwd=ROOT)
