"""Which tokenizer a model was trained with, and what is put before a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from launch.data.tokenizer import HuggingFaceTokenizer, Tokenizer, for_data, load
from launch.prep import DataError
from launch.train.initial import training_data

__all__ = ["begin_ids", "find_tokenizer"]


def find_tokenizer(
    given: str | None, eod: str | None, files: Sequence[Path], run: Mapping[str, Any]
) -> tuple[Tokenizer, str]:
    """The tokenizer of ``--tokenizer``, else of the files that travel with the weights or of the
    run's training data.

    Returns:
        It, and where it is from.

    Raises:
        DataError, CoatConfigError: it cannot be used, or there is none.
    """
    if given is not None:
        plain = given == "bytes" or given.partition(":")[0] in ("hf", "sentencepiece")
        return load(given if plain else f"hf:{given}", eod), given
    for name, kind in (("tokenizer.json", "hf"), ("tokenizer.model", "sentencepiece")):
        if file := next((file for file in files if file.name == name), None):
            return load(f"{kind}:{file}", eod), str(file)
    if (data := training_data(run)) is not None:
        with suppress(DataError):  # ready token files
            return for_data(data[0]), f"{data[0]}.json"
    raise CoatConfigError(
        "--tokenizer: missing, accepted: hf:PATH (a tokenizer.json or its folder), "
        "sentencepiece:FILE or bytes; the "
        "checkpoint has none, and the data that it was trained on is not here or does not name one"
    )


def begin_ids(tokenizer: Tokenizer, given: str) -> list[int]:
    """Ids that are put before every text, by ``--bos``.

    "auto" is what the installed transformers puts there for the folder of a ``tokenizer.json``,
    else none.

    Raises:
        CoatConfigError: no such token.
    """
    if given == "none":
        return []
    if given == "eod":
        return [tokenizer.eod]
    if given == "auto":
        return (
            _template(Path(str(tokenizer.file)))
            if isinstance(tokenizer, HuggingFaceTokenizer)
            else []
        )
    found = int(given) if given.isascii() and given.isdigit() else tokenizer.token_id(given)
    if found is None or found >= tokenizer.vocab_size:
        raise CoatConfigError(
            f"--bos: got {given!r}, accepted: auto, none, eod, a token of the tokenizer or an id "
            "below "
            f"{tokenizer.vocab_size}"
        )
    return [found]


def _template(file: Path) -> list[int]:
    """What transformers puts before a text; where it cannot load the folder, what the file does."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    whole, bare = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
    # Of many kinds: missing files, unknown classes, transformers is not installed.
    with suppress(Exception):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
        if len(tokenizer):
            whole, bare = (
                list(tokenizer("a", add_special_tokens=special).input_ids)
                for special in (True, False)
            )
    found = (
        whole[:count] for count in range(len(whole)) if bare == whole[count : count + len(bare)]
    )
    return next(found, [])
