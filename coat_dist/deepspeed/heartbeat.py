"""Heartbeats between ranks: a rank that hangs or has ended is named, and does not keep the others
waiting.

torch.distributed reports which collective timed out, not which rank was absent;
``monitored_barrier`` exists under gloo only. Here a thread of each rank sends the others a UDP
datagram every few seconds. A rank that is silent for :data:`SHARE` of the collectives' timeout is
named on every rank, and the processes exit with status :data:`STATUS`. :func:`who` asks at once,
where a collective has failed first.

Not torch.distributed's store: the process that holds it may be the one that hangs. A rank counts
from its first datagram on, so a network without UDP ends nothing. The thread sends while Python
runs or waits, as in long evaluations. Silence is counted in the thread's own ticks, so ranks that
were suspended together continue together.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import nodes
from ..ranks import gather, of_another_rank, rank_and_world, tell_torchrun

SHARE = 0.8  # silence after which a rank counts as hung, as a share of the collectives' timeout
STATUS = 4  # exit status of the other ranks
SHORTEST = 5.0  # seconds of silence that end nothing, however short the timeout is
PATIENCE = 1.0  # seconds in which a rank that is alive answers `who`
NEIGHBOURS = 64  # maximum number of ranks that a rank sends heartbeats to
# Folders whose frames are not the program's: Python's library, site-packages and coat_dist.
_FOLDERS = (
    Path(threading.__file__).parent,
    Path(dist.__file__).parents[2],
    Path(__file__).parents[1],
)
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
_COLLECTIVES = f"{Path(dist.__file__).parent}{os.sep}"

_running: Heartbeat | None = None
_hook: Callable[..., Any] | None = None


def start(engine: Any = None) -> None:
    """Start this rank's thread, if there are other ranks, and report the steps of ``engine``. A
    collective.

    Collectives of all groups then wait as long as those of the default group, and a program that
    ends with an error of a collective names the rank below its traceback. ``COAT_HEARTBEAT=0`` on
    all ranks turns the thread off.
    """
    global _running, _hook
    rank, world = rank_and_world()
    if world > 1:
        _follow_default_group()
    if world == 1 or os.environ.get("COAT_HEARTBEAT") == "0":
        return
    if _running is None or not _running.is_alive():
        _running = Heartbeat(rank, world, group_timeout())
        atexit.register(_running.stop)
    if engine is not None:
        _running.engines.add(engine)
    if not _running.is_alive():
        _running.start()
    if sys.excepthook is not _name_after_traceback:
        _hook, sys.excepthook = sys.excepthook, _name_after_traceback


def who() -> tuple[str, bool] | None:
    """The ranks because of which a collective failed, and whether this is the lowest rank that is
    alive.

    None where no rank can be named: no thread runs, or every other rank is in a collective.
    """
    beats = _running
    if beats is None or not beats.is_alive():
        return None
    silent, others = beats.ask(PATIENCE)
    first = all(rank > beats.rank for rank in others.keys() - silent)
    found = [
        f"rank {rank} ({beats.hosts[rank]}) has ended or does not answer" for rank in silent
    ] or [
        f"{beats.describe(rank, state)} did not come"
        for rank, state in others.items()
        if not state["waits"]
    ]
    return (", ".join(found), first) if found else None


def _name_after_traceback(kind: type[BaseException], problem: BaseException, trace: Any) -> None:
    assert _hook is not None
    _hook(kind, problem, trace)
    if isinstance(problem, Exception) and of_another_rank(problem) and (found := who()) is not None:
        _write(f"error: a collective failed, because {found[0]}")
        tell_torchrun(f"error: a collective failed, because {found[0]}")


class Heartbeat(threading.Thread):
    """One rank's thread; the constructor is a collective."""

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        super().__init__(name="coat_dist heartbeat", daemon=True)
        self.rank, self.timeout = rank, timeout
        self.limit = max(SHARE * timeout, SHORTEST)
        self.interval = min(10.0, self.limit / 16)
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._socket, self.hosts, self._addresses, self._token = _meet()
        self._others = [(rank - d) % world for d in range(1, world)]
        self._stopped, self._asked = threading.Event(), False
        self._heard: dict[int, dict[str, Any]] = {}  # state of each rank that has not left
        self._silent: dict[int, float] = {}  # seconds
        self._answered: set[int] = set()
        self._left: set[int] = set()
        self._step, self._standing = -1, 0.0

    def run(self) -> None:
        """Send, listen and judge until :meth:`stop` or the end of the process group."""
        tick = time.monotonic()
        try:
            while not self._stopped.is_set() and dist.is_initialized():
                self._send(self._others[:NEIGHBOURS], **self._state())
                self._listen(tick + self.interval)
                now = time.monotonic()
                passed, tick = min(now - tick, 2 * self.interval), now
                self._judge(passed)
        finally:  # an error of this thread must not look like a hang of the rank
            self.stop()

    def stop(self) -> None:
        """Announce to the other ranks that this one leaves."""
        self._stopped.set()
        for _ in range(3):  # a datagram may get lost
            self._send(self._others)

    def ask(self, seconds: float) -> tuple[list[int], dict[int, dict[str, Any]]]:
        """Ask the others where they are: the ranks that do not answer within ``seconds``, and
        the state of all.
        """
        self._asked, end = True, time.monotonic() + seconds
        self._answered.clear()
        while (silent := sorted(self._heard.keys() - self._answered)) and time.monotonic() < end:
            self._send(silent, ask=True, **self._state())
            time.sleep(min(0.25, seconds))
        return silent, dict(sorted(self._heard.items()))

    def describe(self, rank: int, state: dict[str, Any]) -> str:
        """A rank, its host and where it is."""
        return f"rank {rank} ({self.hosts[rank]}; after step {state['step']} at {state['place']})"

    def _state(self) -> dict[str, Any]:
        step = max((engine.global_steps for engine in list(self.engines)), default=0)
        place, waits = _place()
        return {"step": step, "place": place, "waits": waits or self._asked}

    def _send(self, ranks: Iterable[int], **message: Any) -> None:
        data = self._token + json.dumps({"rank": self.rank, **message}).encode()
        for rank in ranks:
            with suppress(OSError):  # the silence of a host that has gone is judged
                self._socket.sendto(data, self._addresses[rank])

    def _listen(self, until: float) -> None:
        while not self._stopped.is_set() and (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with suppress(TimeoutError):
                data = self._socket.recv(65536)
                if data.startswith(self._token):
                    self._hear(**json.loads(data[len(self._token) :]))

    def _hear(self, rank: int, ask: bool = False, hung: str | None = None, **state: Any) -> None:
        if hung is not None:
            self._finish(hung)
        elif not state:
            self._left.add(rank)
            self._heard.pop(rank, None)
        elif rank not in self._left:
            self._heard[rank], self._silent[rank] = state, 0.0
            self._answered.add(rank)
            if ask:
                self._send([rank], **self._state())

    def _judge(self, passed: float) -> None:
        for rank in self._heard:
            self._silent[rank] += passed
        if hung := sorted(rank for rank in self._heard if self._silent[rank] > self.limit):
            names = ", ".join(self.describe(rank, self._heard[rank]) for rank in hung)
            self._send(self._others, hung=names)  # also those that are not its neighbours
            return self._finish(names)
        states = {self.rank: self._state(), **self._heard}
        before = self._standing if states[self.rank]["step"] == self._step else 0.0
        self._step, self._standing = states[self.rank]["step"], before + passed
        places = {(state["step"], state["place"]) for state in states.values()}
        if before <= self.limit < self._standing and len(places) > 1 and self.rank == min(states):
            where = ", ".join(
                self.describe(rank, state) for rank, state in sorted(states.items())[:16]
            )
            _write(
                f"note: all ranks answer, but there was no step for {self._standing:.0f} s: {where}"
            )

    def _finish(self, names: str) -> None:
        mine = self._state()
        line = (
            f"error: {names} has not answered for {self.limit:.0f} s of the {self.timeout:.0f} "
            "s that collectives "
        )
        line += f"wait; rank {self.rank} ends after step {mine['step']} at {mine['place']}"
        _write(line)
        tell_torchrun(line)
        time.sleep(0.2)  # until the others have read it: this exit closes their connections
        os._exit(STATUS)


def _meet() -> tuple[socket.socket, list[str], list[tuple[str, int]], bytes]:
    """This rank's socket; of every rank its host's name and its address; a secret of this run."""
    mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    mine.bind(("", 0))
    master, towards = "127.0.0.1", "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        master = socket.gethostbyname(os.environ.get("MASTER_ADDR", master))
        probe.connect((master, 9))  # sends nothing
        towards = probe.getsockname()[0]
    everyone = gather((nodes.host(), towards, mine.getsockname()[1], secrets.token_hex(16)))
    hosts = [host for host, *_ in everyone]
    one, token = len(set(hosts)) == 1, everyone[0][3].encode()
    # On the host of rank 0 the way to MASTER_ADDR may be the loopback; the others reach that host
    # at MASTER_ADDR.
    local = "127.0.0.1" if one else master
    return (
        mine,
        hosts,
        [(local if one or at.startswith("127.") else at, port) for _, at, port, _ in everyone],
        token,
    )


def _place() -> tuple[str, bool]:
    """File, line and function of the program, not of libraries, where the main thread is;
    whether in a collective.
    """
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = False
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        waits = waits or frame.f_code.co_filename.startswith(_COLLECTIVES)
        frame = frame.f_back
    if (frame := frame or innermost) is None:
        return "its end", waits
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}", waits


def _write(line: str) -> None:
    """To stderr, not through Python's file, whose lock the main thread may hold."""
    os.write(2, f"{line}\n".encode())


def group_timeout(group: Any = None) -> float:
    """Seconds after which collectives of a group (None: the default one) fail."""
    group = group or dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return options._timeout.total_seconds()
    return dist.distributed_c10d.default_pg_timeout.total_seconds()


def _follow_default_group() -> None:
    """Give groups of DeepSpeed and Megatron that have a default timeout that of the default group:
    a rank that does not come would keep the others that long. Any other timeout was chosen, and
    stays.
    """
    c10d: Any = dist.distributed_c10d
    wanted = group_timeout()
    # torch's, of NCCL, and Megatron's.
    defaults = {c10d.default_pg_timeout.total_seconds(), 600.0, 1800.0}
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD and group_timeout(group) in defaults - {wanted}:
            with suppress(RuntimeError, ValueError):  # a backend without timeouts
                c10d._set_pg_timeout(timedelta(seconds=wanted), group)
