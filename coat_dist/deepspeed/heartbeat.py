"""Ranks that tell one another that they are alive, so that a rank that hangs is named and does not keep the others.

A rank that is stopped, swapped out or dead lets the others wait in a collective until its timeout; what they say then
is which collective it was, not who did not come. Here a thread of each rank sends a datagram to its neighbours every
few seconds. A rank whose datagrams stop for :data:`SHARE` of the timeout of torch.distributed's default group is named
on every rank, in one line, and the processes end with status :data:`STATUS`, before the collective gives up.

Datagrams, and not torch.distributed's store: the store is held by a process that may itself be the one that hangs, and
a client of a store that has gone away writes warnings at every normal end of a run. A neighbour counts only once a
datagram of it has come, so that a network that lets none through switches this off and ends nothing.

What goes on in a rank that only works for long, in an evaluation or a save, does not matter: the thread goes on sending
while Python runs or waits. Silence is counted in the thread's own ticks, so that ranks that were suspended together, or
one that could not run for a while itself, do not take the pause for the others' silence.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import nodes
from ..ranks import gather, rank_and_world, tell_torchrun
from .timeouts import group_timeout

__all__ = ["SHARE", "STATUS", "Heartbeat", "group_timeout", "running", "start"]

SHARE = 0.8
"""Of the timeout of collectives: after so long a silence a rank counts as hung."""
STATUS = 4
"""Exit status of the ranks that have waited for one that hangs."""
SHORTEST = 5.0
"""Seconds; shorter silences end nothing, however short the timeout is."""
NEIGHBOURS = 64
"""Up to so many others hear of a rank."""
LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(threading.__file__).parent, Path(dist.__file__).parents[2], Path(__file__).parents[1])
)
"""Where frames are not the program's: Python's own library, what is installed beside torch, and coat_dist."""
_COLLECTIVES = f"{Path(dist.__file__).parent}{os.sep}"

_running: Heartbeat | None = None


def running() -> Heartbeat | None:
    """This process's thread, if it sends."""
    return None if _running is None or _running.ended else _running


def start(engine: Any = None) -> None:
    """Begin to send and to listen, if there are other ranks; of a second engine only the steps are told, too.

    Without an engine there are no steps to tell yet: for what a program does before it builds one. A collective.
    ``COAT_HEARTBEAT=0`` in the environment of all ranks leaves it out.
    """
    global _running
    rank, world = rank_and_world()
    if world == 1 or os.environ.get("COAT_HEARTBEAT") == "0":
        return
    group = dist.group.WORLD
    if _running is not None and _running.group() is group and not _running.ended:
        _running.add(engine)
        return
    if _running is not None:
        _running.stop()
    _running = Heartbeat(rank, world, group_timeout(), group)
    _running.add(engine)
    atexit.register(_running.stop)
    _running.start()


class Heartbeat(threading.Thread):
    """One rank's thread; making one is a collective."""

    def __init__(
        self, rank: int, world: int, timeout: float, group: Any, end: Callable[[str], None] | None = None
    ) -> None:
        """``end`` is called with the line instead of ending the process (tests)."""
        super().__init__(name="coat_dist heartbeat", daemon=True)
        self.rank, self.world, self.timeout, self.group = rank, world, timeout, weakref.ref(group)
        self.limit = max(SHARE * timeout, SHORTEST)
        self.interval = min(10.0, self.limit / 16)
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ended = False
        self._end = end or _end_process
        self._stop_now = threading.Event()
        self._socket, everyone, self._token = _meet()
        self._addresses = {r: (host, port) for r, (_, host, port) in enumerate(everyone) if r != rank}
        self._hosts = [name for name, _, _ in everyone]
        distances = range(1, min(NEIGHBOURS, world - 1) + 1)
        self._listeners = [(rank - d) % world for d in distances]
        self._heard: dict[int, dict[str, Any]] = {}
        self._silent: dict[int, float] = {}
        self._left: set[int] = set()
        self._answers: dict[int, dict[str, Any]] = {}
        self._asks = False
        self._step, self._standing, self._noted = -1, 0.0, False

    def add(self, engine: Any) -> None:
        """Tell the steps of this engine, too; None is no engine."""
        if engine is not None:
            self.engines.add(engine)

    def run(self) -> None:
        """Send, listen, judge, until :meth:`stop` or the end of the process group."""
        tick = time.monotonic()
        try:
            while not self._stop_now.is_set() and dist.is_initialized():
                self._send(self._state())
                self._listen(tick + self.interval)
                now = time.monotonic()
                passed, tick = min(now - tick, 2 * self.interval), now
                self._judge(passed)
        finally:  # whatever ends this thread, the others must not take it for the end of the rank
            for _ in range(3):  # a datagram may get lost
                self._send({"left": True})
            self.ended = True
            self._socket.close()

    def stop(self) -> None:
        """Tell the others that this rank leaves, and that it is no longer to be waited for."""
        if self.is_alive():
            self._stop_now.set()
            self._tell([self.rank], {"wake": True})
            self.join(1.0)

    def ask(self, seconds: float) -> dict[int, dict[str, Any] | None]:
        """Ask all others at once where they are, and wait so long; None of one that neither answers nor has left."""
        self._answers, self._asks = {}, True
        end = time.monotonic() + seconds
        while (open_ := self._addresses.keys() - self._answers.keys() - self._left) and time.monotonic() < end:
            self._tell(open_, {"ask": True})  # again: a datagram may get lost
            time.sleep(min(0.25, seconds))
        return {rank: self._answers.get(rank) for rank in sorted(self._addresses.keys() - self._left)}

    def host(self, rank: int) -> str:
        """Where a rank runs."""
        return self._hosts[rank]

    def _state(self) -> dict[str, Any]:
        step = max((engine.global_steps for engine in list(self.engines)), default=0)
        return {"step": step, "place": _place(), "waits": self._asks or _waits()}

    def _send(self, message: dict[str, Any]) -> None:
        self._tell(self._listeners, message)

    def _tell(self, ranks: Any, message: dict[str, Any]) -> None:
        data = json.dumps({"token": self._token, "rank": self.rank, **message}).encode()
        for rank in ranks:
            with suppress(
                OSError
            ):  # of one that has gone, whose silence is judged; or our socket, closed by the thread
                address = self._socket.getsockname() if rank == self.rank else self._addresses[rank]
                self._socket.sendto(data, address)

    def _listen(self, until: float) -> None:
        while not self._stop_now.is_set() and (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                message = json.loads(self._socket.recv(4096))
            except (OSError, ValueError, RecursionError):  # a stranger may send what it likes
                continue
            if not isinstance(message, dict) or message.get("token") != self._token:
                continue
            sender = message["rank"]
            if "hung" in message and sender != self.rank:
                self._finish(message["hung"], sender, relay=False)
            elif message.get("left"):
                self._heard.pop(sender, None)
                self._left.add(sender)
            elif message.get("ask"):
                self._tell([sender], {"answer": True, **self._state()})
            elif message.get("answer"):
                self._answers[sender] = message
            elif sender != self.rank:
                self._heard[sender], self._silent[sender] = message, 0.0

    def _judge(self, passed: float) -> None:
        mine = self._state()
        for rank in self._heard:
            self._silent[rank] += passed
        hung = sorted(rank for rank in self._heard if self._silent[rank] > self.limit)
        if hung:
            self._finish({r: [self._heard[r]["step"], self._hosts[r], self._heard[r]["place"]] for r in hung})
        self._standing = self._standing + passed if mine["step"] == self._step else 0.0
        self._noted = self._noted and self._standing > 0
        self._step = mine["step"]
        if self._standing > self.limit and not self._noted and self.rank < min(self._heard, default=self.world):
            self._note(mine)

    def _note(self, mine: dict[str, Any]) -> None:
        """Say, once, where ranks are that all are alive but have made no step, if they are at different places."""
        self._noted = True
        states = {self.rank: mine, **self._heard}
        if len({(s["step"], *re.split(r":\d+ ", s["place"])) for s in states.values()}) > 1:  # the line may differ
            told = sorted(states.items())[:16]
            where = "; ".join(f"rank {r} after step {s['step']} at {s['place']}" for r, s in told)
            _write(f"note: all ranks answer, but there was no step for {self._standing:.0f} s: {where}")

    def _finish(self, hung: dict[Any, list[Any]], told_by: int | None = None, relay: bool = True) -> None:
        if relay:
            self._tell(self._addresses, {"hung": hung})
        names = [f"rank {r} ({host}; after step {step} at {place})" for r, (step, host, place) in hung.items()]
        mine = self._state()
        self._end(
            f"error: {', '.join(names)} has not answered for {self.limit:.0f} s of the {self.timeout:.0f} s that "
            f"collectives wait; rank {self.rank} ends after step {mine['step']} at {mine['place']}"
            + (f" (seen by rank {told_by})" if told_by is not None else "")
        )


def _meet() -> tuple[socket.socket, list[tuple[str, str, int]], str]:
    """This rank's socket, of every rank the name of its host and where datagrams reach it, and a secret of this run."""
    mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    mine.bind(("", 0))
    name, port = nodes.host(), mine.getsockname()[1]
    token = secrets.token_hex(16)
    everyone = gather((name, _address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")), port, token))
    token = everyone[0][3]
    if len({host for host, *_ in everyone}) == 1:
        return mine, [(host, "127.0.0.1", at) for host, _, at, _ in everyone], token
    # The name of rank 0's host may lead that host to its loopback. Ask for the way to any other host instead.
    others = [at for host, at, *_ in everyone if host != name and not at.startswith("127.")]
    own = everyone[rank_and_world()[0]][1]
    if own.startswith("127.") and others:
        own = _address_towards(others[0])
    return mine, gather((name, own, port)), token


def _address_towards(host: str) -> str:
    """This host's address on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((host, 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return s.getsockname()[0]


def _place() -> str:
    """Where the main thread is: file, line and function of the program, not of the libraries that it has called."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _waits() -> bool:
    """Whether the main thread is in a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        if frame.f_code.co_filename.startswith(_COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def _write(line: str) -> None:
    """To stderr, past Python's own file, whose lock the main thread may hold."""
    os.write(2, f"{line}\n".encode())


def _end_process(line: str) -> None:
    _write(line)
    tell_torchrun(line)
    os._exit(STATUS)
