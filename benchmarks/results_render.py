"""Results as Markdown: a function for each table of ``results_tables.py``, from the contents of its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import number
from benchmarks.speed import whole_report

__all__ = [
    "amax_collectives",
    "engine_step",
    "layer",
    "layer_graphs",
    "layer_presets",
    "layers",
    "layouts",
    "micro_batches",
    "optimizer",
    "over_four",
    "percent",
    "pipeline",
    "rows",
    "small_whole",
    "step",
    "train",
    "train_tp",
    "whole",
]

GIB = 2**30
Result = dict[str, Any]
NAMES = {
    "TE bf16": "Transformer Engine, BF16",
    "TE fp8 delayed": "Transformer Engine, FP8",
    "zero2-bf16": "BF16, torch AdamW",
    "zero2": "coat",
    "zero2-remainder": "coat, bf16 remainders",
}
"""Of runs, in tables."""


def rows(head: str, lines: Sequence[str]) -> list[str]:
    """A Markdown table."""
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *(f"| {line} |" for line in lines)]


def percent(value: float, signed: bool = False) -> str:
    """0.19 %, with a minus sign where there is one, and a plus if ``signed``."""
    return f"{100 * value:{'+' if signed else ''}.2f} %".replace("-", "\u2212")


SAME_LOSS = 1e-3
"""Up to which share two first losses in BF16 differ by rounding: above it, initial weights are others."""


def comparable(runs: dict[str, Result]) -> bool:
    """Whether losses of Transformer Engine's runs say something beside ours: they began with the same weights."""
    if not {"TE bf16", "zero2-bf16"} <= runs.keys():
        return False
    theirs, ours = (runs[name]["losses"][0] for name in ("TE bf16", "zero2-bf16"))
    return abs(theirs / ours - 1) < SAME_LOSS


def train(found: Result) -> list[str]:
    runs = {one["config"]: one for one in found["runs"]}
    lines, bases = [], [name for name in ("TE bf16", "zero2-bf16") if name in runs]
    for name, one in runs.items():
        held, speed = one["memory"], one["tokens_per_second_per_gpu"]
        moments = held["optimizer moments"]["bytes"] / held["optimizer moments"]["elements"]
        ratios = [f"{speed / runs[base]['tokens_per_second_per_gpu']:.2f}" for base in bases]
        shown = name != "zero2-bf16" and (not name.startswith("TE") or comparable(runs))
        gaps = [percent(one["largest_loss_gap"]), percent(one["last_ten_loss_gap"])] if shown else ["", ""]
        cells = [
            *(NAMES.get(name, name), f"{one['step_ms']:.1f} ms", number(speed), *ratios, f"{moments:.3f}"),
            *(f"{held['activations']['bytes'] / GIB:.2f} GiB", f"{one['peak_memory_gib']:.1f} GiB", *gaps),
        ]
        lines.append(" | ".join(cells))
    to = "".join(f" | to {'Transformer Engine BF16' if base.startswith('TE') else 'BF16'}" for base in bases)
    head = f" | step | tokens/s/GPU{to} | moments, B/param | saved for backward | peak"
    table = rows(head + " | largest loss gap | mean gap, last ten", lines)
    return table + [part for note in found.get("notes", ()) for part in ("", note)]


def train_tp(found: Result) -> list[str]:
    lines = []
    for size in dict.fromkeys(one["micro_batch"] for one in found["runs"]):
        of = {one["config"]: one for one in found["runs"] if one["micro_batch"] == size}
        cells = [
            f"{number(one['tokens_per_second_per_gpu'])} ({one['tokens_per_second_ratio']:.3f})" for one in of.values()
        ]
        lines.append(f"{size} | " + " | ".join(cells))
    return rows("micro-batch | " + " | ".join(dict.fromkeys(one["config"] for one in found["runs"])), lines)


def pipeline(found: Result) -> list[str]:
    runs, kinds = found["runs"], [(k, v) for k in ("BF16", "coat") for v in (1, 2)]
    of = {(one["micro_batches"], one["layers"], one["virtual_stages"]): one["ratio"] for one in runs}
    lines = [
        f"{m} | " + " | ".join(f"{of[m, k, v]:.3f}" if (m, k, v) in of else "" for k, v in kinds)
        for m in dict.fromkeys(one["micro_batches"] for one in runs)
    ]
    return rows("micro-batches | BF16, 1F1B | BF16, V = 2 | coat, 1F1B | coat, V = 2", lines)


def layer(found: Result) -> list[str]:
    lines = []
    for one in found["results"]:
        for name in ("TE bf16", "TE fp8 delayed", *(n for n in one["runs"] if n.startswith("coat"))):
            if (run := one["runs"].get(name)) is not None:
                ratio = f"{run['ratio_to_te_bf16']:.3f}" if "ratio_to_te_bf16" in run else ""
                lines.append(
                    f"{NAMES.get(name, name)} | {run['ms']:.2f} ms | {ratio} | {number(run['saved_bytes_per_token'])}"
                )
    return rows(" | forward + backward | to Transformer Engine BF16 | saved, B/token", lines)


def layer_presets(found: Result) -> list[str]:
    lines = []
    for one in found["results"]:
        base, ours = one["runs"]["bf16"], one["runs"]["coat"]
        lines.append(
            f"{one['preset']}, {number(one['tokens'])} | {base['ms']:.2f} ms | {ours['ms']:.2f} ms | "
            f"{ours['ratio_to_bf16']:.3f} | {number(base['saved_bytes_per_token'])} | "
            f"{number(ours['saved_bytes_per_token'])}"
        )
    return rows("layer, tokens | BF16 | coat | ratio | saved, BF16, B/token | saved, coat", lines)


def layer_graphs(found: Result) -> list[str]:
    lines = []
    for one in found["results"]:
        base, ours, graphs = (one["runs"][name] for name in ("bf16", "coat", "coat cuda graphs"))
        ratios = " | ".join(f"{run['ms']:.2f} ms | {run['ratio_to_bf16']:.3f}" for run in (ours, graphs))
        lines.append(f"{one['preset']}, {number(one['tokens'])} | {base['ms']:.2f} ms | {ratios}")
    return rows("layer, tokens | BF16 | coat | ratio | coat, CUDA graphs | ratio", lines)


def layers(over_ranks: Result, experts: Result) -> list[str]:
    lines = []
    for one in over_ranks["results"]:
        runs = one["runs"]
        what = f"{one['preset']}, two GPUs, TP 2 with sequence parallelism"
        lines.append(
            f"{what} | {runs['bf16']['ms']:.2f} ms | {runs['coat']['ms']:.2f} ms | {runs['coat']['ratio_to_bf16']:.3f}"
        )
    for one in experts["results"]:
        if one["tokens"] == 16384:
            base, ours = one["runs"]["grouped bf16"], one["runs"]["grouped coat"]
            what = f"{one['shape']}, grouped products, one GPU"
            lines.append(f"{what} | {base['ms']:.2f} ms | {ours['ms']:.2f} ms | {ours['ratio_to_bf16']:.3f}")
    return rows("layer | BF16 | coat | ratio", lines)


def optimizer(found: Result) -> list[str]:
    pairs: dict[str, list[Result]] = {}
    for one in found["steps"]:
        pairs.setdefault(number(one["parameters"]), []).append(one)
    pairs["300 tensors, 52 M"] = found["model_of_300_tensors"]
    lines = []
    for size, both in pairs.items():
        of = {one["optimizer"]: one for one in both}
        ours, torchs = of["CoatAdamW"], of["torch fused AdamW"]
        share = f"{ours['fraction_of_copy_bandwidth']:.0%}" if "fraction_of_copy_bandwidth" in ours else ""
        lines.append(
            f"{size} | {torchs['ms']:.2f} ms | {ours['ms']:.2f} ms | {share} | {ours['ratio_to_torch_fused']:.2f}"
        )
    return rows("parameters | torch fused AdamW | `CoatAdamW` | of copy bandwidth | ratio", lines)


def engine_step(found: Result) -> list[str]:
    return rows(
        " | `engine.step()` | ratio",
        [f"{s['optimizer']} | {s['step_ms']:.1f} ms | {s['ratio']:.3f}" for s in found["steps"]],
    )


def whole(found: Result) -> list[str]:
    return whole_report.report(found["cases"])


def micro_batches(found: Result) -> list[str]:
    """Of each case: how fast each is, and what the allocator had to give back to the driver and ask for again."""
    lines: list[str] = []
    for case in (one for group in whole_report.groups(found["cases"]).values() for one in group):
        cells = [
            f"{step['micro_batch']} | {number(step['tokens_per_second_per_gpu'])} | {peak(step)} | "
            f"{step.get('allocator_retries', '')}"
            for step in case["steps"]
        ]
        if len(found["cases"]) > 1:
            lines += [f"### {whole_report.title(case)}, {case['variant']}", ""]
        lines += rows(f"micro-batch{whole_report.mark(case)} | tokens/s/GPU | peak | the allocator's retries", cells)
        lines += [""]
    return whole_report.with_notes(lines[:-1], found["cases"])


def small_whole(found: Result) -> list[str]:
    """Tokens a second and GPU, and peaks: a line for each micro-batch, a column for each variant, BF16 is 1."""
    lines: list[str] = []
    groups = whole_report.groups(found["cases"]).values()
    for cases in groups:
        lines += [f"### {whole_report.title(cases[0])}", ""] if len(groups) > 1 else []
        lines += [*_by_micro_batch(cases), ""]
    return whole_report.with_notes(lines[:-1], found["cases"])


def _by_micro_batch(cases: Sequence[dict[str, Any]]) -> list[str]:
    by = [{step["micro_batch"]: step for step in one["steps"]} for one in cases]
    bf16 = next(((case, steps) for case, steps in zip(cases, by, strict=True) if case["variant"] == "BF16"), None)
    lines = []
    for size in sorted({size for steps in by for size in steps}):
        cells = []
        for case, steps in zip(cases, by, strict=True):
            if (one := steps.get(size)) is None:
                cells.append("")
                continue
            speed, ratio = one["tokens_per_second_per_gpu"], ""
            if bf16 is not None and size in bf16[1] and whole_report.of_one_code(bf16[0], case):
                ratio = f" ({speed / bf16[1][size]['tokens_per_second_per_gpu']:.2f})"
            cells.append(", ".join(filter(None, [number(speed) + ratio, peak(one)])))
        lines.append(f"{size} | " + " | ".join(cells))
    return rows("micro-batch | " + " | ".join(one["variant"] + whole_report.mark(one) for one in cases), lines)


def peak(step: dict[str, Any]) -> str:
    """Of memory; empty where no GPU's was measured."""
    return f"{step['peak_bytes'] / GIB:.1f} GiB" if "peak_bytes" in step else ""


def step(*found: Result) -> list[str]:
    """A column for each result."""
    kinds = {kind: 0.0 for one in found for kind in one["kernels"]}
    for one in found:
        for kind, row in one["kernels"].items():
            kinds[kind] = max(kinds[kind], row["ms"])

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name} | " + " | ".join(cells)

    def traced(key: Callable[[Result], float]) -> list[str]:
        return [f"{key(one['gpu']) / one['gpu']['steps']:.1f} ms" for one in found]

    lines = [line("a step, by the clock", [f"{one['wall_ms']:.1f} ms" for one in found])]
    for kind in sorted(kinds, key=lambda name: -kinds[name]):
        cells = [f"{one['kernels'][kind]['ms']:.1f} ms" if kind in one["kernels"] else "" for one in found]
        lines.append(line(f"GPU: {kind}", cells))
    lines += [
        line("GPU: communication and nothing else", traced(lambda gpu: gpu["communication_alone_ms"])),
        line("GPU: nothing", traced(lambda gpu: gpu["span_ms"] - gpu["busy_ms"])),
    ]
    for phase in found[0]["alone"]:
        both = [one["alone"][phase] for one in found]
        lines.append(
            line(f"{phase} alone: host, done", [f"{b['host_ms']:.1f} ms, {b['done_ms']:.1f} ms" for b in both])
        )
    heads = [VARIANTS.get(one["settings"]["variant"], one["settings"]["variant"]) for one in found]
    return rows(line("", heads), lines)


def over_four(found: Result) -> list[str]:
    lines = []
    for one in found["results"]:
        runs = one["runs"]
        lines += [
            f"{one['preset']}, {name} | {run['ms']:.2f} ms | {run['ratio_to_bf16']:.3f}" for name, run in runs.items()
        ]
    return rows("layer, TP 4 with sequence parallelism | forward + backward | to BF16", lines)


def amax_collectives(found: Result) -> list[str]:
    """All-reduces of a layer under sequence parallelism: amaxes, and gradients of norms."""
    lines = []
    for one in found["results"]:
        for name, run in one["runs"].items():
            both = list(run["times"].values())
            spent = sum(part["kinds"].get("all-reduce", {"us": 0.0})["us"] for part in both)
            span = sum(part["span_us"] for part in both)
            lines.append(f"{one['preset']}, {name} | {spent:.0f} µs | {span:.0f} µs | {percent(spent / span)}")
    return rows("layer | all-reduces | all | share", lines)


def layouts(found: Result) -> list[str]:
    lines = [
        f"{one['layout']} | {one['losses'][-1]:.4f} | {percent(one['largest_loss_gap'])} | "
        f"{percent(one['last_ten_loss_gap'], signed=True)}"
        for one in found["runs"]
    ]
    return rows("layout of the ranks | last loss | largest gap of a step | gap, last ten", lines)


VARIANTS = {"both": "coat", **NAMES}
"""Of ``step.py``, in tables."""
