"""Tokenizers behind one small class: Hugging Face files (trained byte-level BPE, too),
SentencePiece models, raw bytes.

Text is data: a document that spells a special token (``<|endoftext|>``) is encoded as those
characters, never as the token, and no tokenizer adds begin or end tokens of its own. The
end-of-document id is appended by ``prepare_data.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from launch.common.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_COMMON_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "[EOS]")
SMALLEST_BPE = 257  # 256 bytes and the end-of-document token


class Tokenizer(Protocol):
    """What data preparation and training need to know of a tokenizer."""

    vocab_size: int
    """Largest id + 1."""
    eod: int
    """End-of-document id."""
    file: Path | None = None
    """The one file that defines it, if any."""

    def token_id(self, token: str) -> int | None:
        """The id of one token, special ones too; None = there is no such token."""
        return None

    def token(self, number: int) -> str | None:
        """The token of one id, special ones too; None = there is no such token."""
        return None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token."""

    def fingerprint(self) -> str:
        """Hex digest that differs where any id may differ; for cache keys and for comparing data
        sets.
        """
        return tokenizer_digest(self.file, self.eod)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, end of document 256."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the ``tokenizers`` library: a file, a folder's, or that of a cached
    ``org/name``.

    ``eod`` is a token or id; None = what the folder's configuration calls ``eos_token``, else a
    usual name.
    """

    def __init__(self, path: str | Path, eod: str | int | None = None) -> None:
        import tokenizers

        self.file = file = _find(path)
        try:
            self._library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as problem:  # the library raises bare Exception
            raise DataError(
                f"--tokenizer: got {file}, accepted: a tokenizer.json ({problem})"
            ) from None
        # Files saved after fine-tuning often carry these; either would corrupt documents silently.
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        ids = self._library.get_vocab(with_added_tokens=True).values()
        # The library's own count is too small where ids have holes.
        self.vocab_size = max(ids, default=0) + 1
        self.eod = _end_id(eod, self, _configured_end(file.parent))

    def token_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def token(self, number: int) -> str | None:
        return self._library.id_to_token(number)

    def encode(self, text: str) -> list[int]:
        # "fast": without offsets.
        return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file, with its normalization.

    ``eod`` is a piece or id; None = the model's ``</s>``.
    """

    def __init__(self, path: str | Path, eod: str | int | None = None) -> None:
        import sentencepiece

        self.file = file = Path(path).expanduser()
        self._library = sentencepiece.SentencePieceProcessor()
        try:
            self._library.LoadFromSerializedProto(file.read_bytes())
        except (RuntimeError, OSError) as problem:
            raise DataError(
                f"--tokenizer: got {path}, accepted: a SentencePiece model ({problem})"
            ) from None
        self.vocab_size = self._library.GetPieceSize()
        end = self._library.eos_id()
        self.eod = _end_id(eod, self, end if end >= 0 else None)

    def token_id(self, token: str) -> int | None:
        found = self._library.PieceToId(token)
        return found if found >= 0 and self._library.IdToPiece(found) == token else None

    def token(self, number: int) -> str | None:
        return self._library.IdToPiece(number)

    def encode(self, text: str) -> list[int]:
        return self._library.EncodeAsIds(text)


def load(spec: str, eod: str | int | None = None) -> Tokenizer:
    """The tokenizer of a command-line value: ``bytes``, ``sentencepiece:FILE`` or ``hf:`` (a file,
    folder or name).

    Raises:
        DataError: unknown kind, the file cannot be used, or it names no end-of-document token and
            ``eod`` is None.
    """
    kind, _, path = spec.partition(":")
    if spec == "bytes":
        return ByteTokenizer()
    if kind == "hf" and path:
        return HuggingFaceTokenizer(path, eod)
    if kind == "sentencepiece" and path:
        return SentencePieceTokenizer(path, eod)
    raise DataError(
        f"--tokenizer: got {spec!r}, accepted: bpe:VOCABSIZE, hf:FILE, hf:FOLDER, hf:org/name, "
        "sentencepiece:FILE, bytes"
    )


def bpe_size(spec: str) -> int | None:
    """Vocabulary size of ``bpe:VOCABSIZE``; None for other kinds."""
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not size.isdecimal() or int(size) < SMALLEST_BPE:
        raise DataError(
            f"--tokenizer: got {spec!r}, accepted: bpe:N with N a whole number from {SMALLEST_BPE}"
        )
    return int(size)


def train_bpe(documents: Iterable[str], vocab_size: int, file: Path) -> None:
    """Train a byte-level BPE and save it as a ``tokenizer.json``; the same documents give the same
    bytes.

    A small text gives fewer ids than ``vocab_size``.
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
        # Every byte, so that no text is out of vocabulary.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
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
        raise DataError(
            f"{summary}: not a summary written by prepare_data.py ({problem!r})"
        ) from None
    if spec == "none":
        raise DataError(f"{summary}: made from token files, so its tokenizer is not known")
    kind = "sentencepiece" if spec.startswith("sentencepiece") else "hf"
    return load("bytes" if file is None else f"{kind}:{summary.parent / file}", eod)


def _configured_end(folder: Path) -> str | None:
    """``eos_token`` of the ``tokenizer_config.json`` beside a tokenizer, if there is one."""
    try:
        token: Any = json.loads(
            (folder / "tokenizer_config.json").read_text(encoding="utf-8-sig")
        ).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _find(given: str | Path) -> Path:
    """The ``tokenizer.json`` that ``hf:GIVEN`` means: a file, a folder's, or a cached model's.
    Downloads nothing.
    """
    path = Path(given).expanduser()
    for file in (path, path / "tokenizer.json"):
        if file.is_file():
            return file
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(given), "tokenizer.json", local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not the name of a repository
        raise DataError(
            f"--tokenizer: got hf:{given}, accepted: a tokenizer.json, a folder with one, or a "
            "model in the Hugging "
            f"Face cache (`hf download {given} tokenizer.json tokenizer_config.json` puts it there)"
        ) from None


def _end_id(given: str | int | None, tokenizer: Tokenizer, default: str | int | None) -> int:
    """Resolve ``--eod`` (token, id or nothing) to an id of the tokenizer."""
    accepted = f"a token of {tokenizer.file} or an id below {tokenizer.vocab_size}"
    if given is not None:
        given = str(given)  # digits are an id, even where a token spells them
        found = int(given) if given.isdecimal() else tokenizer.token_id(given)
        if found is None or not 0 <= found < tokenizer.vocab_size:
            raise DataError(f"--eod: got {given!r}, accepted: {accepted}")
        return found
    if isinstance(default, int):
        return default
    for name in (default, *_COMMON_ENDS):
        if name is not None and (found := tokenizer.token_id(name)) is not None:
            return found
    raise DataError(
        "--eod: got nothing, and the tokenizer names no end-of-document token, accepted: "
        f"{accepted}"
    )


def tokenizer_digest(file: Path | None, eod: int) -> str:
    """:meth:`Tokenizer.fingerprint` of a tokenizer's file, without reading it as one; None = of
    bytes.
    """
    content = b"bytes" if file is None else file.read_bytes()
    return hashlib.sha256(b"%d:" % eod + content).hexdigest()
