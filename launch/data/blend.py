"""The data sets that a command line names: prefixes, weights, splits, and the tokenizer of each."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from launch.common.errors import DataError
from launch.data.mixture import is_mixture, read_mixture


@dataclass(frozen=True)
class DataInfo:
    """What training needs to know of a prepared data set."""

    vocab_size: int  # ids are below
    eod: int  # end-of-document id
    # Its fingerprint; None where it is not known (ready token files)
    tokenizer_digest: str | None = None
    # What --tokenizer was when it was prepared; None where that is not known.
    tokenizer: str | None = None

    def describe(self) -> str:
        """The tokenizer, for messages."""
        digest = "" if self.tokenizer_digest is None else f", digest {self.tokenizer_digest[:12]}"
        return (
            f"{self.tokenizer or 'an unnamed one'} (vocabulary {self.vocab_size}, end "
            f"{self.eod}{digest})"
        )


def without_suffix(given: str) -> str:
    """``given`` without the ``.bin``, ``.idx`` or ``.json`` of one of a data set's files, and ``~``
    as the home folder.

    ``given`` is ``PREFIX`` or ``WEIGHT PREFIX``. A prefix that really ends so is unchanged, and so
    is a description.
    """
    weight, prefix = _weight_and_prefix(given)
    prefix = os.path.expanduser(prefix)
    if (
        not is_mixture(prefix)
        and prefix.endswith((".bin", ".idx", ".json"))
        and not Path(f"{prefix}.idx").exists()
    ):
        prefix = prefix.rpartition(".")[0]
    return prefix if weight is None else f"{weight} {prefix}"


def read_info(prefix: str) -> DataInfo:
    """Read ``PREFIX.json``, or a description of token files.

    Raises:
        DataError: the data set is missing or incomplete. For data that Megatron's own tools made, a
            ``PREFIX.json`` with the two keys ``vocab_size`` and ``eod`` is enough.
    """
    if is_mixture(prefix):
        mixture = read_mixture(prefix)
        return DataInfo(mixture.vocab_size, mixture.eos, None, "of token files")
    accepted = (
        "accepted: the PREFIX of a finished prepare_data.py, or a description of token "
        "files (docs/data.md)"
    )
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise DataError(f"data: {prefix}{suffix} does not exist, {accepted}")
    try:
        return TypeAdapter(DataInfo).validate_json(
            Path(f"{prefix}.json").read_text(encoding="utf-8-sig")
        )
    except (OSError, ValueError) as problem:
        raise DataError(
            f"data: {prefix}.json: got {' '.join(str(problem).split())}, {accepted}"
        ) from None


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
                f"data: {prefix} was made with another tokenizer than {first[0]}: with "
                f"{info.describe()}, not "
                f"{first[1].describe()}; accepted: one tokenizer for all"
            )


def telling(prefixes: Sequence[str], infos: Sequence[DataInfo]) -> tuple[str, DataInfo]:
    """The first data set of a blend whose tokenizer is known, else the first; all have the same
    one.
    """
    both = list(zip(prefixes, infos, strict=True))
    return next((one for one in both if one[1].tokenizer_digest is not None), both[0])


def parse_blend(paths: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of ``["a", "b"]``, ``["0.3 a", "0.7 b"]`` or Megatron's ``["0.3", "a",
    "0.7", "b"]``.

    Raises:
        DataError: nothing given, a prefix twice, weights on some only, or a weight that is not a
            positive number.
    """
    if len(paths) % 2 == 0 and all(_number(weight) is not None for weight in paths[::2]):
        paths = [
            f"{weight} {prefix}" for weight, prefix in zip(paths[::2], paths[1::2], strict=True)
        ]
    given = [_weight_and_prefix(without_suffix(path)) for path in paths]
    prefixes = [prefix for _, prefix in given]
    weights = [float(weight) for weight, _ in given if weight is not None]
    positive = all(weight > 0 and math.isfinite(weight) for weight in weights)
    if not prefixes or not all(prefixes) or len(weights) not in (0, len(given)) or not positive:
        accepted = "PREFIX ... or 'WEIGHT PREFIX' ..., a positive weight for all or none"
        raise DataError(f"data: got {list(paths)}, accepted: {accepted}")
    if len({os.path.realpath(prefix) for prefix in prefixes}) < len(prefixes):
        # As of `data/code.*`.
        raise DataError(f"data: got {list(paths)}, accepted: every prefix once")
    return prefixes, weights or None


def _weight_and_prefix(given: str) -> tuple[str | None, str]:
    weight, _, prefix = given.strip().partition(" ")
    if prefix and _number(weight) is not None:
        return weight, prefix.strip()
    return None, given.strip()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_split(split: str) -> list[float]:
    """Shares of train, valid and test, summing to 1, of a text like ``"969,30,1"``; missing ones
    are 0.

    Raises:
        DataError: not up to three numbers, one of them positive.
    """
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    if len(shares) > 3 or not 0 < sum(shares) < math.inf or min(shares) < 0:
        raise DataError(
            f"split: got {split!r}, accepted: up to three numbers for train,valid,test, such as "
            "90,10,0"
        )
    return [share / sum(shares) for share in shares] + [0.0] * (3 - len(shares))
