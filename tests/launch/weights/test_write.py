"""Errors while tensors are written: each is raised, with the file that it is of, and no descriptor stays open."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from launch.weights import write
from launch.weights.source import CheckpointError
from launch.weights.write import Planned, write_tensors

TENSORS = [Planned(f"t{i}", torch.float32, (1000, 4)) for i in range(6)]
"""16,000 bytes each; two are a file."""
FILES = [f"m-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


class Disk:
    """The calls that ``write_tensors`` makes, in order, with the file's name; ``fail(call, name, count)`` may raise."""

    def __init__(self, patch, fail=lambda call, name, count: None):
        self.calls: list[tuple[str, str]] = []
        self.open: dict[int, str] = {}
        self.most_open = 0
        self._fail, self._lock = fail, threading.Lock()
        self._real = {name: getattr(os, name) for name in ("open", "write", "fsync", "close")}
        patch.setattr(os, "open", self._opened)
        for name in ("write", "fsync", "close"):
            patch.setattr(os, name, lambda fd, *rest, name=name: self._call(name, fd, *rest))

    def _opened(self, path, *rest, **more):
        descriptor = self._real["open"](path, *rest, **more)
        if str(path).endswith(".safetensors"):
            self.open[descriptor] = os.path.basename(path)
            self.most_open = max(self.most_open, len(self.open))
        return descriptor

    def _call(self, call, descriptor, *rest):
        name = self.open.get(descriptor)
        if name is None:
            return self._real[call](descriptor, *rest)  # not ours, or closed twice: the system's own error
        with self._lock:
            self.calls.append((call, name))
            count = self.calls.count((call, name))
        if call == "close":
            del self.open[descriptor]
            self._real[call](descriptor)
        self._fail(call, name, count)
        return None if call == "close" else self._real[call](descriptor, *rest)


@pytest.fixture
def patch(monkeypatch):
    """Blocks and syncs small enough for several of each in a file."""
    monkeypatch.setattr(write, "_SYNC", 8_000)
    with monkeypatch.context() as patch:
        yield patch


def blocks(tensor):
    for i in range(4):
        yield torch.full((250, 4), float(i))


def written(folder, blocks=blocks, **more):
    return write_tensors(folder, "m", TENSORS, blocks, **{"shard_bytes": 33_000, **more})


def descriptors():
    """Those of this process. Fewer may be there afterwards: garbage of earlier tests closes some at any time."""
    return set(os.listdir("/proc/self/fd"))


def test_every_file_is_on_disk_when_it_returns(tmp_path, patch):
    """After the last write of each file comes an fsync of it, which has ended."""
    disk, before = Disk(patch), descriptors()
    assert list(written(tmp_path).files) == [*FILES, "m.safetensors.index.json"]
    for name in FILES:
        calls = [call for call, of in disk.calls if of == name]
        assert calls[-2:] == ["fsync", "close"] and calls.count("close") == 1
    assert not disk.open and descriptors() <= before


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "fsync at the end", "close"])
def test_an_error_of_the_disk_is_raised_with_its_file(tmp_path, patch, file, call):
    """Each is told once by the system, and may be told while another file is written."""
    if call == "open":
        (tmp_path / file).write_bytes(b"")  # is there already
        kind = errno.EEXIST
    else:
        kind = errno.ENOSPC
    ended = []

    def fail(made, name, count):
        if name != file or made != call.split()[0]:
            return
        if call == "fsync at the end" and [c for c in disk.calls if c[1] == file].count(("write", file)) < 9:
            return
        if not ended:
            ended.append(True)
            raise OSError(kind, os.strerror(kind))

    disk, before = Disk(patch, fail), descriptors()
    with pytest.raises(OSError) as told:
        written(tmp_path)
    assert (told.value.errno, told.value.filename) == (kind, str(tmp_path / file))
    assert not disk.open and descriptors() <= before
    assert len([c for c in disk.calls if c[0] == "close"]) == len({name for _, name in disk.calls})


def test_a_write_fails_while_a_file_is_brought_to_disk(tmp_path, patch):
    """The descriptor that the fsync holds is closed after it, not under it."""
    running, failed = threading.Event(), threading.Event()

    def fail(call, name, count):
        if call == "fsync":
            running.set()
            assert failed.wait(20)
            time.sleep(0.05)
        elif call == "write" and running.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        elif call == "write" and count > 3:
            assert running.wait(20)

    disk, before = Disk(patch, fail), descriptors()
    with pytest.raises(OSError, match="No space left") as told:
        written(tmp_path)
    assert told.value.filename == str(tmp_path / FILES[0])
    assert [c for c, _ in disk.calls][-1] == "close" and not disk.open and descriptors() <= before


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_an_error_of_the_source_is_raised_as_it_is(tmp_path, patch, kind, at):
    def failing(tensor):
        yield from blocks(tensor)
        if tensor is TENSORS[at]:
            raise kind("the source")

    disk, before = Disk(patch), descriptors()
    with pytest.raises(kind, match="the source"):
        written(tmp_path, failing)
    assert not disk.open and descriptors() <= before


@pytest.mark.parametrize("rows", [999, 1001])
def test_a_tensor_has_the_bytes_that_its_header_says(tmp_path, rows):
    with pytest.raises(CheckpointError, match=f"tensor t0: got {16 * rows} bytes, accepted: 16000"):
        written(tmp_path, lambda tensor: iter([torch.ones(rows, 4)]))


@pytest.mark.parametrize(("at", "sync"), [(1, 8_000), (1, 1 << 40), (2, 1 << 40), (3, 1 << 40)])
def test_a_sync_that_cannot_begin(tmp_path, patch, at, sync):
    """No more threads, say: in the middle of a file, and at each file's end."""
    real, begun = ThreadPoolExecutor.submit, []

    def submit(self, how, *rest):
        if how in (os.fsync, write._fsync_and_close):
            begun.append(how)
            if len(begun) == at:
                raise RuntimeError("can't start new thread")
        return real(self, how, *rest)

    disk, before = Disk(patch), descriptors()
    patch.setattr(ThreadPoolExecutor, "submit", submit)
    patch.setattr(write, "_SYNC", sync)
    with pytest.raises(RuntimeError, match="new thread"):
        written(tmp_path)
    assert not disk.open and descriptors() <= before


def test_a_slow_disk_does_not_use_up_descriptors(tmp_path, patch):
    """Every tensor a file, written sooner than it is on disk."""
    many = [Planned(f"t{i}", torch.float32, (1, 1)) for i in range(40)]
    disk = Disk(patch, lambda call, name, count: time.sleep(0.002) if call == "fsync" else None)
    done = write_tensors(tmp_path, "m", many, lambda tensor: iter([torch.ones(1, 1)]), shard_bytes=1)
    assert len(done.files) == 41 and disk.most_open < 25 and not disk.open
