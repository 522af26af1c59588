"""Which tokenizer a model was trained with, and what it puts before a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from launch.data.tokenizer import HuggingFaceTokenizer, Tokenizer, for_data, load
from launch.evaluation.rows import Row
from launch.prep import DataError
from launch.train.initial import training_data

__all__ = ["begin_ids", "check_fits", "check_rows", "check_trained_with", "find_tokenizer"]


def find_tokenizer(
    given: str | None, eod: str | None, files: Sequence[Path], run: Mapping[str, Any]
) -> tuple[Tokenizer, str]:
    """The tokenizer, and a line that says where it is from.

    Args:
        given: ``--tokenizer``.
        eod: ``--eod``.
        files: that travel with the weights.
        run: what the checkpoint says of the run that saved it; empty where it says nothing.

    Raises:
        DataError: it cannot be used.
        CoatConfigError: none was given and the checkpoint has none.
    """
    if given is not None:
        if given.partition(":")[0] in ("bpe", "none"):
            raise DataError(
                f"--tokenizer: got {given!r}, accepted: hf:FILE, FOLDER or org/name, sentencepiece:FILE, bytes"
            )
        kind = "" if given == "bytes" or given.partition(":")[0] in ("hf", "sentencepiece") else "hf:"
        return load(kind + given, eod), given
    for name, kind in (("tokenizer.json", "hf"), ("tokenizer.model", "sentencepiece")):
        for file in files:
            if file.name == name:
                return load(f"{kind}:{file}", eod), str(file)
    if (data := training_data(run)) is not None:
        with suppress(DataError):  # ready token files
            found = for_data(data[0])
            if eod is None:
                return found, f"{data[0]}.json"
            raise CoatConfigError(
                f"--eod: got {eod!r}, accepted: none with the tokenizer of {data[0]}.json, whose documents end with "
                f"{found.eod}, or another --tokenizer"
            )
    raise CoatConfigError(
        "--tokenizer: missing, accepted: hf:PATH (a tokenizer.json or its folder), sentencepiece:FILE or bytes; the "
        "checkpoint has none, and the data that it was trained on is not here or does not name one"
    )


def check_fits(what: str, vocab_size: int, model_vocab: int) -> None:
    """Refuse ids that the model has no embedding for.

    Args:
        what: where the ids are from, for the error.

    Raises:
        CoatConfigError: the vocabulary is larger than the model's.
    """
    if vocab_size > model_vocab:
        raise CoatConfigError(
            f"{what}: has {vocab_size} ids, accepted: at most the {model_vocab} of the model: another tokenizer"
        )


def check_rows(path: str, rows: Sequence[Row], model_vocab: int) -> None:
    """Refuse rows with ids that the model has no embedding for: of tokens that were added to a tokenizer.

    Raises:
        CoatConfigError: names the file.
    """
    largest = max((int(row.ids.max()) for row in rows), default=0)
    if largest >= model_vocab:
        raise CoatConfigError(
            f"{path}: holds a token with the id {largest}, or is given one as begin or end token (--bos, --eod), "
            f"accepted: ids below the model's {model_vocab}: another --tokenizer"
        )


def check_trained_with(what: str, vocab_size: int, digest: str | None, run: Mapping[str, Any]) -> None:
    """Refuse a tokenizer of another size than that of the data that the model was trained on, where it is here.

    Args:
        what: where the tokenizer is from, for the error.
        digest: of the tokenizer; None = not known.

    Raises:
        CoatConfigError: names both.
    """
    if (trained := training_data(run)) is None:
        return
    prefix, info = trained
    if None in (known := {digest, info.tokenizer_digest}) or len(known) == 1 or vocab_size == info.vocab_size:
        return
    raise CoatConfigError(
        f"{what} has {vocab_size} ids, accepted: what the model was trained with, {info.describe()} of {prefix}"
    )


def begin_ids(tokenizer: Tokenizer, given: str) -> list[int]:
    """Ids that are put before every text.

    Args:
        given: ``--bos``. "auto" is what the installed transformers puts there for the folder of a ``tokenizer.json``;
            of other tokenizers none.

    Raises:
        CoatConfigError: no such token.
    """
    if given == "none":
        return []
    if given == "eod":
        return [tokenizer.eod]
    if given == "auto":
        return _template(Path(str(tokenizer.file))) if isinstance(tokenizer, HuggingFaceTokenizer) else []
    found = int(given) if given.isascii() and given.isdigit() else tokenizer.token_id(given)
    if found is None or found >= tokenizer.vocab_size:
        raise CoatConfigError(
            f"--bos: got {given!r}, accepted: auto, none, eod, a token of the tokenizer or an id below "
            f"{tokenizer.vocab_size}"
        )
    return [found]


def _template(file: Path) -> list[int]:
    """What transformers puts before a text; without it, or where it cannot load the folder, what the file does."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    whole, bare = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
    with suppress(Exception):  # of many kinds: it is not installed, files that it misses, classes that it has not
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
        if len(tokenizer):
            whole, bare = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (True, False))
    found = (whole[:count] for count in range(len(whole)) if bare == whole[count : count + len(bare)])
    return next(found, [])
