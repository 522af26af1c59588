"""Token files of Dolma and OLMo as training data: the description of a mixture, in JSON or YAML
(docs/data.md).

Here it is read, without the token files; ``token_files.py`` reads these.
"""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from launch.common.errors import DataError

YAML = (".yaml", ".yml")
_COMMENTS = ("_", "#", "/", "$")


def _expand(given: Any, info: ValidationInfo) -> tuple[str, ...]:
    """Absolute paths of files and patterns, what each matches in the order of names."""
    folder, found = str(info.context), []
    for pattern in [given] if isinstance(given, str) else given:
        full = os.path.join(folder, os.path.expanduser(pattern))
        matches = glob.glob(
            os.path.join(glob.escape(folder), os.path.expanduser(pattern)), recursive=True
        )
        here = (
            [full] if os.path.isfile(full) else sorted(f for f in matches if not os.path.isdir(f))
        )
        if not here:
            raise ValueError(f"{pattern} is no file and matches none")
        found += here
    return tuple(os.path.normpath(file) for file in found)


class Source(BaseModel):
    """Token files that are drawn from as one: one data set of a blend."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    # None: of no source; tokens count.
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    # In the order of their documents.
    files: Annotated[tuple[str, ...], BeforeValidator(_expand), Field(min_length=1)]
    dtype: Literal["uint16", "uint32"] | None = None  # None: every file has a NumPy header
    vocab_size: int = Field(ge=1, le=2**31)
    eos: int = Field(ge=0)


@dataclass(frozen=True)
class Mixture:
    """What a description says; all sources are of one tokenizer."""

    path: str
    vocab_size: int
    eos: int
    sources: tuple[Source, ...]

    def identity(self) -> dict[str, dict[str, Any]]:
        """Plain values by source that say what is trained on: kept in checkpoints, and compared
        on a resume.
        """
        return {
            source.name: source.model_dump(include={"weight", "dtype", "eos"})
            | {"files": len(source.files), "bytes": sum(map(os.path.getsize, source.files))}
            for source in self.sources
        }


def is_mixture(given: str) -> bool:
    """Whether a path of ``--data`` is a description: a YAML file, or a JSON file without a data
    set beside it.
    """
    path = Path(given).expanduser()
    if path.suffix in YAML:
        return True
    return (
        path.suffix == ".json"
        and path.is_file()
        and not any(path.with_suffix(s).exists() for s in (".bin", ".idx"))
    )


def read_mixture(path: str | os.PathLike) -> Mixture:
    """Read a description and find its files. No token is read.

    Raises:
        DataError: names the description, the key, what was given and what is accepted.
    """
    path = os.path.expanduser(os.fspath(path))
    content = _without_comments(_load(path))
    entries = content.pop("sources", None)
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        raise DataError(
            f"data: {path}: sources: got {entries!r}, accepted: a list of one or more objects"
        )
    sources = []
    for number, entry in enumerate(entries):
        folder = os.path.dirname(os.path.abspath(path))
        try:
            sources.append(
                Source.model_validate({**content, **_without_comments(entry)}, context=folder)
            )
        except ValidationError as problem:
            first = problem.errors()[0]
            key = ".".join(map(str, first["loc"]))
            where = key if key in content else f"sources[{number}].{key}"
            known = (
                f" (keys: {', '.join(Source.model_fields)})"
                if first["type"] in ("extra_forbidden", "missing")
                else ""
            )
            raise DataError(
                f"data: {path}: {where}: got {first['input']!r}, accepted: {first['msg']}{known}"
            ) from None
    files = [os.path.realpath(file) for source in sources for file in source.files]
    for key, values in (("name", [source.name for source in sources]), ("files", files)):
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            accepted = "once; a weight draws from a source more often"
            raise DataError(f"data: {path}: {key}: got {twice[0]!r} twice, accepted: {accepted}")
    tokenizers = {(source.vocab_size, source.eos) for source in sources}
    (vocab_size, eos), *others = tokenizers
    if others or eos >= vocab_size:
        got = f"got the pairs {sorted(tokenizers)}"
        raise DataError(
            f"data: {path}: vocab_size, eos: {got}, accepted: one of all sources, eos below "
            "vocab_size"
        )
    if len({source.weight is None for source in sources}) > 1:
        weights = [source.weight for source in sources]
        raise DataError(
            f"data: {path}: weight: got {weights}, accepted: one for every source or none"
        )
    return Mixture(path, vocab_size, eos, tuple(sources))


def _without_comments(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if not key.startswith(_COMMENTS)}


def _load(path: str) -> dict[str, Any]:
    accepted = "accepted: a description of token files, JSON or YAML (docs/data.md)"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = yaml.safe_load(text) if Path(path).suffix in YAML else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as problem:
        reason = getattr(problem, "strerror", None) or " ".join(str(problem).split())
        raise DataError(f"data: {path}: {reason}, {accepted}") from None
    if not isinstance(content, dict):
        raise DataError(f"data: {path}: got {type(content).__name__}, {accepted}")
    return content
