"""Which conversations of ``--data`` are held out: by what they hold, in whatever order their files are given."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.chat.store import Conversations

__all__ = ["check_kept", "hold_out"]


def hold_out(conversations: Conversations, share: float, seed: int) -> tuple[np.ndarray, str | None]:
    """Numbers of the held-out conversations, ascending, and a digest of what they hold (None of none).

    They are those of the smallest hashes of ids, trained places and seed: a draw at random that does not depend on the
    order of files and lines. Copies of what is held out are held out, too, and may make it more than its share.

    Raises:
        CoatConfigError: ``share`` of one conversation would leave nothing to train on.
    """
    count = len(conversations)
    wanted = min(math.ceil(share * count), count - 1)
    if not wanted:
        if share:
            raise CoatConfigError(f"--valid-share: got {share} of {count} conversation, accepted: 0")
        return np.arange(0), None
    key = hashlib.sha256(str(seed).encode()).digest()
    marks = np.asarray([_mark(*conversations[number], key) for number in range(count)], np.uint64)
    chosen = np.flatnonzero(marks <= np.sort(marks)[wanted - 1])
    if len(chosen) == count:  # all that would be left are copies of what is held out
        chosen = np.sort(np.argsort(marks, kind="stable")[:wanted])
    return chosen, hashlib.sha256(np.sort(marks[chosen]).tobytes()).hexdigest()


def _mark(ids: np.ndarray, learnt: np.ndarray, key: bytes) -> int:
    made = hashlib.blake2b(ids.tobytes(), digest_size=8, key=key)
    made.update(learnt.tobytes())
    return int.from_bytes(made.digest(), "big")


def check_kept(source: Path, earlier: Mapping[str, Any], share: float, digest: str | None) -> None:
    """Refuse to evaluate what the run that is continued has trained on.

    Args:
        source: the checkpoint.
        earlier: what its run says of its data.
        share: ``--valid-share``.
        digest: of what is held out now; None = nothing of ``--data`` is.

    Raises:
        CheckpointError: other conversations are held out now than were before.
    """
    if digest is None or earlier.get("held_out") == digest:
        return
    by_place = "held_out" not in earlier and earlier.get("valid_share")
    why = " (it is of a release that chose them by their places in the files)" if by_place else ""
    same = "" if why else "; or its --data, --tokenizer, --chat-template, --seq-length, --valid-share and --seed"
    raise CheckpointError(
        f"--valid-share: got {share}, which holds out other conversations than {source} does{why}: it may have trained "
        f"on some of them, accepted: --valid FILE, or --valid-share 0{same}"
    )
