"""The planner's answers as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from .gpus import GPU
from .run import Run
from .search import MARGIN, fits, largest_micro_batch, need, savings, with_block, without_block
from .speed import StepTime, step_time
from .zero import states

__all__ = ["answer", "show", "size", "table", "text"]

GIB = 2**30
_ACCURACY = (
    "memory: within 5 % of measured peaks, 10 % of a 1B model's; time: within about 20 %, but up "
    "to 2.4 times as long "
    "where the host sets the pace, as with micro-batches of 1 and 2 of 1B (docs/memory.md)"
)
_GPUS_OF_A_NODE = 8
_LEAST_WIDTH = 1024
"""Hidden size below which no times are given: the smallest model whose times were measured has
it.
"""
_ORDER = {
    "parameters": "",
    "gathered parameters": "parameters, gathered (ZeRO-3)",
    "cached FP8 weights": "",
    "master weights": "",
    "moments": "",
    "gradients": "",
    "BF16 gradients beside fp32 sums": "",
    "gradients outside of the buckets": "",
    "DeepSpeed's buckets": "",
    "DeepSpeed's reduction": "DeepSpeed's copies of a bucket",
    "activations": "activations (saved for backward)",
    "logits": "logits and their gradients",
    "computing": "temporary, of backward or step",
    "temporary": "gradient of the residual stream",
    "tables, batch, workspaces": "",
}
"""Order of a table's rows, and their labels where these are longer than the keys."""


def size(number: int) -> str:
    """Bytes for a reader."""
    return f"{number / GIB:.2f} GiB" if abs(number) >= GIB / 10 else f"{number / 2**20:.1f} MiB"


def table(run: Run, gpu: GPU | None = None) -> str:
    """What is held at the peak and what is added to it, a line each."""
    needed = need(run, gpu)
    peak = needed.peak
    rows = [(label or key, peak.held[key]) for key, label in _ORDER.items() if peak.held.get(key)]
    rows += [(key, number) for key, number in peak.held.items() if key not in _ORDER]
    rows += [
        ("= peak allocated by torch", peak.allocated),
        ("+ allocator: pools of two streams", peak.reserved - peak.allocated),
        ("+ not torch's: CUDA, NCCL, kernels", needed.not_torchs),
        (f"+ margin, {MARGIN:.0%}", needed.margin),
        ("= needed", needed.total),
    ]
    lines = [f"{'memory of the rank that needs most':<40}{'GiB':>9}"]
    lines += [f"  {name:<38}{number / GIB:>9.2f}" for name, number in rows]
    return "\n".join([*lines, f"  the peak is in {peak.moment}"])


def _variant(run: Run, name: str, gpu: GPU) -> dict[str, Any]:
    largest, needed = largest_micro_batch(run, gpu), need(run, gpu)
    result: dict[str, Any] = {
        "name": name,
        "micro_batch": run.micro,
        "peak_allocated_bytes": needed.peak.allocated,
        "peak_reserved_bytes": needed.peak.reserved,
        "needed_bytes": needed.total,
        "fits": needed.total <= gpu.memory,
        "largest_micro_batch": largest,
    }
    if largest:
        result["at_largest"] = _speed(run.but(micro=largest), gpu)
    return result | _speed(run, gpu)


def _time(run: Run, gpu: GPU) -> StepTime | None:
    return step_time(run, gpu) if run.model.hidden_size >= _LEAST_WIDTH else None


def _speed(run: Run, gpu: GPU) -> dict[str, Any]:
    time = _time(run, gpu)
    return {
        "step_seconds": time and time.seconds,
        "tokens_per_second_per_gpu": time and time.tokens_per_second_per_gpu,
    }


def answer(run: Run, gpu: GPU) -> dict[str, Any]:
    """Everything that the planner prints, as plain values; sizes in bytes, times in seconds."""
    needed, found, time = need(run, gpu), states(run), _time(run, gpu)
    return {
        "gpu": {"name": gpu.name, "memory_bytes": gpu.memory, "rates_measured": gpu.measured},
        "ranks": {"gpus": run.dp * run.tp, "data_parallel": run.dp, "tensor_parallel": run.tp},
        "zero_stage": run.stage,
        "micro_batch": run.micro,
        "gradient_accumulation_steps": run.accumulation,
        "parameters_per_rank": found.elements,
        "states_bytes": {
            "parameters": found.weights,
            "gradients": found.gradients,
            "master weights": found.master,
            "moments": found.moments,
        },
        "peak": {
            "moment": needed.peak.moment,
            "held_bytes": needed.peak.held,
            "allocated_bytes": needed.peak.allocated,
            "reserved_bytes": needed.peak.reserved,
            "not_torchs_bytes": needed.not_torchs,
            "margin_bytes": needed.margin,
            "needed_bytes": needed.total,
            "phases_bytes": needed.peak.other_peaks,
        },
        "fits": fits(run, gpu),
        "largest_micro_batch": largest_micro_batch(run, gpu),
        "with_block": _variant(with_block(run), "with the block", gpu),
        "without_block": _variant(without_block(run), "without", gpu),
        "step": time
        and {"seconds": time.seconds, "parts_seconds": time.parts, "tokens": time.tokens},
        "tokens_per_second_per_gpu": time and time.tokens_per_second_per_gpu,
        "savings": [{"setting": one.what, "bytes": one.bytes} for one in savings(run)],
        "notes": [*run.notes, *_notes(run, gpu)],
        "accuracy": _ACCURACY,
    }


def _notes(run: Run, gpu: GPU) -> list[str]:
    rates = f"rates of {gpu.name} follow from a measured H200 by the ratio of data sheets"
    links = f"times are those of links within one node, also with more than {_GPUS_OF_A_NODE} GPUs"
    away = f"{states(run).hosted / GIB:.1f} GiB of a rank's states are in host memory"
    small = (
        f"no times: the hidden size is {run.model.hidden_size}, and rates were measured from "
        f"{_LEAST_WIDTH} on"
    )
    notes = [away] * run.hosted
    if run.model.hidden_size < _LEAST_WIDTH:
        return [*notes, small]
    return notes + [rates] * (not gpu.measured) + [links] * (run.dp * run.tp > _GPUS_OF_A_NODE)


def text(run: Run, gpu: GPU) -> str:
    """The answer for a reader."""
    found = answer(run, gpu)
    ranks = f"{run.dp} data- x {run.tp} tensor-parallel ranks" + (
        " (sequence parallel)" if run.shared > 1 else ""
    )
    verdict, needed = (
        "fits" if found["fits"] else "DOES NOT FIT",
        found["peak"]["needed_bytes"] / GIB,
    )
    lines = [
        f"{found['parameters_per_rank']:,} parameters a rank before ZeRO-{run.stage}; {ranks}; "
        f"micro-batch {run.micro} "
        f"of {run.model.seq_length} tokens, {run.accumulation} a step",
        table(run, gpu),
        f"{verdict}: needs {needed:.1f} GiB of {gpu.memory / GIB:.1f} GiB ({gpu.name})",
        "",
        f"{'':<18}{'allocated':>11}{'needed':>9}{'fits':>6}{'largest':>9}{'step':>10}{'tokens/s/GPU':>14}"
        f"{'at the largest':>16}",
    ]
    for key in ("with_block", "without_block"):
        one = found[key]
        at, step, speed = "-", "-", "-"
        if found["step"] and one["largest_micro_batch"]:
            at = f"{one['at_largest']['tokens_per_second_per_gpu']:,.0f}"
        if found["step"] and one["fits"]:
            step, speed = (
                f"{1e3 * one['step_seconds']:.0f} ms",
                f"{one['tokens_per_second_per_gpu']:,.0f}",
            )
        lines.append(
            f"{one['name']:<18}{one['peak_allocated_bytes'] / GIB:>11.1f}"
            f"{one['needed_bytes'] / GIB:>9.1f}"
            f"{'yes' if one['fits'] else 'no':>6}{one['largest_micro_batch'] or 'none':>9}"
            f"{step:>10}{speed:>14}{at:>16}"
        )
    lines.append("")
    if found["step"] and found["fits"]:
        parts = ", ".join(
            f"{key} {1e3 * value:.0f}" for key, value in found["step"]["parts_seconds"].items()
        )
        lines.append(f"a step of {1e3 * found['step']['seconds']:.0f} ms: {parts}")
    if found["savings"]:
        lines.append("what would save most:")
        lines += [f"  {size(one['bytes']):>11}  {one['setting']}" for one in found["savings"]]
    lines += [f"note: {note}" for note in found["notes"]]
    return "\n".join([*lines, found["accuracy"]])


def show(run: Run, gpu: GPU, as_json: bool) -> None:
    """Print the answer."""
    print(json.dumps(answer(run, gpu), indent=2) if as_json else text(run, gpu), flush=True)
