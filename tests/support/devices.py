"""Where kernels run in tests: on the GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from coat_dist.devices import KERNEL_CAPABILITY

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= KERNEL_CAPABILITY
DEVICE = "cuda" if ON_GPU else "cpu"
CONVERTS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
"""Whether there is a GPU that has instructions for FP8."""


def on_device(gpu: Any, interpreter: Any) -> Any:
    """Shapes, variants and the like of a test: what a GPU takes in a moment takes the
    interpreter hours.
    """
    return gpu if ON_GPU else interpreter


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An error where the host waits for the GPU; a first use may, for handles and workspaces."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of ``work()``, and what it returned; it runs three times before, which compiles
    kernels and allocates workspaces.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def prepare() -> None:
    """Have kernels interpreted where no GPU runs them. To be called before Triton is imported."""
    if not ON_GPU and importlib.util.find_spec("triton") is not None:
        assert "triton" not in sys.modules or "TRITON_INTERPRET" in os.environ, "imported too early"
        os.environ["TRITON_INTERPRET"] = "1"
        _patch_language_once_a_launch()


def _patch_language_once_a_launch() -> None:
    """Triton's interpreter replaces its whole language for each call of a function inside a kernel,
    which takes half of its time. Once is enough for each of the two modules by which functions may
    know the language.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scope, patch = getattr(interpreter, "_LangPatchScope", None), interpreter._patch_lang
    if scope is None:  # versions that leave the language replaced
        return

    @functools.cache
    def known_to(fn: Any) -> list[Any]:
        return [x for x in (tl, tl.core) if any(x is value for value in fn.__globals__.values())]

    def patch_once(fn: Any) -> Any:
        return patch(fn) if any(tl.core.is_builtin(x.load) for x in known_to(fn)) else scope()

    interpreter._patch_lang = patch_once


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
