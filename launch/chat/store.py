"""Chat files as token ids on disk: encoded once by one rank, mapped into memory by all.

What is left out or cut is listed with file and line; nothing is lost silently.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coat_dist.checkpoint.write.durable import make_folder, sync_folder, write_text
from launch.chat.files import records
from launch.chat.records import Conversation, Malformed, from_record, parse
from launch.chat.template import ChatTemplate
from launch.prep import DataError

__all__ = ["Conversations", "Reading", "prepare"]

FORMAT = 3
"""Of the prepared folder; another one is made anew."""
_ARRAYS = {"tokens": np.int32, "learnt": np.uint8, "ends": np.int64, "trained": np.int64, "places": np.int64}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How chat files are read."""

    seq_length: int
    """A conversation with more tokens is too long."""
    too_long: str = "drop"
    """"drop" leaves it out, "truncate" keeps its first ``seq_length`` tokens."""
    skip_bad: bool = False
    """List malformed lines and go on, where the first would end the run."""


class Conversations:
    """Token ids of the conversations of one prepared folder.

    Args:
        folder: from :func:`prepare`.
        files: what it was asked for; None = those that it was made of, whose content is the same.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        try:
            self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            self._tokens, self._learnt, self._ends, trained, self.places = (
                np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
            )
            (folder / "dropped.jsonl").stat()
            whole = self._ends[-1] == len(self._tokens) == len(self._learnt)
        except (OSError, ValueError, IndexError) as problem:
            raise DataError(f"{folder}: cannot be read ({problem}), accepted: remove it, and it is made anew") from None
        if not whole:
            raise DataError(f"{folder}: its files do not belong together, accepted: remove it, and it is made anew")
        self.folder = folder
        named = self.summary["files"] if files is None else [str(file) for file in files]
        self._names = dict(zip(self.summary["files"], named, strict=True))
        self.summary["files"] = named
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
        """The list of what was left out or cut: a JSON object a line, with ``file``, ``line``, ``what``, ``why``."""
        listed = map(json.loads, (self.folder / "dropped.jsonl").read_text(encoding="utf-8").splitlines())
        return "".join(json.dumps({**one, "file": self._names[one["file"]]}) + "\n" for one in listed)


def prepare(
    files: Sequence[Path], template: ChatTemplate, reading: Reading, cache: Path, say: Callable[[str], None] = print
) -> Path:
    """Encode chat files, or find what an earlier run has made of the same content in the same way.

    Call it on one rank.

    Args:
        files: in order.
        cache: a folder for prepared folders, made if need be.
        say: gets progress, where it takes long.

    Returns:
        A folder for :class:`Conversations`.

    Raises:
        DataError: a malformed line (without ``skip_bad``), named ``FILE:LINE``; or no conversation is left.
    """
    key = _digest(files, template, reading)
    folder = cache / key[:16]
    if folder.is_dir():
        return folder
    make_folder(cache)
    temporary = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=cache))
    try:
        found = _Encoder(template, reading, temporary, say).run(files)
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        write_text(temporary / "summary.json", json.dumps({"digest": key, **found}, indent=1) + "\n")
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
    """Of everything that the result depends on: the files' contents in their order, wherever they lie."""
    tokenizer = template.tokenizer
    text = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    made = hashlib.sha256(
        json.dumps(
            [FORMAT, vars(reading), text, tokenizer.chat_template, tokenizer.special_tokens_map, template.vocab_size],
            default=str,
        ).encode()
    )
    for file in files:
        try:
            with file.open("rb") as opened:
                made.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as problem:
            raise DataError(f"{file}: cannot be read ({problem.strerror or problem})") from problem
    return made.hexdigest()


class _Encoder:
    def __init__(self, template: ChatTemplate, reading: Reading, folder: Path, say: Callable[[str], None]) -> None:
        self._template, self._reading, self._folder, self._say = template, reading, folder, say
        self._counts: Counter = Counter()
        self._arrays: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}
        self._end = 0
        self._first = ""
        """Where and why the first line was left out."""

    def run(self, files: Sequence[Path]) -> dict[str, Any]:
        """Encode everything; what the summary is to say."""
        told = time.monotonic()
        with (self._folder / "dropped.jsonl").open("w", encoding="utf-8") as self._list:
            for number, file in enumerate(files):
                for line, record in records(file):
                    self._one(file, number, line, record)
                    if time.monotonic() - told > 10:
                        told = time.monotonic()
                        self._say(f"{file}:{line}: {self._counts['kept']:,} conversations, {self._end:,} tokens")
        counts = dict(self._counts)
        if not counts.get("kept"):
            left = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no lines"
            raise DataError(
                f"{' '.join(map(str, files))}: no conversation to train on ({left}{self._first}), accepted: at least "
                f"one of at most {self._reading.seq_length} tokens (--seq-length)"
            )
        for name, parts in self._arrays.items():
            np.save(self._folder / f"{name}.npy", np.concatenate(parts))
        return {
            "files": [str(file) for file in files],
            "counts": counts,
            "tokens": self._end,
            "trained": sum(int(part[0]) for part in self._arrays["trained"]),
            "in_pieces": self._template.in_pieces,
            "without_tools": self._template.without_tools,
        }

    def _one(self, file: Path, number: int, line: int, record: Any) -> None:
        try:
            conversation = _read(record)
            if conversation is None:
                return self._note(file, line, "empty", "nothing of the assistant's to learn")
            ids, learnt = self._template.encode(conversation)
        except Malformed as problem:
            if not self._reading.skip_bad:
                raise DataError(f"{file}:{line}: {problem} (--skip-bad lists such lines and goes on)") from None
            return self._note(file, line, "malformed", str(problem))
        limit = self._reading.seq_length
        cut = len(ids) > limit
        if cut and self._reading.too_long == "drop":
            return self._note(file, line, "too long", f"{len(ids)} tokens, more than {limit}")
        if not any(learnt[1:limit]):
            why = f"none of the first {limit} of {len(ids)} tokens is trained" if cut else "no trained token"
            return self._note(file, line, "empty", why)
        if cut:
            self._note(file, line, "cut", f"{len(ids)} tokens, the first {limit} kept")
        self._counts["kept"] += 1
        self._end += min(len(ids), limit)
        row = {
            "tokens": ids[:limit],
            "learnt": learnt[:limit],
            "ends": [self._end],
            "trained": [sum(learnt[1:limit])],
            "places": [[number, line]],
        }
        for name, values in row.items():
            self._arrays[name].append(np.asarray(values, _ARRAYS[name]))

    def _note(self, file: Path, line: int, what: str, why: str) -> None:
        self._counts[what] += 1
        self._first = self._first or f"; the first, {file}:{line}: {why.partition(', accepted: ')[0]}"
        self._list.write(json.dumps({"file": str(file), "line": line, "what": what, "why": why}) + "\n")


def _read(record: Any) -> Conversation | None:
    if record is None:
        raise Malformed("not UTF-8, accepted: UTF-8")
    return parse(record) if isinstance(record, str) else from_record(record)
