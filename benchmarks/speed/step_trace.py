"""What a trace of a step's kernels says: what they are for, the longest of each kind, and how busy
the GPU is. ``step.py`` takes the trace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.timing import union

KINDS = (
    ("communication", ("nccl", "barrier_kernel", "PtoP")),
    ("attention", ("sdpa", "flash", "fused_attn", "dot_do_o", "dq_to_16bits")),
    ("products", ("nvjet", "gemm", "cutlass", "cublas", "scaled_mm", "splitK")),
    # Norms, activations, rotary embeddings and FP8 codes: of Transformer Engine (those that it
    # compiles while it runs are in no namespace), and of torch.compile, which makes kernels of
    # Megatron's fusions.
    (
        "layers",
        (
            "transformer_engine",
            "cast_transpose",
            "transpose_optimized",
            "triton_poi",
            "triton_red",
            "triton_per",
        ),
    ),
    ("optimizer", ("multi_tensor", "FusedAdam")),
    ("copies", ("Memcpy", "Memset", "copy_kernel", "CatArray", "FillFunctor")),
    ("torch's element-wise", ("at::native",)),
)
"""What kernels are for, by parts of their names; the first that fits. All else is "other"."""
OURS = re.compile(r"_\w+")
"""Kernels of this project have the names of their functions."""
OUR_KINDS = (
    ("optimizer", ("_adamw", "_numbers_kernel")),
    ("loss", ("_stats_kernel", "_grad_kernel")),
    ("layers", ("_kernel",)),
)
""":data:`KINDS` of this project's kernels."""
Span = tuple[int, int, str]
"""Nanoseconds of begin and end, and a kernel's name."""
TOP, WIDTH = 4, 60
"""Kernels that are named of each kind, and characters of their names."""


def kind_of(name: str) -> str:
    """What a kernel is for."""
    table = OUR_KINDS if OURS.fullmatch(name) and not name.startswith("_Z") else KINDS
    return next((kind for kind, parts in table if any(part in name for part in parts)), "other")


def short(name: str) -> str:
    """A kernel's name without what says nothing about it."""
    for part in ("void ", "at::native::", "transformer_engine::", "(anonymous namespace)::"):
        name = name.replace(part, "")
    return name[:WIDTH]


def kinds(spans: Sequence[Span], steps: int = 1) -> dict[str, dict[str, Any]]:
    """Milliseconds and number of kernels of a step by what they are for, and the longest kernels
    of each kind by name; ``spans`` are those of ``steps`` steps.
    """
    found: dict[str, dict[str, Any]] = {}
    for begin, end, name in spans:
        row = found.setdefault(kind_of(name), {"ms": 0.0, "count": 0.0, "top": {}})
        for one in (row, row["top"].setdefault(short(name), {"ms": 0.0, "count": 0.0})):
            one["ms"] += (end - begin) / 1e6 / steps
            one["count"] += 1 / steps
    for row in found.values():
        row["top"] = dict(sorted(row["top"].items(), key=lambda item: -item[1]["ms"])[:TOP])
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def busy_ms(spans: Sequence[Span]) -> float:
    """Milliseconds in which at least one of the kernels runs."""
    return sum(end - begin for begin, end in union((begin, end) for begin, end, _ in spans)) / 1e6


def busy(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds from the first kernel to the last, and how many of them the GPU is busy, and
    does nothing but communicate: communication that nothing hides.
    """
    others = [span for span in spans if kind_of(span[2]) != "communication"]
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    return {
        "span_ms": (last - first) / 1e6,
        "busy_ms": busy_ms(spans),
        "communication_alone_ms": busy_ms(spans) - busy_ms(others),
    }
