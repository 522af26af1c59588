"""Results of an evaluation: numbers of each kind of input, a table, files, and differences from
another evaluation.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, write_text
from launch.evaluation import choices
from launch.evaluation.rows import Row, digest
from launch.log_level import say

__all__ = [
    "choices_result",
    "comparison",
    "differences",
    "not_in",
    "read_report",
    "table",
    "tokens_result",
    "write_report",
]

FORMAT = 1
NAME, DETAILS = "evaluation.json", "details.jsonl"
KINDS = ("text", "data", "choices")


def estimate(
    sums: Sequence[float], counts: Sequence[int] | None = None
) -> tuple[float, float | None]:
    """Mean per token of rows, and its standard error with rows as independent units (the usual
    ratio estimator).

    Args:
        sums: of each row, over its tokens; the sum of all is exact, so that it does not depend on
            the order.
        counts: tokens of each row; None = 1 each, which gives the mean and its standard error.

    Returns:
        The error is None for one row.
    """
    counts = counts or [1] * len(sums)
    n, total = len(sums), sum(counts)
    center = math.fsum(sums) / total
    if n < 2:
        return center, None
    spread = math.fsum((s - center * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return center, math.sqrt(spread * n / (n - 1)) / total


def tokens_result(
    name: str, rows: Sequence[Row], sums: Sequence[float], text_bytes: int | None = None
) -> dict[str, Any]:
    """Loss and perplexity of rows of text or data; ``sums`` are the losses of their scored
    tokens, in nats.
    """
    counts = [row.scored for row in rows]
    loss, error = estimate(sums, counts)
    return {
        "name": name,
        "loss": loss,
        "loss_stderr": error,
        "perplexity": math.exp(loss) if loss < 700 else None,  # beyond, fp64 overflows
        "bits_per_byte": None if text_bytes is None else math.fsum(sums) / math.log(2) / text_bytes,
        "tokens_scored": sum(counts),
        "rows": len(rows),
        "digest": digest(rows),
        "row_losses": list(sums),
        "row_tokens": counts,
    }


def choices_result(
    name: str, questions: Sequence[choices.Question], sums: Sequence[float]
) -> dict[str, Any]:
    """Accuracies of a file of questions; ``sums`` are the losses of all their choices, in nats."""
    likelihoods, details = iter([-value for value in sums]), []
    for question in questions:
        own = list(itertools.islice(likelihoods, len(question.choices)))
        found = {"question": question.where, "answer": question.answer, "loglikelihoods": own}
        details.append(
            {
                **found,
                "chosen": choices.best(own),
                "chosen_norm": choices.best(own, question.choices),
            }
        )
    right, right_norm = (
        [int(one[key] == one["answer"]) for one in details] for key in ("chosen", "chosen_norm")
    )
    (acc, error), (acc_norm, error_norm) = estimate(right), estimate(right_norm)
    return {
        "name": name,
        "acc": acc,
        "acc_stderr": error,
        "acc_norm": acc_norm,
        "acc_norm_stderr": error_norm,
        "questions": len(questions),
        "choices": len(sums),
        "digest": choices.digest(questions),
        "correct": right,
        "correct_norm": right_norm,
        "details": details,
    }


def write_report(folder: str, report: Mapping[str, Any], details: bool) -> Path:
    """Write ``evaluation.json``, and ``details.jsonl`` before it if asked to; each is written
    atomically.

    An earlier evaluation, with which others may be compared, is renamed.

    Raises:
        CoatConfigError: the folder cannot be written.
    """
    lines = []
    for kind in KINDS:
        for one in report[kind]:
            found = one.get("details") or [
                {"row": i, "loss": loss, "tokens": count}
                for i, (loss, count) in enumerate(
                    zip(one["row_losses"], one["row_tokens"], strict=True)
                )
            ]
            lines += [json.dumps({"kind": kind, "name": one["name"], **line}) for line in found]
    content = {
        **report,
        "choices": [{k: v for k, v in one.items() if k != "details"} for one in report["choices"]],
    }
    try:
        make_folder(Path(folder))
        _set_aside(Path(folder))
        if details:
            write_text(Path(folder, DETAILS), "\n".join(lines) + "\n")
        write_text(Path(folder, NAME), json.dumps(content, indent=1) + "\n")
    except OSError as problem:
        raise CoatConfigError(
            f"--output: got {folder}, accepted: a folder to write to ({problem})"
        ) from None
    return Path(folder, NAME)


def _set_aside(folder: Path) -> None:
    """Rename an earlier evaluation: ``evaluation-1.json`` and ``details-1.jsonl``, or the next
    free number of both.
    """
    both = [folder / NAME, folder / DETAILS]
    for number in itertools.count(1):
        kept = [file.with_stem(f"{file.stem}-{number}") for file in both]
        if not any(file.exists() for file in kept):
            break
    for file, other in zip(both, kept, strict=True):
        if file.exists():
            file.rename(other)
            say(f"renamed: {file} is {other.name} now")


def read_report(option: str, given: str) -> dict[str, Any]:
    """An ``evaluation.json``, or that of a folder.

    Raises:
        CoatConfigError: it is none; names the option.
    """
    path = Path(given, NAME) if Path(given).is_dir() else Path(given)
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
        if report["format"] != FORMAT:
            raise ValueError(f"format {report['format']}")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CoatConfigError(
            f"{option}: got {path}, accepted: an evaluation.json ({problem!r})"
        ) from None
    return report


def table(report: Mapping[str, Any]) -> str:
    """The results for a reader."""
    lines = [("input", "what", "value", "standard error", "of")]
    for one in (*report["text"], *report["data"]):
        of, perplexity, bits = (
            f"{one['tokens_scored']:,} tokens",
            one["perplexity"],
            one["bits_per_byte"],
        )
        shown = (
            "too large"
            if perplexity is None
            else f"{perplexity:.4f}"
            if perplexity < 1e6
            else f"{perplexity:.4e}"
        )
        lines.append(
            (
                one["name"],
                "loss (nats/token)",
                f"{one['loss']:.6f}",
                _plus(one["loss_stderr"], 6),
                of,
            )
        )
        lines.append((one["name"], "perplexity", shown, "", of))
        if bits is not None:
            lines.append(
                (one["name"], "bits per byte", f"{bits:.6f}", "", f"{one['bytes']:,} bytes")
            )
    for one in report["choices"]:
        of = f"{one['questions']:,} questions"
        for key in ("acc", "acc_norm"):
            lines.append((one["name"], key, f"{one[key]:.4f}", _plus(one[f"{key}_stderr"], 4), of))
    return _aligned(lines)


def not_in(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """Names of the inputs that ``baseline`` does not have: other files, windows, tokens or
    questions.
    """
    there = {(kind, one["digest"]) for kind in KINDS for one in baseline[kind]}
    return [
        one["name"] for kind in KINDS for one in report[kind] if (kind, one["digest"]) not in there
    ]


def differences(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What ``report`` has more than ``baseline``, for every input that both have, with paired
    standard errors.

    Each row or question is compared with itself, so that what makes some harder for both models
    does not count.
    """
    found = []
    for kind in KINDS:
        others = {one["digest"]: one for one in baseline[kind]}
        values = (
            {"acc": "correct", "acc_norm": "correct_norm"}
            if kind == "choices"
            else {"loss": "row_losses"}
        )
        for one in (one for one in report[kind] if one["digest"] in others):
            other = others[one["digest"]]
            for key, each in values.items():
                change = [a - b for a, b in zip(one[each], other[each], strict=True)]
                difference, error = estimate(change, one.get("row_tokens"))
                found.append(
                    {
                        "name": one["name"],
                        "what": key,
                        "value": one[key],
                        "baseline": other[key],
                        "difference": difference,
                        "paired_stderr": error,
                    }
                )
    return found


def comparison(found: Sequence[Mapping[str, Any]]) -> str:
    """Differences for a reader."""
    lines = [("input", "what", "baseline", "value", "difference", "paired standard error")]
    for one in found:
        digits = 6 if one["what"] == "loss" else 4
        values = (
            f"{one['baseline']:.{digits}f}",
            f"{one['value']:.{digits}f}",
            f"{one['difference']:+.{digits}f}",
        )
        lines.append((one["name"], one["what"], *values, _plus(one["paired_stderr"], digits)))
    return _aligned(lines)


def _plus(error: float | None, digits: int) -> str:
    return "" if error is None else f"± {error:.{digits}f}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
