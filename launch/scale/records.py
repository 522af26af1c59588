"""``measured.json``: what was measured, written after every measurement, so that a run that was cut goes on there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, write_text

__all__ = ["FILE", "Records", "read"]

FILE = "measured.json"
_FORMAT = 1


class Records:
    """Measurements of one kind of run, in a folder.

    Args:
        identity: plain values that say what is measured, and on what.
        fresh: drop what is there.

    Raises:
        CoatConfigError: the folder holds those of another run, or cannot be written.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any], fresh: bool = False) -> None:
        self.path = Path(folder) / FILE
        self.identity = json.loads(json.dumps(identity))
        self.found: list[dict[str, Any]] = []
        try:
            make_folder(self.path.parent)
            if self.path.exists() and not fresh:
                there = _parsed(folder, "--output")
                keys = {**there["identity"], **self.identity}
                if differing := [k for k in keys if there["identity"].get(k) != self.identity.get(k)]:
                    raise CoatConfigError(
                        f"--output: got {folder}, which holds measurements with another {', '.join(differing)}, "
                        "accepted: another folder, or --overwrite"
                    )
                self.found = there["records"]
            self._write()
        except OSError as problem:
            raise CoatConfigError(f"--output: got {folder}, accepted: a folder to write to ({problem})") from None

    def done(self, key: Mapping[str, Any]) -> bool:
        """Whether this was measured, and did not fail."""
        wanted = json.loads(json.dumps(key))
        return any(one["key"] == wanted and "failed" not in one for one in self.found)

    def add(self, key: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Keep a measurement in place of an earlier one, also with other steps or sizes; on disk when this returns.

        One that failed takes no good one's place.
        """
        wanted = json.loads(json.dumps(key))
        stays = lambda one: "failed" in record and "failed" not in one  # noqa: E731
        self.found = [one for one in self.found if stays(one) or not _same(one["key"], wanted)]
        self.found.append({"key": wanted, **record})
        self._write()

    def _write(self) -> None:
        write_text(
            self.path, json.dumps({"format": _FORMAT, "identity": self.identity, "records": self.found}, indent=1)
        )


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two keys are of the same measurement, however long it was."""
    return all(one.get(name) == other.get(name) for name in ("what", "variant", "group"))


def read(folder: str | Path) -> dict[str, Any]:
    """What a folder holds, for ``--measured``.

    Raises:
        CoatConfigError: no such file, or a damaged one.
    """
    return _parsed(folder, "--measured")


def _parsed(folder: str | Path, option: str) -> dict[str, Any]:
    path = Path(folder) / FILE
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
        if there["format"] != _FORMAT or not isinstance(there["records"], list):
            raise ValueError(f"format {there['format']}")
        for one in there["records"]:
            _ = one["key"]["what"], one["ranks"], one["a_node"]
        _ = there["identity"].items()
    except OSError as problem:
        raise CoatConfigError(
            f"{option}: got {folder}, accepted: a folder in which scaling.py has written {FILE} ({problem.strerror})"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CoatConfigError(
            f"{option}: {path} is no whole {FILE}, accepted: one that scaling.py has written"
        ) from None
    return there
