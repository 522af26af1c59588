"""Which DeepSpeed's ZeRO was read, by the bytes of its files.

What is left out of a ZeRO step, or made one memory, is right only as long as the rest of DeepSpeed's step does what it
did when it was read. A version number does not say that: builds are patched, and a release changes a line far from the
method that is overridden. So files are compared, and everything is left to DeepSpeed where they differ.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path

__all__ = ["READ", "digest", "was_read"]

logger = logging.getLogger("coat_dist")

_FILES = ("runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py", "runtime/utils.py")

READ = {"0.19.8": "bd01c9d9d4a1d1cfc9b19c2c4e5489b6ffc3f2002ca61158e164c0abd190e116"}
"""Of each DeepSpeed version that was read, and that the tests run, the digest of ``_FILES``. To add one: read what
``step*.py`` and ``master_weights.py`` rely on, install that version and run ``tests/coat_dist``."""


def digest() -> str:
    """Of the files of the installed DeepSpeed; "" where it has no source files."""
    import deepspeed

    folder = Path(deepspeed.__file__).parent
    together = hashlib.sha256()
    for name in _FILES:
        try:
            together.update(hashlib.sha256((folder / name).read_bytes()).digest())
        except OSError:
            return ""
    return together.hexdigest()


@functools.cache
def was_read() -> bool:
    """Whether the installed DeepSpeed's ZeRO is one that was read; logged once where it is not."""
    read = digest() in READ.values()
    if not read:
        logger.info(
            "DeepSpeed's ZeRO is not one that was read (%s): all its passes and copies are kept", ", ".join(READ)
        )
    return read
