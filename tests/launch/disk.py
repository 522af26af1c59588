"""A disk that fails where a test says so."""

import errno
import io
import os
import shutil

import torch

PLACES = {
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
    "replace": (os, "replace"),
    "open": (io, "open"),
    "os.open": (os, "open"),
    "copyfile": (shutil, "copyfile"),
    "mkdir": (os, "mkdir"),
    "makedirs": (os, "makedirs"),
    "rmtree": (shutil, "rmtree"),
    "scandir": (os, "scandir"),
    "listdir": (os, "listdir"),
    "torch.save": (torch, "save"),
}


def listing(folder):
    """Everything in it, however deep."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


class Failing:
    """Lets one function fail at its ``nth`` call, or from then on, as a disk does."""

    def __init__(self, place, nth, for_good):
        self.owner, self.name = PLACES[place]
        self.nth, self.for_good, self.calls, self.failed = nth, for_good, 0, 0

    def __enter__(self):
        self.original = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self)
        return self

    def __exit__(self, *_):
        setattr(self.owner, self.name, self.original)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.nth or (self.for_good and self.calls > self.nth):
            self.failed += 1
            if self.name == "save":  # torch.save's own writer
                raise RuntimeError("PytorchStreamWriter failed writing file: file write failed")
            raise OSError(errno.EIO, "Input/output error")
        return self.original(*args, **kwargs)
