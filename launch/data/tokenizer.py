"""Tokenizers behind one small protocol: trained byte-level BPE, Hugging Face files, SentencePiece models, raw bytes.

Text is data: a document that spells a special token (``<|endoftext|>``) is encoded as those characters, never as the
token, and no tokenizer adds begin or end tokens of its own. The end-of-document id is appended by ``prepare_data.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from launch.data.local_files import find_tokenizer
from launch.prep import DataError

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load",
    "tokenizer_digest",
    "train_bpe",
]

END_OF_TEXT = "<|endoftext|>"
_COMMON_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "[EOS]")
SMALLEST_BPE = 257
"""256 bytes and the end-of-document token."""


class Tokenizer(Protocol):
    """What data preparation and training need to know of a tokenizer."""

    vocab_size: int
    """Largest id + 1."""
    eod: int
    """End-of-document id."""
    file: Path | None
    """The one file that defines it, if any."""

    def ids_of_text(self) -> int:
        """Ids that a model needs for text: what was added to the vocabulary, for padding say, need not occur."""

    def token_id(self, token: str) -> int | None:
        """The id of one token, special ones too; None = there is no such token."""

    def token(self, number: int) -> str | None:
        """The token of one id, special ones too; None = there is no such token."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out."""

    def fingerprint(self) -> str:
        """Hex digest that differs where any id may differ; for cache keys and for comparing data sets."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0–255, end of document 256."""

    vocab_size: int = 257
    eod: int = 256
    file: Path | None = None

    def ids_of_text(self) -> int:
        """See :class:`Tokenizer`."""
        return self.vocab_size

    def token_id(self, token: str) -> int | None:
        """See :class:`Tokenizer`."""
        return None

    def token(self, number: int) -> str | None:
        """See :class:`Tokenizer`."""
        return None

    def encode(self, text: str) -> list[int]:
        """See :class:`Tokenizer`."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """See :class:`Tokenizer`; broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def fingerprint(self) -> str:
        """See :class:`Tokenizer`."""
        return _digest(b"bytes", self.eod)


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library.

    Args:
        path: the file, a folder that holds one, or ``org/name`` of what the Hugging Face cache holds.
        eod: end-of-document token or id; None = what the folder's configuration calls ``eos_token``, else a usual name.

    Raises:
        DataError: no such file, not a tokenizer, or no end-of-document token can be told.
    """

    def __init__(self, path: str | Path, eod: str | int | None = None) -> None:
        import tokenizers

        file = find_tokenizer(path)
        self.file: Path | None = file
        try:
            self._library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as problem:  # the library raises bare Exception
            raise DataError(f"--tokenizer: {file} is not a tokenizer.json: {problem}") from None
        # Files saved after fine-tuning often carry these; either would corrupt documents silently.
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"--tokenizer: {file} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1  # the library's own count is too small where ids have holes
        self.eod = _end_id(eod, self.vocab_size, vocabulary.get, _configured_end(file.parent), str(file))

    def ids_of_text(self) -> int:
        """See :class:`Tokenizer`."""
        return max(self._library.get_vocab(with_added_tokens=False).values(), default=0) + 1

    def token_id(self, token: str) -> int | None:
        """See :class:`Tokenizer`."""
        return self._library.token_to_id(token)

    def token(self, number: int) -> str | None:
        """See :class:`Tokenizer`."""
        return self._library.id_to_token(number)

    def encode(self, text: str) -> list[int]:
        """See :class:`Tokenizer`."""
        return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids  # "fast": without offsets

    def decode(self, ids: Iterable[int]) -> str:
        """See :class:`Tokenizer`."""
        return self._library.decode([i for i in ids if i != self.eod], skip_special_tokens=True)

    def fingerprint(self) -> str:
        """See :class:`Tokenizer`."""
        assert self.file is not None
        return _digest(self.file.read_bytes(), self.eod)


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file. Its normalization applies, so decoding need not give the exact text back.

    Args:
        path: the file.
        eod: end-of-document piece or id; None = the model's ``</s>``.

    Raises:
        DataError: no such file, not a model, or it has no end-of-sentence id.
    """

    def __init__(self, path: str | Path, eod: str | int | None = None) -> None:
        import sentencepiece

        self.file: Path | None = Path(path).expanduser()
        if not self.file.is_file():
            raise DataError(f"--tokenizer: {path} does not exist, accepted: sentencepiece:FILE with a .model file")
        self._library = sentencepiece.SentencePieceProcessor()
        try:
            self._library.LoadFromSerializedProto(self.file.read_bytes())
        except (RuntimeError, OSError) as problem:
            raise DataError(f"--tokenizer: {path} is not a SentencePiece model: {problem}") from None
        self.vocab_size = self._library.GetPieceSize()
        end = self._library.eos_id()
        self.eod = _end_id(eod, self.vocab_size, self.token_id, end if end >= 0 else None, str(path))

    def ids_of_text(self) -> int:
        """See :class:`Tokenizer`."""
        return self.vocab_size

    def token_id(self, token: str) -> int | None:
        """See :class:`Tokenizer`."""
        found = self._library.PieceToId(token)
        return found if found >= 0 and self._library.IdToPiece(found) == token else None

    def token(self, number: int) -> str | None:
        """See :class:`Tokenizer`."""
        return self._library.IdToPiece(number)

    def encode(self, text: str) -> list[int]:
        """See :class:`Tokenizer`."""
        return self._library.EncodeAsIds(text)

    def decode(self, ids: Iterable[int]) -> str:
        """See :class:`Tokenizer`."""
        return self._library.DecodeIds([int(i) for i in ids if i != self.eod])

    def fingerprint(self) -> str:
        """See :class:`Tokenizer`."""
        assert self.file is not None
        return _digest(self.file.read_bytes(), self.eod)


def load(spec: str, eod: str | int | None = None) -> Tokenizer:
    """The tokenizer of a command-line value: ``bytes``, ``sentencepiece:FILE`` or ``hf:`` (a file, folder or name).

    Raises:
        DataError: unknown kind, or the file cannot be used.
    """
    kind, _, path = spec.partition(":")
    if spec == "bytes":
        if eod is not None and str(eod) != str(ByteTokenizer.eod):
            raise DataError(f"--eod: got {eod!r}, accepted: nothing or {ByteTokenizer.eod} with --tokenizer bytes")
        return ByteTokenizer()
    if kind == "hf" and path:
        return HuggingFaceTokenizer(path, eod)
    if kind == "sentencepiece" and path:
        return SentencePieceTokenizer(path, eod)
    raise DataError(
        f"--tokenizer: got {spec!r}, accepted: bpe:VOCABSIZE, hf:FILE, hf:FOLDER, hf:org/name, "
        "sentencepiece:FILE, bytes, none"
    )


def bpe_size(spec: str) -> int | None:
    """Vocabulary size of ``bpe:VOCABSIZE``; None for other kinds.

    Raises:
        DataError: not a number, or less than 256 bytes and one end token need.
    """
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not size.isascii() or not size.isdigit() or int(size) < SMALLEST_BPE:
        raise DataError(f"--tokenizer: got {spec!r}, accepted: bpe:N with N a whole number from {SMALLEST_BPE}")
    return int(size)


def train_bpe(documents: Iterable[str], vocab_size: int, file: Path) -> None:
    """Train a byte-level BPE and save it as a Hugging Face ``tokenizer.json``. The same documents give the same bytes.

    Args:
        documents: text to learn from.
        vocab_size: ids wanted, :data:`SMALLEST_BPE` or more; a small text gives fewer.
        file: where to save.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so that no text is out of vocabulary
    )
    library.train_from_iterator(iter(documents), trainer)
    library.save(str(file))


def for_data(prefix: str | Path) -> Tokenizer:
    """The tokenizer that ``prepare_data.py`` used for ``PREFIX.bin``.

    Raises:
        DataError: the data has no readable ``PREFIX.json``, or was made from ready token files.
    """
    summary = Path(f"{prefix}.json")
    try:
        info = json.loads(summary.read_text(encoding="utf-8-sig"))
        spec, file, eod = info["tokenizer"], info["tokenizer_file"], info["eod"]
    except (OSError, ValueError, KeyError) as problem:
        raise DataError(f"{summary}: not a summary written by prepare_data.py ({problem!r})") from None
    if spec == "none":
        raise DataError(f"{summary}: made from token files, so its tokenizer is not known")
    kind = "sentencepiece" if spec.startswith("sentencepiece") else "hf"
    return load("bytes" if file is None else f"{kind}:{summary.parent / file}", eod)


def _configured_end(folder: Path) -> str | None:
    """``eos_token`` of the ``tokenizer_config.json`` beside a tokenizer, if there is one."""
    try:
        token: Any = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8-sig")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _end_id(given: str | int | None, vocab_size: int, lookup: Any, default: str | int | None, where: str) -> int:
    """Resolve ``--eod`` (token, id or nothing) to an id below ``vocab_size``."""
    if given is not None:
        number = str(given).isascii() and str(given).isdigit()  # digits are an id, even where a token spells them
        found = int(given) if number else lookup(given)
        if found is None or not 0 <= found < vocab_size:
            raise DataError(f"--eod: got {given!r}, accepted: a token of {where} or an id below {vocab_size}")
        return found
    if isinstance(default, int):
        return default
    for name in (default, *_COMMON_ENDS):
        if name is not None and lookup(name) is not None:
            return lookup(name)
    raise DataError(
        f"--eod: needed, because {where} names no end-of-document token; accepted: a token of it or an id "
        f"below {vocab_size}"
    )


def tokenizer_digest(file: Path, eod: int) -> str:
    """:meth:`Tokenizer.fingerprint` of a tokenizer.json, without reading it as one."""
    return _digest(file.read_bytes(), eod)


def _digest(content: bytes, eod: int) -> str:
    return hashlib.sha256(b"%d:" % eod + content).hexdigest()
