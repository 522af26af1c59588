"""torch's profiler around chosen steps, and nothing around all others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coat_dist import CoatConfigError

__all__ = ["StepProfiler"]


class StepProfiler:
    """Writes ``trace-steps10-12.json`` into a folder, for chrome://tracing or Perfetto.

    Args:
        steps: first and last step to look at. A run that begins or ends within them has those it did in the trace.
        folder: of the trace.
        active: whether this rank is looked at: rank 0.
    """

    def __init__(self, steps: tuple[int, int], folder: str | os.PathLike, active: bool = True) -> None:
        self._steps, self._folder, self._active = steps, Path(folder), active
        self._profile: Any = None
        self._seen: list[int] = []

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Put this around a step; the trace is written after the last one.

        Raises:
            CoatConfigError: the trace cannot be written.
        """
        if not self._active or not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        if self._profile is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()
        with torch.profiler.record_function(f"step {step}"):
            yield
        self._seen.append(step)
        if step == self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what there is; the run has ended."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        if not self._seen:
            return
        ends = dict.fromkeys((self._seen[0], self._seen[-1]))
        path = self._folder / f"trace-steps{'-'.join(map(str, ends))}.json"
        temporary = path.with_name(f".{path.name}.new.json")
        try:
            profile.export_chrome_trace(str(temporary))
            os.replace(temporary, path)
        except (OSError, RuntimeError) as problem:
            raise CoatConfigError(f"--profile-steps: cannot write {path} ({problem})") from problem
