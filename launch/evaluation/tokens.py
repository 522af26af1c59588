"""Which tokenizer a model was trained with, and what it puts before a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from launch.data.blend import DataInfo
from launch.data.tokenizer import HuggingFaceTokenizer, Tokenizer, for_data, load
from launch.evaluation.rows import Row
from launch.prep import DataError
from launch.training.initial import tokenizer_warning, training_data
from launch.weights import Weights

__all__ = ["begin_ids", "check_data_trained_with", "check_fits", "check_rows", "check_trained_with", "find_tokenizer"]


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


def check_trained_with(tokenizer: Tokenizer, source: str, run: Mapping[str, Any]) -> None:
    """Refuse a tokenizer of another size than that of the data that the model was trained on, where it is here.

    Raises:
        CoatConfigError: names both.
    """
    data = training_data(run)
    if data is None or data[1].tokenizer_digest in (None, tokenizer.fingerprint()):
        return
    if tokenizer.vocab_size != data[1].vocab_size:
        raise CoatConfigError(
            f"--tokenizer: {source} has {tokenizer.vocab_size} ids, accepted: what the model was trained with, "
            f"{data[1].describe()} of {data[0]}"
        )


def check_data_trained_with(prefix: str, info: DataInfo, weights: Weights, run: Mapping[str, Any]) -> str | None:
    """:func:`check_trained_with` of prepared data: where sizes are the same, a line that tells of another tokenizer.

    Its ids mean other texts to the model, and the loss says nothing of the data.

    Raises:
        CoatConfigError: names both.
    """
    warning, trained = tokenizer_warning(weights, prefix, info, "--load"), training_data(run)
    if warning and trained is not None and info.vocab_size != trained[1].vocab_size:
        raise CoatConfigError(
            f"--data: {prefix} was prepared with {info.describe()}, accepted: what the model was trained with, "
            f"{trained[1].describe()} of {trained[0]}"
        )
    return warning


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
        library = _library(tokenizer)
        return [] if library is None else _template(library, Path(str(tokenizer.file)).parent)
    found = int(given) if given.isascii() and given.isdigit() else tokenizer.token_id(given)
    if found is None or found >= tokenizer.vocab_size:
        raise CoatConfigError(
            f"--bos: got {given!r}, accepted: auto, none, eod, a token of the tokenizer or an id below "
            f"{tokenizer.vocab_size}"
        )
    return [found]


def _library(tokenizer: Tokenizer) -> Any:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(tokenizer.file))


def _template(library: Any, folder: Path) -> list[int]:
    """What transformers puts before a text; without it, or where it cannot load the folder, what the file does."""
    encode: Any = None
    with suppress(Exception):  # of many kinds: it is not installed, files that it misses, classes that it has not
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if len(tokenizer):
            encode = lambda special: list(tokenizer("a", add_special_tokens=special).input_ids)  # noqa: E731
    if encode is None:
        library.no_truncation()
        library.no_padding()
        encode = lambda special: library.encode("a", add_special_tokens=special).ids  # noqa: E731
    whole, bare = encode(True), encode(False)
    for count in range(len(whole) - len(bare) + 1):
        if whole[count : count + len(bare)] == bare:
            return whole[:count]
    return []
