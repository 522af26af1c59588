"""The tables of docs/results.md and README: the results of each, what measures these, and what renders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results_render as render
from benchmarks.common import RESULTS, read_json
from benchmarks.measured_code import GRAPHS, USUAL, same_code

__all__ = ["DAMAGED", "PEERS", "TABLES", "Table", "is_current", "lines_of", "read"]

Result = dict[str, Any]
DAMAGED = ArithmeticError, LookupError, TypeError, AttributeError
"""What reading a result raises that is not as its command writes it."""


class Table(NamedTuple):
    """One table of the page."""

    results: dict[str, tuple[str, ...]]
    """Files in ``benchmarks/results/speed``, or another room, without their suffix, and the commands that measure each.
    PEERS in them is ``--peers``; with a question mark it may be left out."""
    render: Callable[..., list[str]]
    """Markdown lines of the files' contents, in their order."""
    seconds: float = 120
    """What one command takes, roughly."""
    goes_on: bool = False
    """The program itself knows what is left to be measured."""
    on: str = "H200"
    """Part of the name of the GPU that the page says the table is about."""
    code: tuple[str, ...] = USUAL
    """The parts of the library whose change outdates it."""


RUN = "-m benchmarks.speed."
PEERS = "PEERS"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node "
ONE, TWO, FOUR = (f"{TORCHRUN}{count} {RUN}" for count in (1, 2, 4))
FLOW, OPTIMIZER = ("flow",), ("optimizer",)
PRESETS = "layer --presets llama2-7b llama2-13b llama3-8b olmo-1b --kernels 0 "
TRAIN_TP = (
    "train --ranks 2 --tensor-parallel 2 --micro-batch 2 4 --steps 26 --configs 'TE bf16' zero2 'zero2 over NCCL' "
)
PEERS_7B = "layer --variants coat 'coat saved in e4m3' --name "
TABLES = {
    "train": Table({"train-2-ranks": (RUN + "train --ranks 2 PEERS?",)}, render.train, seconds=360),
    "step": Table(
        {
            "step-te-fp8": (TWO + "step --variant 'TE fp8 delayed' --name step-te-fp8 PEERS",),
            "step": (TWO + "step",),
        },
        render.step,
        seconds=90,
    ),
    "train_one": Table({"train-1-rank": (RUN + "train --ranks 1 PEERS?",)}, render.train, seconds=300),
    "train_remainder": Table(
        {
            "train-remainder": (
                RUN + "train --ranks 1 --configs zero2-bf16 zero2 zero2-remainder --name train-remainder",
            )
        },
        render.train,
        seconds=200,
    ),
    "step_one": Table(
        {
            "step-1-rank-te-fp8": (ONE + "step --variant 'TE fp8 delayed' --name step-1-rank-te-fp8 PEERS",),
            "step-1-rank": (ONE + "step --name step-1-rank",),
        },
        render.step,
        seconds=90,
    ),
    "layer": Table({"layer-peers-7b": (RUN + PEERS_7B + "layer-peers-7b PEERS",)}, render.layer, code=FLOW),
    "layer_presets": Table(
        {
            "layer": (RUN + PRESETS + "--tokens 16384",),
        },
        render.layer_presets,
        code=FLOW,
    ),
    "layer_graphs": Table(
        {"layer-4096": (RUN + PRESETS + "--tokens 4096 --variants coat 'coat cuda graphs' --name layer-4096",)},
        render.layer_graphs,
        code=(*FLOW, GRAPHS),
    ),
    "layers": Table(
        {
            "tp-layer": (TWO + "tp_layer --variants coat 'coat over NCCL' PEERS",),
            "experts": (RUN + "experts --kernels 0",),
        },
        render.layers,
        code=FLOW,
    ),
    "train_tp": Table({"train-tp-2": (RUN + TRAIN_TP + "--name train-tp-2 PEERS",)}, render.train_tp, seconds=360),
    "engine_step": Table(
        {"engine-step-zero2-2-ranks": (TWO + "engine_step",)}, render.engine_step, code=(*OPTIMIZER, "deepspeed")
    ),
    "engine_step_one": Table(
        {"engine-step-zero2-1-rank": (ONE + "engine_step",)}, render.engine_step, code=(*OPTIMIZER, "deepspeed")
    ),
    "optimizer": Table({"optimizer": (RUN + "optimizer",)}, render.optimizer, code=OPTIMIZER),
    "pipeline": Table({"pipeline-2-stages": (TWO + "pipeline",)}, render.pipeline, seconds=200),
    "whole": Table(
        {
            "whole": (
                RUN + "whole --ranks 2 PEERS",
                RUN + "whole --ranks 2 --gpu-memory 80 PEERS",
                RUN + "whole --ranks 1 PEERS",
                RUN + "whole --ranks 1 --gpu-memory 80 --models llama2-7b PEERS",
            )
        },
        render.whole,
        goes_on=True,
    ),
    "micro_batches": Table(
        {
            "micro-batches": (
                RUN + "whole --ranks 1 --models llama2-7b --model-override num_layers=8 --variants both "
                "--micro-batches 2 4 6 8 9 10 11 12 14 16 --name micro-batches",
            )
        },
        render.micro_batches,
        goes_on=True,
    ),
    "small_whole": Table(
        {
            "whole-small": (
                RUN + "whole --ranks 1 --models olmo-1b --variants BF16 both 'both, CUDA graphs' "
                "--micro-batches 1 2 4 8 --name whole-small",
            )
        },
        render.small_whole,
        goes_on=True,
    ),
    "four_whole": Table(
        {
            "whole-4": tuple(
                f"{RUN}whole --ranks 4 --gpu-memory 80 --models llama2-13b --variants BF16 both --stage {stage} "
                "--name whole-4"
                for stage in (2, 3)
            )
        },
        render.whole,
        goes_on=True,
    ),
    "four_layers": Table(
        {
            "tp-layer-4": (
                FOUR + "tp_layer --presets llama2-13b llama3-70b --variants coat 'coat over NCCL' --name tp-layer-4",
            )
        },
        render.over_four,
        code=FLOW,
    ),
    "four_amaxes": Table(
        {"collectives-4": (FOUR + "collectives --presets llama2-13b llama3-70b --variants coat --name collectives-4",)},
        render.amax_collectives,
        code=FLOW,
    ),
    "four_layouts": Table(
        {"convergence/layouts-4-ranks": ("-m benchmarks.convergence.layouts --ranks 4",)}, render.layouts, seconds=200
    ),
    "h100_layer": Table({"layer-h100": (RUN + PEERS_7B + "layer-h100 PEERS",)}, render.layer, on="H100", code=FLOW),
    "h100_optimizer": Table(
        {"optimizer-h100": (RUN + "optimizer --name optimizer-h100",)}, render.optimizer, on="H100", code=OPTIMIZER
    ),
    "h100_whole": Table(
        {
            "whole-h100": (
                # Transformer Engine has no norms without weights, as this one's are.
                RUN + "whole --ranks 1 --models olmo-1b --name whole-h100 "
                "--variants BF16 'optimizer only' 'flow only' both 'both, FP8 attention'",
                RUN + "whole --ranks 1 --models llama2-7b --name whole-h100 PEERS",
                RUN + "whole --ranks 2 --models llama2-7b llama3-8b llama2-13b --name whole-h100 PEERS",
            )
        },
        render.whole,
        goes_on=True,
        on="H100",
    ),
    "h100_train_tp": Table(
        {"train-tp-2-h100": (RUN + TRAIN_TP + "--name train-tp-2-h100 PEERS",)}, render.train_tp, seconds=360, on="H100"
    ),
    "h100_pipeline": Table(
        {"pipeline-2-stages-h100": (TWO + "pipeline --name pipeline-2-stages-h100",)},
        render.pipeline,
        seconds=200,
        on="H100",
    ),
}
"""By their names in the page; in the order in which they are measured."""


def read(name: str, results: Path = RESULTS) -> Result | None:
    """A result; None where there is none. A name without a room is of ``speed``: "optimizer", "accuracy/moments".

    Raises:
        ValueError: the file is damaged; names it.
    """
    file = results / f"{name if '/' in name else f'speed/{name}'}.json"
    if not file.is_file():
        return None
    if lacks := _lacks(found := read_json(file), any(t.goes_on and name in t.results for t in TABLES.values())):
        accepted = "what its command writes; remove it, and it is measured again"
        raise ValueError(f"{file}: lacks {lacks}, accepted: {accepted}")
    return found


def _lacks(found: Any, goes_on: bool) -> str | None:
    """What every result has and this one has not, or of a program that goes on what its cases are known by."""
    about = found.get("environment") if isinstance(found, dict) else None
    if not isinstance(about, dict) or "commit" not in about:
        return "`environment` with `commit`"
    for key in ("cases", "runs"):
        if key in found and not (isinstance(found[key], list) and all(isinstance(one, dict) for one in found[key])):
            return f"records in `{key}`"
    if found.get("runs") == []:
        return "records in `runs`"
    if goes_on:
        from benchmarks.speed.whole import KEY

        if "cases" not in found:
            return "`cases`"
        if missing := next((key for one in found["cases"] for key in (*KEY, "measured") if key not in one), None):
            return f"`{missing}` in one of its cases"
    return None


def is_current(found: Result, parts: Sequence[str] = USUAL) -> bool:
    """Whether a result was measured with the code that is here, as far as ``parts`` of it go."""
    return same_code(found["environment"].get("code"), parts)


def lines_of(table: Table, results: Path = RESULTS) -> list[str]:
    """What stands in the page for a table."""
    found = {name: read(name, results) for name in table.results}
    if missing := [name for name, one in found.items() if one is None]:
        return [f"Not measured yet: {', '.join(f'`{name}.json`' for name in missing)}."]
    try:
        lines = table.render(*found.values())
    except DAMAGED as problem:
        files, why = ", ".join(f"{name}.json" for name in found), f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{files} in {results}: {why}; accepted: results as their commands write them") from problem
    old = {
        name: str(one["environment"]["commit"])[:7]
        for name, one in found.items()
        if one and not is_current(one, table.code)
    }
    if old and not table.goes_on:  # it marks its cases
        lines += [
            "",
            f"Of earlier code: {', '.join(f'`{name}.json`, commit {commit}' for name, commit in old.items())}.",
        ]
    return lines
