"""README's part of the results: tables of the present code alone, three at most; ``results_page.py`` writes it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, ROOT, number
from benchmarks.results_render import percent
from benchmarks.results_tables import TABLES, is_current, read
from benchmarks.speed import whole_report

__all__ = [
    "FIGURE",
    "FIGURES",
    "README",
    "gpus",
    "in_readme",
    "listed",
    "llama2_7b",
    "loss_gaps",
    "readme_part",
    "table",
    "wrapped",
]

README = ROOT / "README.md"
FIGURES = ROOT / "docs/figures"
FIGURE = "speed-whole.png"
MOST = 3
"""Tables."""
PAGE = "[docs/results.md](docs/results.md)"
GRADIENTS = {
    "random": "where gradients are random",
    "spread": "where their size varies within a group of 128",
    "sparse": "where most steps have none",
}
"""Scenarios of ``benchmarks/accuracy/trajectories.py``."""
COUNTS = {1: "one", 2: "two", 4: "four", 8: "eight"}


class Section(NamedTuple):
    """One candidate for README."""

    name: str
    """In sentences."""
    lines: Callable[[Path, Path], list[str]]
    """Of folders with results and figures; none if any number of it is missing or of other code."""


def gpus(found: dict[str, Any], count: int) -> str:
    """two H200s"""
    name = (found["environment"]["gpus"] or ["CPU"])[0].removeprefix("NVIDIA ")
    return f"{COUNTS.get(count, count)} {name}{'s' if count > 1 else ''}"


def table(name: str, results: Path) -> tuple[dict[str, Any], list[str]] | None:
    """A table's only result, and its lines; None unless the present code was measured."""
    wanted = TABLES[name]
    (file,) = wanted.results
    found = read(file, results)
    return (found, wanted.render(found)) if found is not None and is_current(found, wanted.code) else None


def train(results: Path, figures: Path) -> list[str]:
    """On two GPUs, otherwise on one."""
    if (current := table("train", results) or table("train_one", results)) is None:
        return []
    found, lines = current
    given = found["settings"]
    sizes = given["micro_batch"] if isinstance(given["micro_batch"], list) else [given["micro_batch"]]
    if given.get("tensor_parallel", 1) > 1 or len(sizes) > 1:  # another command wrote it, without a name of its own
        return []
    peers = any(one["config"].startswith("TE") for one in found["runs"])
    text = (
        f"**Training, end to end.** {given['layers']} Llama-2-7B layers, vocabulary {number(given['vocabulary'])}, "
        f"micro-batch {sizes[0]} × 4096 tokens, ZeRO-2, {gpus(found, given['ranks'])}, "
        f"{given['steps']} steps on real text. The same program with the block, without it"
        f"{' and with the layers of Transformer Engine' if peers else ''}; losses are compared with BF16 without it."
    )
    return [wrapped(text), "", *lines]


def llama2_7b(cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Of cases those of Llama-2-7B with all memory of the GPUs, finished ones of the present code: by number of GPUs,
    most of them first, where both ends of the comparison are there."""
    wanted = [
        one
        for one in cases
        if whole_report.current(one) and (one["model"], one["override"], one["gpu_memory"]) == ("llama2-7b", [], None)
    ]
    groups = sorted(whole_report.groups(wanted).values(), key=lambda group: -group[0]["ranks"])
    return [group for group in groups if {"BF16", "both"} <= {one["variant"] for one in group}]


def whole(results: Path, figures: Path) -> list[str]:
    """Llama-2-7B, each variant at its largest micro-batch."""
    cases = (read("whole", results) or {"cases": []})["cases"]
    if not (groups := llama2_7b(cases)):
        return []
    group = groups[0]
    of_so_many = [
        one
        for one in cases
        if whole_report.current(one) and whole_report.group_of(one) == whole_report.group_of(group[0])
    ]
    text = (
        f"**A whole model.** {whole_report.title(group[0])}, random tokens, sequences of 4096: each variant's largest "
        "of the micro-batches that were tried. Both: FP8 moments and FP8 flow; remainders: the configuration "
        "`zero2-remainder`. Retries are those of torch's allocator in five steps, near the end of memory. Each variant "
        "ran alone, perhaps on another machine of that kind."
    )
    lines = [wrapped(text), "", *whole_report.with_notes(whole_report.largest(group), of_so_many)]
    if all(map(whole_report.current, cases)) and (figures / FIGURE).is_file():
        lines += ["", f"![Tokens a second over the micro-batch](docs/figures/{FIGURE})"]
    return lines


def layer(results: Path, figures: Path) -> list[str]:
    if (current := table("layer", results)) is None:
        return []
    found, lines = current
    return [f"**One layer** of Llama-2-7B, batch 4 × 4096, {gpus(found, 1)}, forward and backward.", "", *lines]


def optimizer(results: Path, figures: Path) -> list[str]:
    if (current := table("optimizer", results)) is None:
        return []
    found, lines = current
    return [f"**The optimizer's step** on a flat fp32 shard and on many tensors, {gpus(found, 1)}.", "", *lines]


SECTIONS = (
    Section("training end to end", train),
    Section("a whole model", whole),
    Section("one layer", layer),
    Section("the optimizer's step", optimizer),
)


def accuracy(results: Path) -> list[str]:
    """What was found about losses and moments with the present code."""
    text = []
    if (branches := read("convergence/branches", results)) is not None and (how := _still_holds(branches, results)):
        given = branches["settings"]
        gap, spread = _gaps(branches)
        text = [
            "**Losses.** What the FP8 flow costs: a model of 64 M parameters was trained to step "
            f"{given['branch_at']} of {given['steps']} in BF16, and from there in both ways. Its held-out loss ended "
            f"**{percent(gap['held_out_loss_gap'], True)} ± {percent(spread['held_out_loss_error'])}** above BF16's, "
            f"{percent(gap['bf16_held_out_loss_gap'], True)} evaluated in BF16 ({len(gap['trunks'])} seeds; "
            f"{how}; [how, and what it leaves out](docs/flow.md#branches))."
        ]
    trajectories = read("accuracy/trajectories", results)
    if trajectories is not None and is_current(trajectories, TABLES["optimizer"].code):
        row = trajectories["rows"][0]
        errors = [f"{percent(row[f'{one} 2000 error'])} {words}" for one, words in GRADIENTS.items()]
        text += [
            "**FP8 moments**, beside torch's AdamW in fp32 with the same gradients: after 2000 steps parameters have "
            f"moved as far up to an error of {listed(errors)} (root mean square; β = {row['betas']}; "
            "[docs/numerics.md](docs/numerics.md#trajectories) has the scenarios, and those where they do less well)."
        ]
    return text


def loss_gaps(results: Path) -> str:
    """What the flow costs in held-out loss, with the errors over seeds, for the page of all results."""
    if (branches := read("convergence/branches", results)) is None:
        return "not measured yet"
    gap, errors = _gaps(branches)
    shown = (
        f"**{percent(gap[f'{key}_gap'], True)} ± {percent(errors[f'{key}_error'])}** {words}"
        for key, words in {
            "held_out_loss": "as trained",
            "bf16_held_out_loss": "with the trained weights in BF16 layers",
        }.items()
    )
    return f"{', '.join(shown)} ({len(gap['trunks'])} seeds)"


def _gaps(branches: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Means over seeds of the flow's differences in loss, and their errors."""
    gap, errors = (
        next(one for one in branches[key] if one["variant"] == "row scales") for key in ("gaps", "gaps_by_trunk")
    )
    return gap, errors


def _still_holds(losses: dict[str, Any], results: Path) -> str:
    """Why losses are those of the present code; empty if they are not known to be."""
    commit = str(losses["environment"]["commit"])
    if is_current(losses):
        return f"commit {commit[:7]}"
    same = read("convergence/same-bits", results)
    if same is None or not is_current(same) or same["first_difference"] is not None:
        return ""
    if not commit.startswith(same["settings"]["commit"]):
        return ""
    where = gpus(same, 1) if same["environment"]["gpus"] else "a CPU"
    return (
        f"measured at commit {commit[:7]}, and on {where} the present code takes {len(same['now'])} steps with the "
        "same losses and gradient norms as that one, to the last bit"
    )


def listed(names: list[str]) -> str:
    """a, b and c"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def readme_part(results: Path = RESULTS, figures: Path = FIGURES) -> str:
    """What stands between the two marks."""
    lines = {section.name: section.lines(results, figures) for section in SECTIONS}
    current = [name for name, found in lines.items() if found]
    rest = [name for name, found in lines.items() if not found]
    if not current:
        state = " Tables of the present code are shown here too; at the moment there are none."
    elif rest:
        verb = "has" if len(rest) == 1 else "have"
        state = f" Here are those of the present code; {listed(rest)} {verb} not been measured with it yet."
    else:
        state = " Here are some, all of the present code."
    text = [wrapped(f"{PAGE} has every table, with its command and the code it was measured with.{state}")]
    for name in current[:MOST]:
        text += ["", *lines[name]]
    if more := current[MOST:]:
        text += ["", f"Also measured with the present code: {listed(more)}."]
    if losses := accuracy(results):
        text += ["", wrapped(" ".join(losses))]
    return "\n".join(text)


def wrapped(text: str) -> str:
    """In lines as the rest of README has them."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def in_readme(text: str, part: str, name: str = "results") -> str:
    """README with another part between the two marks of a name.

    Raises:
        ValueError: there are no marks, or several.
    """
    begin, end = f"<!-- {name}: begin; written by python -m benchmarks.results_page -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md: accepted: one {begin!r} and one {end!r}")
    return re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{part}\n{end}", text)
