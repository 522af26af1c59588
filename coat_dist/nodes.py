"""Which host and which node each rank is on. A node is what one launcher process, or SLURM's
daemon, has started.

Ranks of one node have the local disks of one machine. Hosts are names for readers: two nodes may
have the same one, as containers and tests do.
"""

from __future__ import annotations

import os
import random
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = [
    "Place",
    "by_node",
    "free_port",
    "host",
    "host_of",
    "meet",
    "my_place",
    "say_host",
]
__all__ += ["several_nodes"]

_NODE = ("GROUP_RANK", "CROSS_RANK", "SLURM_NODEID")
"""The number of this node: of torchrun, DeepSpeed and SLURM."""
_PORTS = range(20000, 32000)
"""Below those that systems give to outgoing connections (Linux: from 32768)."""

_met: tuple[Any, list[Place]] | None = None
"""A weak reference to the process group whose ranks have met, and where they are."""


class Place(NamedTuple):
    """Where one rank is."""

    host: str
    node: str | None  # the launcher's number of the node, if it says one
    local: int  # the rank's number on its node


def host() -> str:
    """The name of this host; ``COAT_HOST`` in the environment replaces it."""
    return os.environ.get("COAT_HOST") or socket.gethostname()


def free_port() -> int:
    """An unused TCP port of this host, for ranks that are about to start.

    The system's own choice (port 0) may be given to some connection again before rank 0, still
    importing, listens.
    """
    # The program's own random numbers stay as they were.
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    raise OSError(f"no free port: tried 200 of {_PORTS.start} to {_PORTS.stop - 1}")


def several_nodes() -> bool:
    """Whether the launcher has told this rank of ranks on other nodes."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    world = os.environ.get("WORLD_SIZE", "1")
    return bool(here) and here != world


def my_place() -> Place:
    """Where the launcher has started this rank."""
    node = next((os.environ[name] for name in _NODE if name in os.environ), None)
    return Place(host(), node, int(os.environ.get("LOCAL_RANK", "0")))


def by_node(places: Sequence[Place]) -> list[list[int]]:
    """Ranks of each node, in the order of its first rank.

    Where launchers give no numbers, a second rank with the same local number on a host begins
    another node.
    """
    nodes: dict[Any, list[int]] = {}
    seen: dict[tuple[str, int], int] = {}
    for rank, place in enumerate(places):
        again = seen[place.host, place.local] = seen.get((place.host, place.local), -1) + 1
        nodes.setdefault((place.host, again if place.node is None else place.node), []).append(rank)
    return list(nodes.values())


def meet(places: list[Place]) -> None:
    """Keep where all ranks of the default process group are, for messages."""
    global _met
    group = dist.group.WORLD
    _met = None if group is None else (weakref.ref(group), places)


def host_of(rank: int) -> str | None:
    """The host of a rank; None where all ranks are on one node, or have not met."""
    if _met is None or not dist.is_initialized() or _met[0]() is not dist.group.WORLD:
        return None
    return _met[1][rank].host if rank < len(_met[1]) and len(by_node(_met[1])) > 1 else None


def say_host(rank: int) -> str:
    """`` (host b)``, to be put behind a rank's number; nothing where :func:`host_of` is None."""
    return f" (host {where})" if (where := host_of(rank)) else ""
