"""Encoding and decoding of moments on their own, for checkpoints.

There is no kernel: a step decodes and encodes inside its own kernel, so these run only when a checkpoint is converted.
"""

from __future__ import annotations

from ..reference.moments import FIRST_MOMENT_FORMATS, SECOND_MOMENT_FORMATS, Moment, MomentCodec, decode, encode

__all__ = ["FIRST_MOMENT_FORMATS", "SECOND_MOMENT_FORMATS", "Moment", "MomentCodec", "decode", "encode"]
