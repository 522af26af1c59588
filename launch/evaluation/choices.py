"""Multiple choice: questions of JSONL files, the rows that score their choices, and accuracies."""

from __future__ import annotations

import hashlib
import json
import string
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from launch.data.tokenizer import Tokenizer
from launch.evaluation.rows import Row
from launch.prep import DataError

__all__ = ["Asked", "Question", "ask", "best", "digest", "read_questions"]


class Question(BaseModel, strict=True):
    """One line of a ``--choices`` file."""

    context: str
    choices: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2)
    answer: int | str
    """Index of the right choice; in a file also its text, or a letter from A."""
    where: str = ""
    """``file:line``."""

    @model_validator(mode="after")
    def _find_answer(self) -> Question:
        given, count = self.answer, len(self.choices)
        if isinstance(given, int):
            found = [given] if 0 <= given < count else []
        else:
            found = [i for i, choice in enumerate(self.choices) if choice == given]
            found = found or [
                i for i, choice in enumerate(self.choices) if choice.strip() == given.strip()
            ]
            letter = string.ascii_uppercase.find(given.upper()) if len(given) == 1 else -1
            found = found or ([letter] if 0 <= letter < count else [])
        if len(found) != 1:
            raise ValueError(
                f"answer: got {json.dumps(given)[:60]}, accepted: an index 0 to {count - 1}, the "
                "text of one choice "
                "or its letter"
            )
        self.answer = found[0]
        return self


def read_questions(
    path: str, skip_bad: bool = False, limit: int | None = None
) -> tuple[list[Question], list[str]]:
    """The first ``limit`` questions of a JSONL file, and ``file:line: why`` for each line that
    ``skip_bad`` left out.

    Raises:
        DataError: no such file, no questions, or a malformed line (without ``skip_bad``), by
            ``file:line``.
    """
    bad: list[str] = []

    def read() -> Iterator[Question]:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    question = Question.model_validate_json(line.removeprefix(BOM_UTF8))
                    question.where = f"{path}:{number}"
                    yield question
                except ValidationError as problem:
                    one = problem.errors()[0]
                    why = one["msg"].removeprefix("Value error, ")
                    bad.append(
                        f"{path}:{number}: {''.join(f'{key}: ' for key in one['loc'][:1])}{why}"
                    )
                if bad and not skip_bad:
                    raise DataError(f"{bad[0]}\n--skip-bad leaves such lines out")

    try:
        questions = list(islice(read(), limit))
    except OSError as problem:
        raise DataError(
            f"--choices: got {path}, accepted: a JSONL file that can be read ({problem})"
        ) from None
    if not questions:
        raise DataError(
            f'--choices: {path} holds no question, accepted: lines such as {{"context": "2 + 2 =", '
            '"choices": '
            '[" 3", " 4"], "answer": 1}'
        )
    return questions, bad


class Asked(NamedTuple):
    """Rows of a file's questions: those of one question follow each other, one a choice."""

    rows: list[Row]
    truncated: int
    """Questions whose context was cut from the left."""
    unspaced: int
    """Choices that begin without white space behind a context that ends without."""


def ask(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    begin: list[int],
    *,
    window: int,
    delimiter: str = "",
) -> Asked:
    """One row for each choice, tokenized as lm-evaluation-harness does it.

    White space at the end of the context is moved to the choice, and the choice's tokens are those
    of both together beyond the number of the context's alone: a tokenizer may join characters of
    the two.

    Ids of ``begin`` stand before every context; without them, the end-of-document id before an
    empty one. The model reads ``window`` tokens: of a longer context the left is cut. ``delimiter``
    is no part of the choice's length.

    Raises:
        DataError: a choice that fills the window, or that is no token of its own, by ``file:line``.
    """
    rows, truncated, unspaced = [], 0, 0
    for question in questions:
        context, cut = question.context, False
        stripped = context.rstrip()
        before = tokenizer.encode(stripped) if stripped else []
        for choice in question.choices:
            text = delimiter + choice
            unspaced += bool(context) and not context[-1].isspace() and not text[0].isspace()
            whole = tokenizer.encode(context + text)
            own = len(whole) - len(before)
            if not 1 <= own <= window:
                raise DataError(
                    f"{question.where}: the choice {choice[:40]!r} has {own} tokens of its own "
                    "behind its context, "
                    f"accepted: 1 to {window}, without continuing the context's last word "
                    "(--delimiter ' ')"
                )
            ids = [*(begin or ([] if before else [tokenizer.eod])), *whole]
            cut |= len(ids) > window + 1
            rows.append(Row(np.asarray(ids[-(window + 1) :], np.int32), own))
        truncated += cut
    return Asked(rows, truncated, unspaced)


def best(likelihoods: Sequence[float], choices: Sequence[str] | None = None) -> int:
    """Index of the most likely choice, the first of equals.

    With the texts of the choices, each total log-likelihood is divided by the number of characters.
    """
    values = [
        total / (len(choices[i]) if choices is not None else 1)
        for i, total in enumerate(likelihoods)
    ]
    return values.index(max(values))


def digest(questions: Sequence[Question]) -> str:
    """Hex digest of contexts, choices and answers, whatever the tokenizer."""
    content = [[q.context, q.choices, q.answer] for q in questions]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
