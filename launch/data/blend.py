"""The data sets that a command line names: prefixes, weights, splits, and what each says of its tokenizer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.data.mixture import is_mixture, read_mixture
from launch.prep import DataError

__all__ = ["DataInfo", "check_one_tokenizer", "parse_blend", "parse_split", "read_info", "telling", "without_suffix"]

_SUFFIXES = (".bin", ".idx")
_FORGIVEN = (*_SUFFIXES, ".json")


@dataclass(frozen=True)
class DataInfo:
    """What training needs to know of a prepared data set."""

    vocab_size: int
    """Ids are below this."""
    eod: int
    """End-of-document id."""
    tokenizer_digest: str | None
    """Fingerprint of the tokenizer; None where it is not known (ready token files)."""
    tokenizer: str | None = None
    """What ``--tokenizer`` was when it was prepared; None where that is not known."""

    def describe(self) -> str:
        """The tokenizer, for messages."""
        digest = "" if self.tokenizer_digest is None else f", digest {self.tokenizer_digest[:12]}"
        return f"{self.tokenizer or 'an unnamed one'} (vocabulary {self.vocab_size}, end {self.eod}{digest})"


def without_suffix(given: str) -> str:
    """``given`` without the ``.bin``, ``.idx`` or ``.json`` of one of a data set's files, and ``~`` as the home folder.

    Args:
        given: ``PREFIX`` or ``WEIGHT PREFIX``. A data set whose prefix really ends so is left as it is, and so is a
            description of token files.
    """
    if Path(f"{given}.idx").exists():
        return given
    weight, space, prefix = given.partition(" ")
    if not space or _number(weight) is None:
        weight, space, prefix = "", "", given
    prefix = os.path.expanduser(prefix.strip())
    if is_mixture(prefix):
        return weight + space + prefix
    if prefix.endswith(_FORGIVEN) and not Path(f"{prefix}.idx").exists():
        prefix = prefix.rpartition(".")[0]
    return weight + space + prefix


def read_info(prefix: str) -> DataInfo:
    """Read ``PREFIX.json``, or a description of token files.

    Raises:
        DataError: the data set is missing or incomplete. For data that Megatron's own tools made, a ``PREFIX.json``
            with the two keys ``vocab_size`` and ``eod`` is enough.
    """
    if is_mixture(prefix):
        mixture = read_mixture(prefix)
        return DataInfo(mixture.vocab_size, mixture.eos, None, "of token files")
    if prefix.endswith(".npy"):
        raise DataError(
            f"data: got {prefix}, which is a token file, accepted: a description of such files (docs/data.md)"
        )
    for suffix in _SUFFIXES:
        if not Path(prefix + suffix).is_file():
            raise DataError(
                f"data: {prefix}{suffix} {'is no file' if Path(prefix + suffix).exists() else 'does not exist'}, "
                "accepted: the PREFIX of files written by prepare_data.py, or a description of token files, JSON or "
                f"YAML{_there_are(prefix)}"
            )
    try:
        content = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8-sig"))
        info = DataInfo(
            int(content["vocab_size"]), int(content["eod"]), content.get("tokenizer_digest"), content.get("tokenizer")
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise DataError(
            f"data: {prefix}.json cannot be used ({problem!r}), accepted: a finished prepare_data.py output, or an "
            "object with the keys vocab_size and eod"
        ) from None
    if not 0 <= info.eod < info.vocab_size:
        raise DataError(
            f"data: {prefix}.json has eod {info.eod} and vocab_size {info.vocab_size}, accepted: eod below vocab_size"
        )
    return info


def _there_are(prefix: str) -> str:
    """Prefixes that are in the folder of a missing one, for its error."""
    folder = Path(prefix) if Path(prefix).is_dir() else Path(prefix).parent
    try:
        found = sorted(str(file.with_suffix("")) for file in folder.glob("*.idx"))
    except OSError:
        return ""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f" ({folder} has {', '.join(found[:5])}{more})" if found else ""


def check_one_tokenizer(prefixes: Sequence[str], infos: Sequence[DataInfo]) -> None:
    """Refuse a blend of two tokenizers, in which an id would mean two things.

    Raises:
        DataError: names both data sets and both tokenizers.
    """
    first, *others = zip(prefixes, infos, strict=True)
    for prefix, info in others:
        digests = {info.tokenizer_digest, first[1].tokenizer_digest} - {None}
        if (info.vocab_size, info.eod) != (first[1].vocab_size, first[1].eod) or len(digests) > 1:
            raise DataError(
                f"data: {prefix} was made with another tokenizer than {first[0]}: with {info.describe()}, not "
                f"{first[1].describe()}; accepted: one tokenizer for all"
            )


def telling(prefixes: Sequence[str], infos: Sequence[DataInfo]) -> tuple[str, DataInfo]:
    """The first data set of a blend whose tokenizer is known, else the first; all have the same one."""
    both = list(zip(prefixes, infos, strict=True))
    return next((one for one in both if one[1].tokenizer_digest is not None), both[0])


def parse_blend(paths: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of ``["a", "b"]``, ``["0.3 a", "0.7 b"]`` or Megatron's ``["0.3", "a", "0.7", "b"]``.

    Raises:
        DataError: nothing given, an empty prefix, weights on some only, or a weight that is not a positive number.
    """
    given: list[tuple[str, float | None]] = []
    pending: float | None = None
    for path in map(without_suffix, paths):
        head, _, rest = path.strip().partition(" ")
        weight = None if Path(f"{path}.idx").exists() else _number(head)
        if weight is not None and not rest.strip() and pending is None:
            pending = weight
        elif weight is not None and rest.strip() and pending is None:
            given.append((rest.strip(), weight))
        else:
            given.append((path, pending))
            pending = None
    if pending is not None or not given or not all(prefix.strip() for prefix, _ in given):
        raise DataError(f"data: got {list(paths)}, accepted: PREFIX ... or 'WEIGHT PREFIX' ...")
    weights = [w for _, w in given if w is not None]
    if weights and len(weights) < len(given):
        raise DataError(f"data: got {list(paths)}, accepted: a weight for every prefix or for none")
    if any(not (w > 0 and math.isfinite(w)) for w in weights):
        raise DataError(f"data: got the weights {weights}, accepted: positive numbers")
    prefixes = [p for p, _ in given]
    if len({os.path.realpath(prefix) for prefix in prefixes}) < len(prefixes):
        raise DataError(f"data: got {list(paths)}, accepted: every prefix once")
    return prefixes, weights or None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_split(split: str) -> list[float]:
    """Shares of train, valid and test, summing to 1, of a text like ``"969,30,1"``; missing ones are 0.

    Raises:
        DataError: not up to three numbers of which one is positive.
    """
    shares = [_number(part) for part in split.split(",")]
    given = [s for s in shares if s is not None and s >= 0 and math.isfinite(s)]
    if len(given) < len(shares) or len(given) > 3 or not sum(given):
        raise DataError(
            f"split: got {split!r}, accepted: up to three numbers from 0 for train,valid,test, such as 90,10,0"
        )
    return [s / sum(given) for s in given] + [0.0] * (3 - len(given))
