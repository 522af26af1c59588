"""Two "nodes" on this machine: network namespaces with host names of their own, joined by a wire.

Where namespaces are not allowed, they are two addresses of the loopback device, and ``COAT_HOST``
gives the names. Each node has a folder of its own; a program starts in it, so that a relative path
is on the node's own disk.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .programs import Program

_SPACES = (("user", 0x10000000), ("net", 0x40000000), ("uts", 0x04000000), ("mnt", 0x00020000))
_INTERFACE = "eth0"


@dataclass(frozen=True)
class Node:
    host: str
    address: str
    folder: Path
    """Its own disk."""
    space: int | None
    """A process in its namespaces."""

    @property
    def environment(self) -> dict[str, str]:
        """What a program on it needs besides, to know its host and find its network."""
        if self.space is None:
            return {"COAT_HOST": self.host, "GLOO_SOCKET_IFNAME": "lo"}
        return {"GLOO_SOCKET_IFNAME": _INTERFACE}

    def start(self, arguments: Sequence[str], outputs: Path, **environment: str) -> Program:
        """``python`` with these arguments, on this node, in its folder."""
        whole = {**self.environment, **environment}
        enter = None if self.space is None else spaces(self.space)
        return Program(arguments, outputs, self.folder, enter=enter, **whole)

    def within(self, command: str) -> str:
        """A shell's command that runs ``command`` on this node (of a fake ``pdsh`` or ``srun``)."""
        if self.space is None:
            return f"env COAT_HOST={self.host} {command}"
        return f"nsenter -t {self.space} -U -n -u -m --preserve-credentials {command}"


class Nodes:
    """A context that gives two nodes."""

    def __init__(self, folder: Path, namespaces: bool = True) -> None:
        self._folder, self._namespaces = folder, namespaces
        self._holders: list[subprocess.Popen] = []

    def __enter__(self) -> list[Node]:
        for name in ("a", "b"):
            (self._folder / f"node-{name}").mkdir()
        made = self._namespaces and self._make()
        return [
            Node(
                host=f"node-{name}",
                address=f"10.77.0.{n}" if made else f"127.0.0.{n}",
                folder=self._folder / f"node-{name}",
                space=self._holders[n - 1].pid if made else None,
            )
            for n, name in enumerate("ab", 1)
        ]

    def __exit__(
        self, kind: type | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _make(self) -> bool:
        if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "hostname")):
            return False
        made = self._hold(["unshare", "-r", "-n", "-u", "-m"], "node-a") and self._hold(
            [
                "nsenter",
                "-t",
                str(self._holders[0].pid),
                "-U",
                "--preserve-credentials",
                "unshare",
                "-n",
                "-u",
                "-m",
            ],
            "node-b",
        )
        if made:
            first, second = self._holders
            wire = f"link add {_INTERFACE} type veth peer name {_INTERFACE} netns {second.pid}"
            made = self._run(first, f"ip {wire}") and all(
                self._run(holder, f"ip addr add 10.77.0.{n}/24 dev {_INTERFACE}")
                and self._run(holder, f"ip link set {_INTERFACE} up")
                for n, holder in enumerate(self._holders, 1)
            )
        if not made:
            self.__exit__(None, None, None)
            self._holders.clear()
        return made

    def _hold(self, command: list[str], host: str) -> bool:
        names = self._folder / "hosts"
        names.write_text("127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n")
        steps = [
            f"hostname {host}",
            "ip link set lo up",
            f"mount --bind {names} /etc/hosts",
            "echo ready",
        ]
        script = " && ".join([*steps, "exec sleep 3600"])
        holder = subprocess.Popen(
            [*command, "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        return holder.stdout.readline() == "ready\n"

    @staticmethod
    def _run(holder: subprocess.Popen, command: str) -> bool:
        enter = ["nsenter", "-t", str(holder.pid), "-U", "-n", "--preserve-credentials"]
        return subprocess.run([*enter, *command.split()], capture_output=True).returncode == 0


def spaces(process: int) -> list[tuple[str, int]]:
    """The namespaces of a process, for :func:`enter_spaces`; without the user's where this
    process is in it already.
    """
    return [
        (f"/proc/{process}/ns/{name}", kind)
        for name, kind in _SPACES
        if os.readlink(f"/proc/{process}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    ]


def enter_spaces(paths: Sequence[tuple[str, int]]) -> None:
    """Have this process, which has one thread, continue in these namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor, kind in [(os.open(path, os.O_RDONLY), kind) for path, kind in paths]:
        if libc.setns(descriptor, kind):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
