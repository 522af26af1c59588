"""Progress of long work with the time that is left: a bar on a terminal, a line now and then
elsewhere.
"""

from __future__ import annotations

import os
import sys

from tqdm import tqdm

from launch.common.log_level import shows

_SECONDS = 30.0
"""Between two lines where there is no terminal."""
_LINE = "{desc}: {percentage:.0f} %, {n_fmt} of {total_fmt} {unit}, {rate_fmt}, ETA {remaining}"


class Progress(tqdm):
    """tqdm's bar on rank 0, with ``update(amount)``. Above ``--log-level info`` it prints nothing.

    Args:
        total: amount of work, in ``unit``.
        what: one word for the work.
        unit: "B" for bytes, "doc", "tensor"; amounts are shortened (12.3M).
        initial: done before, by an earlier run; not counted in the rate.
    """

    def __init__(self, total: int, what: str, *, unit: str = "it", initial: int = 0) -> None:
        self._bar = sys.stderr.isatty()
        lines = dict(
            mininterval=_SECONDS,
            delay=_SECONDS,
            miniters=1,
            smoothing=0,
            leave=False,
            bar_format=_LINE,
        )
        super().__init__(
            total=total,
            desc=what,
            unit=unit,
            initial=initial,
            unit_scale=True,
            file=sys.stderr,
            disable=not shows("info") or os.environ.get("RANK", "0") != "0",
            dynamic_ncols=self._bar,
            **({} if self._bar else lines),
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Print the bar, or where there is no terminal a line."""
        if self._bar:
            return super().display(msg, pos)
        if msg is None:
            print(self, file=self.fp, flush=True)
        return False
