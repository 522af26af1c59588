"""Chat files as token ids on disk: encoded once by one rank, mapped into memory by all.

What is left out or cut is listed with file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, sync_folder, write_text
from launch.chat.records import Malformed, parse
from launch.chat.template import ChatTemplate
from launch.prep import DataError
from launch.progress import Progress

__all__ = ["Conversations", "Reading", "find_files", "hold_out", "prepare", "records"]

FORMAT = 4
"""Of the prepared folder; part of its key."""
_ARRAYS = {"tokens": np.int32, "learnt": np.uint8, "ends": np.int64, "trained": np.int64}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How chat files are read."""

    seq_length: int
    """A conversation with more tokens is too long."""
    too_long: str = "drop"
    """"drop" leaves it out, "truncate" keeps its first ``seq_length`` tokens."""
    skip_bad: bool = False
    """List malformed lines and go on, where the first would end the run."""


def find_files(given: Sequence[str], option: str) -> list[Path]:
    """The files of a command line; a folder means its ``*.jsonl`` and ``*.json``, sorted.

    Raises:
        DataError: no such file, an empty folder, or one file twice.
    """
    found: list[Path] = []
    for path in map(Path, given):
        inside = [file for file in path.glob("*") if file.suffix in (".jsonl", ".json")]
        if not inside and not path.is_file():
            raise DataError(
                f"{option}: got {path}, accepted: files of conversations (JSON lines), or folders "
                "of such"
            )
        found += sorted(inside) or [path]
    if len({path.resolve() for path in found}) < len(found):
        raise DataError(f"{option}: got {' '.join(given)}, accepted: every file once")
    return found


def records(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers from 1 and lines (bytes) of a file, without empty ones; of one JSON array
    (ToolBench's) its items.

    Raises:
        DataError: an array that is not whole.
    """
    with path.open("rb") as file:
        array = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        if array:
            try:
                yield from enumerate(json.loads(file.read()), 1)
            except (ValueError, RecursionError) as problem:
                raise DataError(
                    f"{path}: not a whole JSON array ({problem}), accepted: JSON lines"
                ) from None
            return
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


class Conversations:
    """Token ids of the conversations of one folder of :func:`prepare`, made of the same files."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self._folder, self._files = folder, files
        self.summary: dict[str, Any] = json.loads(
            (folder / "summary.json").read_text(encoding="utf-8")
        )
        self._tokens, self._learnt, self._ends, trained = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
        )
        self.lengths = np.diff(self._ends, prepend=0)
        """Tokens of each conversation, int64."""
        self.trained = np.asarray(trained)
        """Trained tokens of each, int64; the first token, which nothing predicts, is never one."""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and which of them are trained (bool) of a conversation."""
        end = int(self._ends[number])
        part = slice(end - int(self.lengths[number]), end)
        return self._tokens[part], self._learnt[part].astype(bool)

    def dropped(self) -> str:
        """The list of what was left out or cut: a JSON object a line, with ``file``, ``line``,
        ``what``, ``why``.
        """
        listed = map(
            json.loads, (self._folder / "dropped.jsonl").read_text(encoding="utf-8").splitlines()
        )
        return "".join(
            json.dumps({**one, "file": str(self._files[one["file"]])}) + "\n" for one in listed
        )


def prepare(files: Sequence[Path], template: ChatTemplate, reading: Reading, cache: Path) -> Path:
    """Encode chat files on one rank, or find what an earlier run has made of the same content in
    the same way.

    Returns:
        A folder in ``cache``, for :class:`Conversations`.

    Raises:
        DataError: a malformed line (without ``skip_bad``), named ``FILE:LINE``; or no conversation
            is left.
    """
    key = _digest(files, template, reading)
    folder = cache / key[:16]
    if folder.is_dir():
        return folder
    make_folder(cache)
    temporary = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=cache))
    try:
        summary = _encode(files, template, reading, temporary)
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        write_text(
            temporary / "summary.json", json.dumps({"digest": key, **summary}, indent=1) + "\n"
        )
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another run has made the same meanwhile
                raise
        sync_folder(cache)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _digest(files: Sequence[Path], template: ChatTemplate, reading: Reading) -> str:
    """Digest of everything that the result depends on: the files' contents in their order,
    wherever they lie.
    """
    tokenizer = template.tokenizer
    text = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else json.dumps(tokenizer.get_vocab())
    )
    known = [
        FORMAT,
        vars(reading),
        text,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        template.vocab_size,
    ]
    made = hashlib.sha256(json.dumps(known, default=str).encode())
    for file in files:
        with file.open("rb") as opened:
            made.update(hashlib.file_digest(opened, "sha256").digest())
    return made.hexdigest()


def _encode(
    files: Sequence[Path], template: ChatTemplate, reading: Reading, folder: Path
) -> dict[str, Any]:
    """Write the arrays and the list of what was left out; returns the rest of the summary."""
    counts: Counter[str] = Counter()
    parts: dict[str, list[Any]] = {name: [] for name in _ARRAYS}
    end, first = 0, ""
    size = sum(file.stat().st_size for file in files)
    with (
        Progress(size, "encode", unit="B") as progress,
        (folder / "dropped.jsonl").open("w", encoding="utf-8") as listed,
    ):
        for number, file in enumerate(files):
            for line, record in records(file):
                progress.update(len(record) if isinstance(record, bytes) else 0)
                found, what, why = _one(record, template, reading)
                if what == "malformed" and not reading.skip_bad:
                    raise DataError(
                        f"{file}:{line}: {why} (--skip-bad lists such lines and goes on)"
                    )
                if what:
                    counts[what] += 1
                    first = first or f"; the first, {file}:{line}: {why}"
                    listed.write(
                        json.dumps({"file": number, "line": line, "what": what, "why": why}) + "\n"
                    )
                if found is not None:
                    ids, learnt = found
                    counts["kept"] += 1
                    end += len(ids)
                    for name, values in (("tokens", ids), ("learnt", learnt)):
                        parts[name].append(np.asarray(values, _ARRAYS[name]))
                    parts["ends"].append([end])
                    parts["trained"].append([sum(learnt[1:])])
    if not counts["kept"]:
        left = ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "no lines"
        raise DataError(
            f"{' '.join(map(str, files))}: no conversation to train on ({left}{first}), accepted: "
            "at least one of at "
            f"most {reading.seq_length} tokens (--seq-length)"
        )
    for name, values in parts.items():
        np.save(folder / f"{name}.npy", np.concatenate(values).astype(_ARRAYS[name]))
    return {
        "counts": dict(counts),
        "tokens": end,
        "trained": sum(one[0] for one in parts["trained"]),
        "in_pieces": template.in_pieces,
        "without_tools": template.without_tools,
    }


def _one(
    record: Any, template: ChatTemplate, reading: Reading
) -> tuple[tuple[list[int], list[bool]] | None, str, str]:
    """Ids of a record and which of them are trained, or None; what was left out ("" for
    nothing), and why.
    """
    limit = reading.seq_length
    try:
        conversation = parse(record)
        if conversation is None:
            return None, "empty", "nothing of the assistant's to learn"
        ids, learnt = template.encode(conversation)
    except Malformed as problem:
        return None, "malformed", str(problem)
    if len(ids) > limit and reading.too_long == "drop":
        return None, "too long", f"{len(ids)} tokens, more than {limit}"
    if not any(learnt[1:limit]):
        return None, "empty", f"none of the first {limit} of {len(ids)} tokens is trained"
    if len(ids) > limit:
        return (ids[:limit], learnt[:limit]), "cut", f"{len(ids)} tokens, the first {limit} kept"
    return (ids, learnt), "", ""


def hold_out(
    conversations: Conversations, share: float, seed: int
) -> tuple[np.ndarray, str | None]:
    """Numbers of the held-out conversations, ascending, and a digest of their content (None of
    none).

    They are those of the smallest hashes of ids, trained places and seed: a draw at random that
    does not depend on the order of files and lines. Copies of what is held out are held out, too,
    and may make it more than its share.

    Raises:
        CoatConfigError: ``share`` of one conversation would leave nothing to train on.
    """
    count = len(conversations)
    wanted = min(math.ceil(share * count), count - 1)
    if share and not wanted:
        raise CoatConfigError(f"--valid-share: got {share} of {count} conversation, accepted: 0")
    if not wanted:
        return np.arange(0), None
    key = hashlib.sha256(str(seed).encode()).digest()
    marks = np.asarray([_mark(*conversations[number], key) for number in range(count)], np.uint64)
    chosen = np.flatnonzero(marks <= np.sort(marks)[wanted - 1])
    if len(chosen) == count:  # all that would be left are copies of what is held out
        chosen = np.sort(np.argsort(marks, kind="stable")[:wanted])
    return chosen, hashlib.sha256(np.sort(marks[chosen]).tobytes()).hexdigest()


def _mark(ids: np.ndarray, learnt: np.ndarray, key: bytes) -> int:
    made = hashlib.blake2b(ids.tobytes(), digest_size=8, key=key)
    made.update(learnt.tobytes())
    return int.from_bytes(made.digest(), "big")
