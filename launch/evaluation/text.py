"""Held-out text: documents of files, the tokens of each, and the windows that are scored."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from launch.data.tokenizer import Tokenizer
from launch.evaluation.rows import Row, sliding_windows
from launch.prep import DataError
from launch.prep.documents import ReadOptions, texts
from launch.prep.sources import cut_into_shards, find

__all__ = ["Text", "read_text"]


@dataclass
class Text:
    """One ``--text`` input, tokenized and cut into rows."""

    name: str
    rows: list[Row] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    """Of the documents, those that are not scored included, a begin token not."""
    bytes: int = 0
    """UTF-8 bytes of the documents."""
    unscored_documents: int = 0
    """Documents of which nothing is scored: a single token with nothing before it."""
    skipped: Counter = field(default_factory=Counter)
    """What was left out while reading, by reason."""


def read_text(
    given: str,
    tokenizer: Tokenizer,
    begin: list[int],
    *,
    window: int,
    stride: int,
    options: ReadOptions,
    limit: int | None = None,
) -> Text:
    """Documents of a file or folder, as ``prepare_data.py`` reads them, each tokenized and cut by itself.

    Args:
        given: value of ``--text``.
        begin: ids put before each document; never scored.
        window, stride: see :func:`launch.evaluation.rows.sliding_windows`.
        limit: take the first documents only.

    Raises:
        DataError: names the option, or the file and line; nothing to score in it.
    """
    text = Text(given)
    try:
        files, text.skipped = find([given])
        pieces = [piece for shard in cut_into_shards(files, 1 << 62) for piece in shard]
        documents = (one for piece in pieces for one in texts(piece, options, text.skipped))
        for document in islice(documents, limit):
            _add(text, document, tokenizer, begin, window, stride)
    except DataError as problem:
        raise DataError(str(problem).replace("--input", "--text", 1)) from None
    if not text.rows:
        left = ", ".join(f"{count} {reason}" for reason, count in text.skipped.items())
        raise DataError(
            f"--text: {given} gives no token to score ({text.documents} documents of {text.tokens} tokens"
            f"{f'; left out: {left}' if left else ''}), accepted: text of two tokens or more"
        )
    return text


def _add(text: Text, document: str, tokenizer: Tokenizer, begin: list[int], window: int, stride: int) -> None:
    own = tokenizer.encode(document)
    ids = np.asarray([*begin, *own], np.int32)
    text.documents += 1
    text.tokens += len(own)
    text.bytes += len(document.encode())
    before = len(text.rows)
    for start, end, scored in sliding_windows(len(ids), window, stride):
        # No begin token is scored, also where there are several.
        if (count := min(scored, end - max(len(begin), start + 1))) > 0:
            text.rows.append(Row(ids[start:end], count))
    text.unscored_documents += len(text.rows) == before
