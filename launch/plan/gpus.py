"""GPUs by name: how much memory a program finds on them, and the rates that a step's time is made
of.

Rates were measured on one H200 and, for kernels that pass over tensors, one H100
(`docs/results.md`); those of other GPUs follow from it by the ratio of their data sheets' numbers,
and are marked so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["GPUS", "GPU", "find_gpu", "memory_bytes"]

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


@dataclass(frozen=True)
class GPU:
    """One kind of GPU."""

    name: str
    memory: int  # bytes that the driver reports, which are less than the name says
    bf16: float  # operations a second of matrix products
    fp8: float  # the same of FP8; of a GPU without them, those of BF16
    attention: float  # operations a second of causal attention, forward and backward together
    copy: float  # bytes a second, read plus written
    passes: float
    """The same of the flow's and the optimizer's kernels that pass over tensors, as though all were
    copies. An H200's arithmetic bounds some of them, not its memory: an H100, with the same
    arithmetic, is closer than by its memory.
    """
    link: float  # bytes a second at which a rank gathers or scatters, within a host
    measured: bool = False
    other: int | None = None  # bytes that are not torch's, where that is known
    in_use: int = 0  # bytes that other programs have taken

    def but(self, **changes: Any) -> GPU:
        """This GPU with other values."""
        return replace(self, **changes)


def _like(
    name: str, gib: float, bf16: float, fp8: float, copy: float, link: float, passes: float = 0.0
) -> GPU:
    """Rates in proportion to an H200's data sheet: 989 and 1979 TFLOP/s, 4.8 TB/s, 900 GB/s;
    ``passes`` as measured.
    """
    copies, products = 4.27e12 * copy / 4.8, 660e12 * bf16 / 989
    codes = 1250e12 * fp8 / 1979 if fp8 else products
    memory, attention = int(gib * 2**30), 480e12 * bf16 / 989
    return GPU(
        name,
        memory,
        products,
        codes,
        attention,
        copies,
        passes or copies,
        400e9 * link / 900,
        bool(passes),
    )


GPUS = {
    one.name: one
    for one in (
        GPU("h200", int(139.8 * 2**30), 660e12, 1250e12, 480e12, 4.27e12, 4.27e12, 400e9, True),
        _like("h100", 79.1, 989, 1979, 3.35, 900, 3.33e12),
        _like("h100-pcie", 79.1, 756, 1513, 2.0, 64),
        _like("h100-nvl", 93.5, 835, 1671, 3.9, 600),
        _like("h20", 95.0, 148, 296, 4.0, 900),
        _like("gh200", 94.5, 989, 1979, 4.0, 900),
        _like("b200", 178.3, 2250, 4500, 8.0, 1800),
        _like("a100", 79.1, 312, 0, 2.0, 600),
        _like("a100-40", 39.4, 312, 0, 1.55, 600),
        _like("l40s", 44.3, 362, 733, 0.86, 32),
        _like("rtx4090", 23.5, 165, 330, 1.0, 32),
    )
}


def find_gpu(name: str) -> GPU:
    """The GPU of the table that ``name`` means, which may be torch's name; CoatConfigError lists
    the known ones.
    """
    text = re.sub(r"rtx\W", "rtx", name.lower())
    for key in sorted(GPUS, key=len, reverse=True):  # an "h100-pcie" is an "h100", too
        if all(re.search(rf"(?<![a-z0-9]){part}(?!\d)", text) for part in key.split("-")):
            return GPUS[key]
    from coat_dist import CoatConfigError  # late: it imports torch

    raise CoatConfigError(
        f"--gpu: got {name!r}, accepted: {', '.join(GPUS)} (or --gpu-memory alone)"
    )


def memory_bytes(text: str, option: str = "--gpu-memory") -> int:
    """Bytes of "80GiB", "80GB", "80g" (10^9) or "85899345920"; CoatConfigError names ``option``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        from coat_dist import CoatConfigError

        raise CoatConfigError(f"{option}: got {text!r}, accepted: a size such as 80GiB or 141GB")
    return int(float(found[1]) * _UNITS[found[2]])
