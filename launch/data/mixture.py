"""Token files of Dolma and OLMo as training data: the description of a mixture, in JSON or YAML.

::

    {"eos": 50279, "vocab_size": 50280, "dtype": "uint16",
     "sources": [{"name": "wiki", "weight": 1, "files": ["wiki/*.npy"]},
                 {"name": "web", "weight": 3, "files": ["web/part-*.npy"]}]}

Here it is read and checked as far as that goes without reading tokens; ``token_files.py`` does that.
"""

from __future__ import annotations

import difflib
import glob
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from launch.prep import DataError
from launch.prep.sources import open_tokens

__all__ = ["Mixture", "Source", "is_mixture", "read_mixture"]

YAML = (".yaml", ".yml")
_DEFAULTS = {"dtype", "eos", "vocab_size"}
_TOP = {"sources", *_DEFAULTS}
_OF_SOURCE = {"name", "weight", "files", *_DEFAULTS}
# What OLMo's configurations and others call these keys.
_MEANT = {
    "datasets": "sources",
    "eod": "eos",
    "eos_id": "eos",
    "eos_token_id": "eos",
    "file": "files",
    "glob": "files",
    "memmap_dtype": "dtype",
    "path": "files",
    "paths": "files",
    "ratio": "weight",
    "shards": "files",
    "target_ratio": "weight",
    "vocab": "vocab_size",
    "weights": "weight",
}
DTYPES = {"uint16": 2**16, "uint32": 2**32}
"""Types of tokens by name, and below what their ids are."""


@dataclass(frozen=True)
class Source:
    """Token files that are drawn from as one: one data set of a blend."""

    name: str
    weight: float | None
    """Share of the samples, against the other sources; None where no source has one: by number of tokens."""
    files: tuple[str, ...]
    """In the order in which their documents are numbered."""
    dtype: str | None
    """"uint16" or "uint32"; None: every file says it in a NumPy header."""


@dataclass(frozen=True)
class Mixture:
    """What a description says; all sources are of one tokenizer."""

    path: str
    vocab_size: int
    eos: int
    sources: tuple[Source, ...]

    def identity(self) -> dict[str, dict[str, Any]]:
        """Plain values by source that say what is trained on: kept in checkpoints, and compared on a resume."""
        return {
            source.name: {
                "weight": source.weight,
                "dtype": source.dtype,
                "eos": self.eos,
                "files": len(source.files),
                "bytes": sum(os.path.getsize(file) for file in source.files),
            }
            for source in self.sources
        }


def is_mixture(given: str) -> bool:
    """Whether a path of ``--data`` is that of a description: a YAML file, or a JSON file that belongs to no data set of
    ``prepare_data.py``."""
    path = Path(os.path.expanduser(given))
    if path.suffix in YAML:
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    if any(path.with_suffix(end).exists() for end in (".bin", ".idx")):
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return True
    return not (isinstance(content, dict) and "eod" in content and "sources" not in content)


def read_mixture(path: str | os.PathLike) -> Mixture:
    """Read a description and find its files. No token is read.

    Raises:
        DataError: names the description, the key or file, what was given and what is accepted.
    """
    path = os.path.expanduser(os.fspath(path))
    content = _load(path)

    def fail(where: str, got: Any, accepted: str) -> NoReturn:
        raise DataError(f"data: {path}: {where}: got {got!r}, accepted: {accepted}")

    _check_keys(path, "", content, _TOP)
    given = content.get("sources")
    if not isinstance(given, list) or not given:
        fail("sources", given, 'a list of one or more objects such as {"name": "web", "files": ["web/*.npy"]}')
    sources: list[Source] = []
    agreed: dict[str, list[tuple[Any, str]]] = {"eos": [], "vocab_size": []}
    """Different values of a key, and where each was found first."""
    for number, entry in enumerate(given):
        where = f"sources[{number}]"
        if not isinstance(entry, dict):
            fail(where, entry, "an object with the keys " + ", ".join(sorted(_OF_SOURCE)))
        _check_keys(path, where, entry, _OF_SOURCE)
        name = entry.get("name")
        if not isinstance(name, str) or not name.strip():
            fail(f"{where}.name", name, "a text")
        if name in [s.name for s in sources]:
            fail(f"{where}.name", name, "a name that no other source has")
        weight = entry.get("weight")
        if weight is not None and not (_is_number(weight) and weight > 0 and math.isfinite(weight)):
            fail(f"{where}.weight", weight, "a positive number")
        dtype = entry.get("dtype", content.get("dtype"))
        if dtype is not None and not (isinstance(dtype, str) and dtype in DTYPES):
            fail(f"{where}.dtype" if "dtype" in entry else "dtype", dtype, '"uint16" or "uint32"')
        for key, values in agreed.items():
            value = entry.get(key, content.get(key))
            if value not in [known for known, _ in values]:
                values.append((value, f"{where}.{key}" if key in entry else key))
        files = _files(path, f"{where}.files", entry.get("files"))
        sources.append(Source(name, None if weight is None else float(weight), files, dtype))
    for key, values in agreed.items():
        if len(values) > 1:
            found = ", ".join(f"{value!r} in {where}" for value, where in values)
            raise DataError(f"data: {path}: {key}: got {found}, accepted: one tokenizer for all sources")
    (vocab, vocab_at), (eos, eos_at) = agreed["vocab_size"][0], agreed["eos"][0]
    if not _is_id(vocab) or not 1 <= vocab <= 2**31:
        fail(vocab_at, vocab, "the number of ids of the tokenizer that made the files, such as 50280")
    if not _is_id(eos) or not 0 <= eos < vocab:
        fail(eos_at, eos, f"the id that ends documents, 0 to {vocab - 1}")
    weighted = [s.name for s in sources if s.weight is not None]
    if weighted and len(weighted) < len(sources):
        raise DataError(
            f"data: {path}: weight: got one for {', '.join(weighted)}, accepted: one for every source or none"
        )
    _check_files(path, sources, vocab)
    return Mixture(path, vocab, eos, tuple(sources))


def _load(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        is_yaml = Path(path).suffix in YAML
        content = _read_yaml(text) if is_yaml else json.loads(text, object_pairs_hook=_once)
    except OSError as problem:
        raise DataError(
            f"data: {path}: {problem.strerror}, accepted: a description of token files, JSON or YAML (docs/data.md)"
        ) from None
    except ValueError as problem:
        line = " ".join(str(problem).split())
        raise DataError(f"data: {path}: {line}, accepted: a description of token files, JSON or YAML") from None
    if not isinstance(content, dict):
        raise DataError(f"data: {path}: got {type(content).__name__}, accepted: an object with the key sources")
    return content


def _read_yaml(text: str) -> Any:
    import yaml  # late: only for those who write YAML

    class Loader(yaml.SafeLoader):
        """Refuses keys that are given twice, of which the last would count."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # "<<" gives way to them
            _once([(str(self.construct_object(key)), None) for key in own])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506, it is a SafeLoader
    except yaml.YAMLError as problem:
        raise ValueError(str(problem)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} is given twice")
    return dict(pairs)


def _check_keys(path: str, where: str, content: Mapping[Any, Any], known: set[str]) -> None:
    for key in content:
        if key in known or str(key).startswith(("_", "#", "/", "$")):  # comments, as in DeepSpeed files
            continue
        near = _MEANT.get(str(key).lower()) or next(iter(difflib.get_close_matches(str(key), known, n=1)), None)
        if near not in known:
            near = None
        hint = f"did you mean {near}?" if near else f"accepted: {', '.join(sorted(known))}"
        raise DataError(f"data: {path}: {where + '.' if where else ''}{key}: no such key, {hint}")


def _files(path: str, where: str, given: Any) -> tuple[str, ...]:
    """The files of a source: patterns as given, what each matches in the order of names, as absolute paths."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise DataError(
            f"data: {path}: {where}: got {given!r}, accepted: a list of files or patterns such as web/*.npy"
        )
    found = []
    for pattern in patterns:
        if "://" in pattern:
            raise DataError(f"data: {path}: {where}: got {pattern!r}, accepted: local files; nothing is downloaded")
        beside = os.path.dirname(os.path.abspath(path))
        full = os.path.join(beside, os.path.expanduser(pattern))
        if os.path.isdir(full):
            raise DataError(
                f"data: {path}: {where}: {pattern} is a folder, accepted: files, or a pattern such as {pattern}/*.npy"
            )
        if os.path.exists(full):
            here = [full]
        else:
            found_here = glob.glob(os.path.join(glob.escape(beside), os.path.expanduser(pattern)), recursive=True)
            here = sorted(f for f in found_here if not os.path.isdir(f))
        if broken := next((f for f in here if not os.path.exists(f)), None):
            raise DataError(f"data: {path}: {where}: {broken} is a link to a file that does not exist")
        if not here:
            what = "matches no file" if glob.has_magic(pattern) else "does not exist"
            raise DataError(f"data: {path}: {where}: {pattern} {what} ({full})")
        found += here
    return tuple(os.path.normpath(f) for f in found)


def _check_files(path: str, sources: list[Source], vocab: int) -> None:
    """What sizes and headers tell: files given twice, empty, not of whole tokens, of another type."""
    seen: dict[str, str] = {}
    for source in sources:
        if source.dtype is not None and vocab > DTYPES[source.dtype]:
            raise DataError(
                f"data: {path}: {source.name}: dtype {source.dtype} cannot hold the ids of vocab_size {vocab}, "
                'accepted: "uint32"'
            )
        for file in source.files:
            real = os.path.realpath(file)
            if real in seen:
                raise DataError(
                    f"data: {path}: {file} is given twice, in {seen[real]} and in {source.name}, accepted: once; to "
                    "draw from it more often, give its source a weight"
                )
            seen[real] = source.name
            try:
                tokens = open_tokens(file, None if source.dtype is None else np.dtype(source.dtype), option=None)
            except OSError as problem:
                raise DataError(f"data: {path}: {source.name}: {file}: {problem.strerror or problem}") from None
            except DataError as problem:
                raise DataError(f"data: {path}: {source.name}: {problem}") from None
            if not len(tokens):
                raise DataError(f"data: {path}: {source.name}: {file} is empty, accepted: one token or more")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
