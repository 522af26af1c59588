"""Programs without the seconds that their imports take: forked from the server of ranks, which has
imported it all.

A launcher that is started so forks in turn what it starts. All are processes of their own, with
signals, sessions and exit statuses as ever; what differs from ``python program.py`` are the
imports, and what Python does at its end.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from .ranks import _cpu_server

CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    # No process imports torch.compile's backends, which Megatron asks for.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Variables of programs that leave a GPU alone."""
_LAUNCHERS = ("deepspeed.launcher.", "torch.distributed.")


class Program:
    """``python`` with these arguments, the first process of a session; with what
    ``subprocess.Popen`` calls its own.

    Args:
        arguments: A script or ``-m`` and a module, and theirs.
        folder: Exists; holds the pipe that everything is printed to.
        ranks: Whether a launcher's ranks are forked, too, or started from nothing.
        enter: Namespaces to run in, from ``nodes.spaces``.
        environment: Changes to this process's environment.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        cwd: Path,
        ranks: bool = True,
        enter: Sequence[tuple[str, int]] | None = None,
        **environment: str,
    ) -> None:
        pipe = folder / f"output-{len(list(folder.glob('output-*')))}"
        os.mkfifo(pipe)
        whole = {**os.environ, **environment}
        self._process: Any = _cpu_server().Process(
            target=_first, args=(list(arguments), str(pipe), str(cwd), whole, ranks, enter)
        )
        self._text = ""
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._process.start()
        self._reader.start()
        self.pid: int = self._process.pid

    def _read(self, pipe: Path) -> None:
        # As soon as the program has opened it, too.
        with open(pipe, encoding="utf-8", errors="replace") as output:
            for line in output:
                self._text += line

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Everything printed, when the last process that might print has gone."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(f"program {self.pid}", timeout, self._text)
        self._process.join(timeout)
        return self._text, None


def _first(
    arguments: list[str],
    pipe: str,
    cwd: str,
    environment: dict[str, str],
    ranks: bool,
    enter: Sequence[tuple[str, int]] | None,
) -> None:
    if enter:
        from .nodes import enter_spaces

        enter_spaces(enter)
    os.setsid()
    output = os.open(pipe, os.O_WRONLY)
    _replace({1: output, 2: output})
    os.close(output)
    os.chdir(cwd)

    with forked_programs(ranks):
        _become(arguments, environment)


@contextmanager
def forked_programs(ranks: bool = True) -> Iterator[None]:
    """What runs this Python by ``subprocess`` is forked from this process, a rank; of launchers'
    ranks if ``ranks``.
    """

    class Forked(subprocess.Popen):
        """The order of arguments is that of CPython's own method."""

        def _execute_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
        ):  # type: ignore
            python = (
                not isinstance(args, str) and str(args[0]) == sys.executable and preexec_fn is None
            )
            launcher = python and any(str(a).startswith(_LAUNCHERS) for a in args[1:4])
            if not python or not (ranks or launcher):
                return super()._execute_child(
                    args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
                )
            pipes, session = rest[3:9], rest[14]
            sys.stdout.flush()
            self.pid = os.fork()
            if not self.pid:
                _replace({i: fd for i, fd in enumerate((pipes[0], pipes[3], pipes[5])) if fd != -1})
                if session:
                    os.setsid()
                if cwd is not None:
                    os.chdir(cwd)
                _become([str(a) for a in args[1:]], os.environ.copy() if env is None else env)
            self._child_created = True
            self._close_pipe_fds(*pipes)

    # torchrun's module has taken the class under a name of its own.
    with (
        mock.patch.object(subprocess, "Popen", Forked),
        mock.patch.object(subprocess_handler, "Popen", Forked),
    ):
        yield


def _replace(descriptors: Mapping[int, int]) -> None:
    sys.stdout.flush()
    for standard, descriptor in descriptors.items():
        os.dup2(descriptor, standard)


def _become(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Run a program in this process, which does not return."""
    # As in a process that starts from nothing: a launcher's handlers are not its ranks'.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    # A rank that starts a program: its process group is not the program's.
    if dist.is_initialized():
        dist.distributed_c10d._update_default_pg(None)
    given = dict(environment)
    os.environ.clear()
    os.environ.update(given)
    # What ps and psutil show; a rank's number is in its environment, which they would show as the
    # server's.
    Path("/proc/self/comm").write_text(
        f"rank {given['LOCAL_RANK']}" if "LOCAL_RANK" in given else "program"
    )
    arguments = arguments[1:] if arguments[0] == "-u" else arguments
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    status: Any = 0
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status or 0)
