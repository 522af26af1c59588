"""Where a Hugging Face tokenizer lies on this machine: nothing is ever downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from launch.prep import DataError

__all__ = ["find_tokenizer"]

_FILE = "tokenizer.json"
_REPOSITORY = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def find_tokenizer(given: str | Path) -> Path:
    """The ``tokenizer.json`` that ``hf:GIVEN`` means.

    Args:
        given: the file, a folder that holds it, or a model's name on the Hugging Face Hub (``org/name``) whose
            tokenizer is in the local cache.

    Raises:
        DataError: there is none; says where to put it.
    """
    path = Path(os.path.expanduser(given))
    if path.is_file():
        return path
    if path.is_dir():
        if (path / _FILE).is_file():
            return path / _FILE
        raise DataError(f"--tokenizer: got hf:{given}, a folder without {_FILE}, accepted: one that holds it")
    if path.suffix == ".json" or not _REPOSITORY.fullmatch(str(given)):
        raise DataError(f"--tokenizer: {given} does not exist, accepted: hf:FILE with a {_FILE}, or its folder")
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(str(given), _FILE)
    except ValueError:  # no name of a repository
        cached = None
    if isinstance(cached, str):
        return Path(cached)
    raise DataError(
        f"--tokenizer: got hf:{given}, which is neither here nor in the Hugging Face cache, and nothing is downloaded; "
        f"accepted: hf:PATH of a folder with its {_FILE} and tokenizer_config.json, or hf:{given} when "
        f"{Path(constants.HF_HUB_CACHE)} holds it (`hf download {given} {_FILE} tokenizer_config.json` puts it there)"
    )
