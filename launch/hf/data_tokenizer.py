"""Tokenizer files for a Hugging Face folder, from prepared data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from launch.data.tokenizer import SentencePieceTokenizer, for_data

__all__ = ["DataTokenizer", "tokenizer_of"]


class DataTokenizer(NamedTuple):
    """What a Hugging Face folder gets."""

    copies: dict[str, Path]
    """Files that are copied, by name; none for bytes."""
    texts: dict[str, str]
    """Files that are written anew."""
    end: int
    """End-of-document id."""
    ids: int
    """Ids that a model needs for text and the end of documents."""


def tokenizer_of(prefix: str) -> DataTokenizer:
    """The tokenizer of prepared data.

    Args:
        prefix: of the data; ``PREFIX.json`` and the tokenizer's file beside it are enough.

    Raises:
        DataError: see :func:`launch.data.tokenizer.for_data`.
    """
    tokenizer = for_data(prefix)
    end, ids = tokenizer.eod, max(tokenizer.ids_of_text(), tokenizer.eod + 1)
    if tokenizer.file is None:
        return DataTokenizer({}, {}, end, ids)
    name = "tokenizer.model" if isinstance(tokenizer, SentencePieceTokenizer) else "tokenizer.json"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token(end),
        "clean_up_tokenization_spaces": False,
    }
    texts = {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    return DataTokenizer({name: tokenizer.file}, texts, end, ids)
