"""The tables of :mod:`launch.scale.paper`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .report import table

__all__ = ["markdown"]


def _gb(number: float) -> str:
    return f"{number / 1e9:,.1f}"


def markdown(answer: Mapping[str, Any]) -> str:
    lines = [f"# On paper: {answer['gpu']}", "", "TP x PP x DP of the fastest layout that fits, and what it does:", ""]
    head: tuple[str, ...] = (
        "model",
        "GPUs",
        "variant",
        "TP x PP x DP",
        "micro-batch",
        "GiB",
        "bubble",
        "step, s",
        "tokens/s/GPU",
        "TFLOP/s/GPU",
    )
    lines += table(head, [_layout_cells(row) for row in answer["rows"]])
    lines += ["", "What each GPU's links send in a step of that layout, GB: with the block, and the same in BF16:", ""]
    head = ("model", "GPUs", "TP x PP x DP", "NVLink, BF16", "NVLink, block", "NIC, BF16", "NIC, block")
    rows = [row for row in answer["rows"] if row["variant"] == "coat" and row["layout"]]
    lines += table(
        head,
        [
            (
                row["model"],
                f"{row['gpus']:,}",
                row["layout"],
                *(
                    _gb(row[key][where])
                    for where in ("inside", "between")
                    for key in ("carried_without", "carried_bytes")
                ),
            )
            for row in rows
        ],
    )
    lines += [
        "",
        "ZeRO-3 alone, one sequence a GPU, weights gathered in BF16 and in FP8 (two gathers of each weight):",
        "",
    ]
    head = ("model", "GPUs", "GiB", "gathered, GB: BF16", "FP8", "step, s: BF16", "FP8", "FP8 is")
    lines += table(
        head,
        [
            (
                row["model"],
                str(row["gpus"]),
                f"{row['memory_bytes'] / 2**30:.0f}" + (", recomputed" if row["recomputed"] else ""),
                *(_gb(row[kind]["gathered_bytes"]) for kind in ("bf16", "fp8")),
                *(_seconds(row[kind]["seconds"]) for kind in ("bf16", "fp8")),
                f"{row['bf16']['seconds']['middle'] / row['fp8']['seconds']['middle']:.2f} x as fast",
            )
            for row in answer["zero3"]
        ],
    )
    lines += ["", "A gather of so many bytes (in BF16), in FP8, and in FP8 after an all-reduce of scales; ms:", ""]
    lines += table(
        ("group", "bytes", "BF16", "FP8", "scales, then FP8", "pays"),
        [
            (
                row["group"],
                f"{row['bytes'] // 2**20} MiB",
                *(f"{1e3 * row[key]:.3f}" for key in ("bf16", "fp8", "fp8_after_scales")),
                "yes" if row["fp8_after_scales"] < row["bf16"] else "no",
            )
            for row in answer["wire"]
        ],
    )
    if answer["published"]:
        lines += ["", "The published layout of Llama 3.1 405B on 16,384 H100s (400 TFLOP/s a GPU in BF16):", ""]
        lines += table(
            ("variant", "TP x PP x DP", "GiB", "TFLOP/s/GPU"),
            [
                (
                    row["variant"],
                    row["layout"],
                    f"{row['memory_bytes'] / 2**30:.0f}",
                    "{middle:,.0f} ({low:,.0f} to {high:,.0f})".format(
                        **{k: v / 1e12 for k, v in row["flops"].items()}
                    ),
                )
                for row in answer["published"]
            ],
        )
    return "\n".join(lines) + "\n"


def _seconds(said: Mapping[str, float]) -> str:
    return f"{said['middle']:.2f} ({said['low']:.2f} to {said['high']:.2f})"


def _layout_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["layout"] is None:
        return row["model"], f"{row['gpus']:,}", row["variant"], "none fits", *("-",) * 6
    speed = row["tokens_per_second_per_gpu"]
    return (
        row["model"],
        f"{row['gpus']:,}",
        row["variant"],
        row["layout"],
        f"{row['micro_batch']} x {row['micro_batches']}",
        f"{row['memory_bytes'] / 2**30:.0f}",
        f"{100 * row['bubble']:.0f} %",
        _seconds(row["seconds"]),
        f"{speed['middle']:,.0f} ({speed['low']:,.0f} to {speed['high']:,.0f})",
        f"{row['model_flops'] / 1e12:,.0f}",
    )
