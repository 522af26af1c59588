"""Multiple choice: questions of JSONL files, the rows that score their choices, and accuracies."""

from __future__ import annotations

import hashlib
import json
import string
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from launch.data.tokenizer import Tokenizer
from launch.evaluation.rows import Row
from launch.prep import DataError

__all__ = ["Asked", "Question", "ask", "best", "digest", "read_questions"]

_SHOWN = 5
"""Malformed lines that an error names."""


@dataclass(frozen=True)
class Question:
    """One line of a ``--choices`` file."""

    where: str
    """``file:line``."""
    context: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice."""


def read_questions(path: str, skip_bad: bool = False, limit: int | None = None) -> tuple[list[Question], list[str]]:
    """Questions of a JSONL file.

    Args:
        skip_bad: leave malformed lines out instead of stopping.
        limit: take the first questions only.

    Returns:
        The questions, and ``file:line: why`` for each line left out.

    Raises:
        DataError: no such file, no questions, or malformed lines, each by ``file:line``.
    """
    bad: list[str] = []
    try:
        with open(path, "rb") as file:
            questions = list(islice(_questions(path, file, bad), limit))
    except OSError as problem:
        raise DataError(
            f"--choices: got {path}, accepted: a JSONL file that can be read ({problem.strerror})"
        ) from None
    if bad and not skip_bad:
        more = f"\nand {len(bad) - _SHOWN} more lines" if len(bad) > _SHOWN else ""
        raise DataError("\n".join(bad[:_SHOWN]) + more + "\n--skip-bad leaves such lines out")
    if not questions:
        raise DataError(
            f'--choices: {path} holds no question, accepted: lines such as {{"context": "2 + 2 =", "choices": '
            '[" 3", " 4"], "answer": 1}'
        )
    return questions, bad


class _Record(BaseModel, strict=True):
    """A line of the file."""

    context: str
    choices: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2)
    answer: int | str


def _questions(path: str, lines: Iterable[bytes], bad: list[str]) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = _Record.model_validate_json(line.removeprefix(BOM_UTF8))
            yield Question(where, record.context, tuple(record.choices), _answer(record.answer, record.choices))
        except ValidationError as problem:
            told = ("".join(f"{key}: " for key in one["loc"][:1]) + one["msg"] for one in problem.errors())
            bad.append(f"{where}: {'; '.join(dict.fromkeys(told))}")
        except ValueError as problem:
            bad.append(f"{where}: {problem}")


def _answer(given: int | str, choices: Sequence[str]) -> int:
    """The index that ``answer`` means: a number from 0, the text of a choice, or a letter from A."""
    count = len(choices)
    if isinstance(given, int) and 0 <= given < count:
        return given
    if isinstance(given, str):
        same = [i for i, choice in enumerate(choices) if choice == given]
        same = same or [i for i, choice in enumerate(choices) if choice.strip() == given.strip()]
        if len(same) == 1:
            return same[0]
        letter = string.ascii_uppercase.find(given.upper()) if len(given) == 1 else -1
        if not same and 0 <= letter < count:
            return letter
    last = string.ascii_uppercase[min(count, 26) - 1]
    raise ValueError(
        f"answer: got {json.dumps(given)[:60]}, accepted: an index 0 to {count - 1}, the text of one choice, or a "
        f"letter A to {last}"
    )


@dataclass(frozen=True)
class Asked:
    """Rows of a file's questions: those of one question follow each other, one a choice."""

    rows: list[Row]
    truncated: int
    """Questions whose context was cut from the left."""
    unspaced: int
    """Choices that begin without white space behind a context that ends without."""


def ask(
    questions: Sequence[Question], tokenizer: Tokenizer, begin: list[int], *, window: int, delimiter: str = ""
) -> Asked:
    """One row for each choice, tokenized as lm-evaluation-harness does it.

    White space at the end of the context is moved to the choice, and the choice's tokens are those of both together
    beyond the number of the context's alone: a tokenizer may join characters of the two.

    Args:
        begin: ids before every context. Where there are none and the context is empty, the end-of-document id is.
        window: tokens that the model reads; of a longer context the left is cut.
        delimiter: put between context and choice; no part of the choice's length.

    Raises:
        DataError: a choice that fills the window, or that is no token of its own, by ``file:line``.
    """
    rows, truncated, unspaced = [], 0, 0
    for question in questions:
        cut = False
        for choice in question.choices:
            unspaced += not _spaced(question.context, delimiter + choice)
            ids, own = _encode(question.context, delimiter + choice, tokenizer, begin)
            if own < 1:
                raise DataError(
                    f"{question.where}: the choice {choice[:40]!r} has no token of its own behind its context, "
                    "accepted: one that does not continue the context's last word (--delimiter ' ')"
                )
            if own > window:
                raise DataError(
                    f"{question.where}: the choice {choice[:40]!r} is {own} tokens long, accepted: 1 to {window}"
                )
            cut |= len(ids) > window + 1
            rows.append(Row(np.asarray(ids[-(window + 1) :], np.int32), own))
        truncated += cut
    return Asked(rows, truncated, unspaced)


def _encode(context: str, choice: str, tokenizer: Tokenizer, begin: list[int]) -> tuple[list[int], int]:
    """Ids of both, and how many of them are the choice's."""
    stripped = context.rstrip()
    whole, before = tokenizer.encode(context + choice), tokenizer.encode(stripped) if stripped else []
    own = len(whole) - len(before)
    start = begin or ([] if before else [tokenizer.eod])
    return [*start, *whole], own


def _spaced(context: str, choice: str) -> bool:
    return not context or context[-1].isspace() or choice[0].isspace()


def best(likelihoods: Sequence[float], choices: Sequence[str] | None = None) -> int:
    """Index of the most likely choice, the first of equals.

    Args:
        likelihoods: total log-likelihood of each choice.
        choices: their texts: each log-likelihood is divided by the number of characters. None = by nothing.
    """
    values = [total / (len(choices[i]) if choices is not None else 1) for i, total in enumerate(likelihoods)]
    return max(range(len(values)), key=lambda i: (values[i], -i))


def digest(questions: Sequence[Question]) -> str:
    """Hex digest of contexts, choices and answers, whatever the tokenizer."""
    total = hashlib.sha256()
    for q in questions:
        total.update(json.dumps([q.context, q.choices, q.answer]).encode())
    return total.hexdigest()
