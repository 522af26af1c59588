"""README's first numbers: what training gains, in a few lines of the present code alone; ``results_page.py`` writes it.

Each line is of one file of ``results``. What was not measured with the code that is here is left out, so that a number
can be missing but never old.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, number
from benchmarks.results_readme import gpus, listed, llama2_7b, table, wrapped
from benchmarks.results_tables import read
from benchmarks.speed import whole_report

__all__ = ["headline"]

TE_SHORT = "Transformer Engine"
TE = f"[{TE_SHORT}](https://github.com/NVIDIA/TransformerEngine)"


def headline(results: Path = RESULTS) -> str:
    """A Markdown list; empty where nothing of the present code was measured."""
    said = [line for make in (same_micro_batch, layer, whole, beyond_bf16) if (line := make(results))]
    lines = [wrapped(f"- {line}").replace("\n", "\n  ") for line in said]
    return "\n".join(["Measured ([all results](docs/results.md)):", "", *lines]) if lines else ""


def same_micro_batch(results: Path) -> str:
    """A whole step beside the peer's."""
    found = (table("train", results) or table("train_one", results) or (None,))[0]
    runs = {one["config"]: one for one in found["runs"]} if found else {}
    if found is None or not {"zero2", "TE bf16"} <= runs.keys():
        return ""
    given, ours = found["settings"], runs["zero2"]
    speed = {name: ours["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"] for name, one in runs.items()}
    peers = [f"{speed['TE bf16']:.2f} × as fast as {TE} in BF16"]
    peers += [f"{speed[name]:.2f} × as fast as with its FP8" for name in ("TE fp8 delayed",) if name in speed]
    memory = ours["peak_memory_gib"] / runs["TE bf16"]["peak_memory_gib"]
    return (
        f"**Faster at the same micro-batch**: {given['layers']} Llama-2-7B layers with embedding, loss and optimizer "
        f"train {listed(peers)}, in {memory:.2f} × BF16's peak memory (ZeRO-2, {gpus(found, given['ranks'])})."
    )


def layer(results: Path) -> str:
    """One layer beside the peer's."""
    found = (table("layer", results) or (None,))[0]
    runs = found["results"][0]["runs"] if found else {}
    if found is None or not {"coat", "TE bf16"} <= runs.keys():
        return ""
    ours, theirs = runs["coat"], runs["TE bf16"]
    time, saved = (ours[key] / theirs[key] for key in ("ms", "saved_bytes_per_token"))
    return (
        f"**One layer** takes {time:.2f} × the time of Transformer Engine's in BF16, forward and backward, and saves "
        f"{saved:.2f} × the bytes in between."
    )


def whole(results: Path) -> str:
    """A whole model, each way of training at its fastest micro-batch, for each number of GPUs."""
    found = [said for group in llama2_7b((read("whole", results) or {"cases": []})["cases"]) if (said := gain(group))]
    return f"**Larger micro-batches**: whole Llama-2-7B trains {'; '.join(found)}." if found else ""


def gain(group: list[dict[str, Any]]) -> str:
    """Micro-batches, and the largest ratios to BF16 and, where it fits, to the peer's fastest FP8."""
    cases = {one["variant"]: one for one in group if one["steps"]}
    own = [name for name in cases if name.startswith("both")]
    if not own or "BF16" not in cases:
        return ""
    variant = max(own, key=lambda name: _speed(whole_report.fastest(cases[name])))
    ours, base = whole_report.fastest(cases[variant]), cases["BF16"]["steps"]
    ratio, beside = _speed(ours) / _speed(whole_report.fastest(cases["BF16"])), ""
    fp8_is_out = any(one["variant"].startswith("TE fp8") and not one["steps"] for one in group)
    for start, how in (("TE fp8", "with FP8"), ("TE bf16", f"in BF16{', whose FP8 does not fit' * fp8_is_out}")):
        if (peer := _fastest([one for name, one in cases.items() if name.startswith(start)])) is not None:
            beside = f" and {_speed(ours) / _speed(peer):.2f} × as many as {TE_SHORT} {how}"
            break
    return (
        f"with micro-batch {ours['micro_batch']} where BF16 reaches {max(one['micro_batch'] for one in base)}, "
        f"{ratio:.2f} × as many tokens a second{beside} ({where(cases['BF16'])}{_BESIDES.get(variant, '')})"
    )


_BESIDES = {"both, remainders": ", 16-bit remainders for master weights", "both, FP8 attention": ", FP8 attention"}
"""Of a variant, what it has beside FP8 moments and the FP8 flow."""


def _fastest(cases: list[dict[str, Any]]) -> dict[str, Any] | None:
    return max((whole_report.fastest(one) for one in cases), key=_speed, default=None)


def _speed(step: dict[str, Any]) -> float:
    return step["tokens_per_second_per_gpu"]


def beyond_bf16(results: Path) -> str:
    """What trains where BF16 is out of memory with its smallest micro-batch: on each kind and number of GPUs, the
    fastest of each model."""
    files = [read(name, results) or {"cases": []} for name in ("whole", "whole-h100")]
    cases = [one for file in files for one in file["cases"] if whole_report.current(one)]
    found: dict[str, list[str]] = {}
    for group in whole_report.groups(cases).values():
        if any(one["variant"] == "BF16" and one["out_of_memory_at"] == 1 for one in group) and whole_report.fits(group):
            steps = [whole_report.fastest(one) for one in group if one["steps"]]
            step = max(steps, key=lambda one: one["tokens_per_second_per_gpu"])
            line = f"{group[0]['model']} {number(step['tokens_per_second_per_gpu'])} ({step['micro_batch']})"
            found.setdefault(where(group[0]), []).append(line)
    if not found:
        return ""
    lines = "; ".join(f"on {gpus}: {', '.join(models)}" for gpus, models in found.items())
    return (
        f"**Models that do not fit in BF16** with micro-batch 1, tokens/s/GPU (micro-batch): {lines}. "
        "[How](docs/memory.md#one-gpu)"
    )


def where(case: dict[str, Any]) -> str:
    """1 x H200, ZeRO-2"""
    return whole_report.title(case).removeprefix(case["model"]).strip(" ,")
