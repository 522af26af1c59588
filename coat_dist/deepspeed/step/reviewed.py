"""Supported DeepSpeed builds, by file hash.

What is left out of a ZeRO step is right only as long as the rest of DeepSpeed's step does what it
did when it was read. A version number does not show that: builds are patched. Where the files
differ, everything is left to DeepSpeed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path

from ...ranks import rank_and_world

__all__ = ["VERIFIED", "build_hash", "is_verified_build"]

logger = logging.getLogger("coat_dist")

_FILES = ("runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py", "runtime/utils.py")

VERIFIED = {"0.19.8": "bd01c9d9d4a1d1cfc9b19c2c4e5489b6ffc3f2002ca61158e164c0abd190e116"}
"""The hash of ``_FILES`` of each DeepSpeed version that was read and that the tests run. To add
one: read what ``step*.py`` and ``master_weights.py`` rely on, install that version and run
``tests/coat_dist``.
"""


def build_hash() -> str:
    """Hash of the installed DeepSpeed's ``_FILES``."""
    import deepspeed

    folder = Path(deepspeed.__file__).parent
    digests = (hashlib.sha256((folder / name).read_bytes()).digest() for name in _FILES)
    return hashlib.sha256(b"".join(digests)).hexdigest()


@functools.cache
def is_verified_build() -> bool:
    """Whether the installed DeepSpeed's ZeRO is one that was read; rank 0 warns once where it is
    not.
    """
    verified = build_hash() in VERIFIED.values()
    if not verified and rank_and_world()[0] == 0:
        import deepspeed

        logger.warning(
            "DeepSpeed %s is not a verified build (%s): engine.step() keeps all of DeepSpeed's "
            "passes over gradients "
            "and weights and takes 2 to 3.4 times as long; results are the same. docs/support.md "
            "says how to add one",
            deepspeed.__version__,
            ", ".join(VERIFIED),
        )
    return verified
