"""``python -m coat_dist.report``: versions, GPUs, which FP8 paths are active, and what is wrong
with the installation.

Exit status 0, or 1 where a problem (not a mere warning) was found.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.specifiers import SpecifierSet

# The ranges of setup.py that matter at run time.
SUPPORTED = {
    "torch": ">=2.11,<2.14",
    "deepspeed": ">=0.19.8,<0.20",
    "megatron-core": ">=0.14,<0.17",
    "triton": ">=3.6,<3.9",
}


def versions() -> dict[str, str | None]:
    """Installed version of each package that matters; None where it is missing."""
    found: dict[str, str | None] = {}
    for name in (*SUPPORTED, "transformers", "pydantic", "transformer-engine", "apex"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def check(installed: dict[str, str | None] | None = None) -> Iterator[tuple[str, str]]:
    """Yield ``("problem" | "warning", text)`` for whatever will fail, or fall back to something
    slower.
    """
    installed = versions() if installed is None else installed
    without = {
        "triton": "the plain torch definitions are used",
        "deepspeed": "for engines: pip install 'coat-dist[deepspeed]'",
        "megatron-core": "for Megatron models: pip install 'coat-dist[megatron]'",
    }
    for name, accepted in SUPPORTED.items():
        got = installed.get(name)
        if got is None:
            level, lost = ("warning", f"; {without[name]}") if name in without else ("problem", "")
            yield level, f"{name}: not installed, accepted: {accepted}{lost}"
        elif not SpecifierSet(accepted).contains(got.split("+")[0], prereleases=True):
            yield "problem", f"{name}: got {got}, accepted: {accepted}"
    if not any(shutil.which(c) for c in (os.environ.get("CC") or "cc", "gcc", "clang")):
        yield (
            "warning",
            "C compiler: none of cc, gcc, clang found; Triton cannot build its launchers on a GPU "
            "machine",
        )
    for name, effect in (
        ("COAT_REFERENCE", "the plain torch definitions are used everywhere, kernels are off"),
        (
            "COAT_FP8_ARITHMETIC",
            "FP8 instructions are not used, conversion is arithmetic, products BF16",
        ),
    ):
        if os.environ.get(name) == "1":
            yield "warning", f"{name}=1: {effect}"


def paths() -> dict[str, str]:
    """What runs each part on this machine: the optimizer's step, quantization, and FP8 GEMMs."""
    import torch

    from coat_dist.devices import has_fp8
    from coat_dist.ops.dispatch import use_kernels

    first = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
    return paths_with(use_kernels(first), has_fp8(first))


def paths_with(kernels: bool, fp8: bool) -> dict[str, str]:
    """:func:`paths` on a device that runs kernels, and has FP8 instructions, or not."""
    if not kernels:
        step, gemm = "definition in plain torch", "definition: fp64 sums"
    elif fp8:
        step, gemm = "Triton kernel", "torch._scaled_mm"
    else:
        step = "Triton kernel, FP8 conversion by integer arithmetic"
        gemm = "BF16 products of the codes: no FP8 tensor cores"
    return {"optimizer step": step, "quantization": step, "FP8 GEMM": gemm}


def lines() -> Iterator[str]:
    """Versions, GPUs and paths, for a reader."""
    import torch

    yield f"python          {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name, version in versions().items():
        yield f"{name:<15} {version or '-'}"
    yield f"GPUs            {torch.cuda.device_count()}"
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield (
            f"GPU {i:<11} {p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability "
            f"{p.major}.{p.minor}"
        )
    for part, path in paths().items():
        yield f"{part:<15} {path}"


def main() -> int:
    """Print the report; the exit status."""
    findings = list(check())
    for line in (*lines(), *(f"{level.upper()}: {text}" for level, text in findings)):
        print(line)
    return 1 if any(level == "problem" for level, _ in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
