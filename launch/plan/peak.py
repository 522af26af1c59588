"""The moment of a step at which most memory is held, found by looking at every one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .run import Run

__all__ = ["Peak", "Timeline"]

_SIDE = ("gradients", "DeepSpeed's reduction")
"""Of DeepSpeed's second stream."""


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held."""

    moment: str
    held: dict[str, int]
    """Bytes by what they are for; the sum is what torch has allocated."""
    reserved: int
    """What torch's allocator needs for it: each stream's own peak."""
    other_peaks: dict[str, int]
    """The largest sum of other phases: forward, backward, step, building the engine."""

    @property
    def allocated(self) -> int:
        return sum(self.held.values())


class Timeline:
    def __init__(self, run: Run) -> None:
        own_stream = run.overlap and not run.fp32_gradients_whole
        self.side = _SIDE if own_stream and run.stage == 2 else _SIDE[1:] if own_stream else ()
        self.held: Counter[str] = Counter()
        self.at: dict[str, int] = {}
        self.moment, self.main, self.aside = "", 0, 0
        self.phases: Counter[str] = Counter()

    def look(self, phase: str, moment: str, **temporary: int) -> None:
        """Note this moment if nothing larger has been seen; ``temporary`` is held at it alone."""
        now = self.held + Counter({key.replace("_", " "): size for key, size in temporary.items() if size > 0})
        if "reduction" in now:
            now["DeepSpeed's reduction"] = now.pop("reduction")
        total = sum(now.values())
        aside = sum(now[key] for key in self.side)
        self.main, self.aside = max(self.main, total - aside), max(self.aside, aside)
        self.phases[phase] = max(self.phases[phase], total)
        if total > sum(self.at.values()):
            self.at, self.moment = {k: v for k, v in now.items() if v}, f"{phase}: {moment}"
