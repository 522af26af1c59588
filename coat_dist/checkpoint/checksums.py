"""CRC-32 of a file from those of its parts, so that bytes whose checksum is known are not summed again."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path

__all__ = ["join", "stored_records"]

_POLYNOMIAL = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23
"""The polynomials 1 and x^8: in a CRC-32 the highest bit is the coefficient of x^0."""


def join(first: int, second: int, length: int) -> int:
    """CRC-32 of two pieces, one behind the other.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second.
        length: of the second, bytes.
    """
    return _product(_zeros(length), first) ^ second


@functools.lru_cache(1024)
def _zeros(length: int) -> int:
    """x^(8 * length): multiplying a CRC-32 by it counts ``length`` zero bytes behind what was summed."""
    power, square = _ONE, _X8
    while length:
        if length & 1:
            power = _product(power, square)
        square = _product(square, square)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Of two polynomials over GF(2), modulo CRC-32's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def stored_records(path: Path) -> dict[int, tuple[int, int]]:
    """Bytes and CRC-32 of the records of a zip file that are not compressed, as its directory has them, by the place
    in the file at which a record's data begin.

    Raises:
        OSError, zipfile.BadZipFile: it cannot be read, or is no zip file.
    """
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for record in archive.infolist():
            if record.compress_type == zipfile.ZIP_STORED:
                file.seek(record.header_offset + 26)  # lengths of name and of the field behind it
                lengths = file.read(4)
                start = record.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
                found[start] = (record.file_size, record.CRC)
    return found
