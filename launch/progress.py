"""Progress of long work with the time that is left: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from tqdm import tqdm

from launch.log_level import shows

__all__ = ["EVERY", "Progress"]

EVERY = 30.0
"""Seconds between two lines where there is no terminal."""


class Progress:
    """How far some work is. On ranks other than 0, and above ``--log-level info``, it says nothing.

    ::

        with Progress(total_bytes, "convert", unit="B") as progress:
            for tensor in tensors:
                ...
                progress.update(tensor.nbytes)

    Args:
        total: amount of work, in ``unit``.
        what: one word for the work.
        unit: "B" for bytes, "doc", "tensor"; amounts are shortened (12.3M).
        initial: done before, by an earlier run; not counted in the rate.
        quiet: say nothing.
        every: seconds between lines where ``stream`` is no terminal. Work that takes less prints none.
        stream: default stderr.
    """

    def __init__(
        self,
        total: int,
        what: str,
        *,
        unit: str = "",
        initial: int = 0,
        quiet: bool = False,
        every: float = EVERY,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._hidden = quiet or not shows("info") or os.environ.get("RANK", "0") != "0"
        self._total, self._what, self._unit, self._every = total, what, unit, every
        self._done = self._initial = initial
        self._began = self._said = time.monotonic()
        self._bar: tqdm | None = None
        if not self._hidden and self._stream.isatty():
            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=what,
                unit=unit or "it",
                unit_scale=True,
                dynamic_ncols=True,
                file=self._stream,
            )

    def update(self, amount: int = 1) -> None:
        """So much more is done."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
        elif not self._hidden and (now := time.monotonic()) - self._said >= self._every:
            self._said = now
            print(self.line(now - self._began), file=self._stream, flush=True)

    def line(self, seconds: float) -> str:
        """What is said after ``seconds``: ``convert: 25 %, 1.00G of 4.00G B, 50.0M B/s, ETA 1:00``."""
        here = self._done - self._initial
        rate = here / seconds if seconds > 0 else 0.0
        left = tqdm.format_interval(max(0, self._total - self._done) / rate) if rate else "unknown"
        space = f" {self._unit}" if self._unit else ""
        share = 100 * self._done // max(self._total, 1)
        return (
            f"{self._what}: {share} %, {tqdm.format_sizeof(self._done)} of {tqdm.format_sizeof(self._total)}{space}, "
            f"{tqdm.format_sizeof(rate)}{space}/s, ETA {left}"
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            self._bar.close()
