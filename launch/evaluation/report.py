"""What an evaluation says: numbers of each kind of input, a table, files, and differences from another evaluation."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, write_text
from launch.evaluation import rows as of_rows
from launch.evaluation.choices import Asked, Question, best
from launch.evaluation.choices import digest as digest_of_questions
from launch.evaluation.rows import Row
from launch.evaluation.statistics import mean, mean_error, ratio, ratio_error
from launch.log_level import say

__all__ = [
    "FORMAT",
    "choices_result",
    "differences",
    "digests",
    "not_in",
    "read_report",
    "table",
    "table_of_differences",
    "tokens_result",
    "write_report",
]

FORMAT = 1
NAME, DETAILS = "evaluation.json", "details.jsonl"
KINDS = ("text", "data", "choices")
_TOKENS = {"name", "digest", "loss", "row_losses", "row_tokens"}
_COMPARED = {"text": _TOKENS, "data": _TOKENS}
_COMPARED["choices"] = {"name", "digest", "acc", "acc_norm", "correct", "correct_norm"}
"""What two results are compared by."""


def tokens_result(name: str, rows: Sequence[Row], sums: Sequence[float], text_bytes: int | None) -> dict[str, Any]:
    """Loss and perplexity of rows of text or data.

    Args:
        sums: loss of each row's scored tokens, nats.
        text_bytes: UTF-8 bytes of the text; None = not known.
    """
    counts = [row.scored for row in rows]
    loss = ratio(sums, counts)
    bits = None if text_bytes is None else math.fsum(sums) / math.log(2) / text_bytes
    return {
        "name": name,
        "loss": loss,
        "loss_stderr": ratio_error(sums, counts),
        "perplexity": _exp(loss),
        "bits_per_byte": bits,
        "tokens_scored": sum(counts),
        "rows": len(rows),
        "digest": of_rows.digest(rows),
        "row_losses": list(sums),
        "row_tokens": counts,
    }


def choices_result(name: str, questions: Sequence[Question], asked: Asked, sums: Sequence[float]) -> dict[str, Any]:
    """Accuracies of a file of questions.

    Args:
        sums: loss of each choice, nats, in the order of ``asked.rows``.
    """
    right, right_normalized, picked = [], [], []
    at = 0
    for question in questions:
        likelihoods = [-value for value in sums[at : at + len(question.choices)]]
        at += len(question.choices)
        by_total, by_length = best(likelihoods), best(likelihoods, question.choices)
        right.append(int(by_total == question.answer))
        right_normalized.append(int(by_length == question.answer))
        picked.append((likelihoods, by_total, by_length))
    return {
        "name": name,
        "acc": mean(right),
        "acc_stderr": mean_error(right),
        "acc_norm": mean(right_normalized),
        "acc_norm_stderr": mean_error(right_normalized),
        "questions": len(questions),
        "choices": len(asked.rows),
        "truncated": asked.truncated,
        "digest": digest_of_questions(questions),
        "correct": right,
        "correct_norm": right_normalized,
        "details": [
            {
                "question": question.where,
                "answer": question.answer,
                "loglikelihoods": likelihoods,
                "chosen": by_total,
                "chosen_norm": by_length,
            }
            for question, (likelihoods, by_total, by_length) in zip(questions, picked, strict=True)
        ],
    }


def _exp(loss: float) -> float | None:
    try:
        return math.exp(loss)
    except OverflowError:
        return None


def write_report(folder: str, report: Mapping[str, Any], details: bool) -> Path:
    """Write ``evaluation.json``, and ``details.jsonl`` before it if asked to; each is there whole or not at all.

    Those of an evaluation before, with which others may be compared, stay under other names.

    Raises:
        CoatConfigError: the folder cannot be written.
    """
    lines = []
    for kind in KINDS:
        for one in report[kind]:
            found = one.get("details") or [
                {"row": i, "loss": loss, "tokens": count}
                for i, (loss, count) in enumerate(zip(one["row_losses"], one["row_tokens"], strict=True))
            ]
            lines += [json.dumps({"kind": kind, "name": one["name"], **line}) for line in found]
    content = {**report, "choices": [{k: v for k, v in one.items() if k != "details"} for one in report["choices"]]}
    moved: dict[Path, Path] = {}
    try:
        make_folder(Path(folder))
        _set_aside(Path(folder), moved)
        if details:
            write_text(Path(folder) / DETAILS, "\n".join(lines) + "\n")
        write_text(Path(folder) / NAME, json.dumps(content, indent=1) + "\n")
    except OSError as problem:
        for before, now in moved.items():
            with suppress(OSError):
                os.replace(now, before)
        raise CoatConfigError(f"--output: got {folder}, accepted: a folder to write to ({problem})") from None
    return Path(folder) / NAME


def _set_aside(folder: Path, moved: dict[Path, Path]) -> None:
    """Rename an evaluation that is there already: ``evaluation-1.json``, ``details-1.jsonl``, or the next number."""
    there = [file for name in (NAME, DETAILS) if os.path.lexists(file := folder / name)]

    def aside(file: Path, number: int) -> Path:
        return file.with_name(f"{file.stem}-{number}{file.suffix}")

    both = folder / NAME, folder / DETAILS  # one number means one evaluation, with details or without
    number = next(n for n in itertools.count(1) if not any(os.path.lexists(aside(file, n)) for file in both))
    for file in there:
        file.rename(aside(file, number))
        moved[file] = aside(file, number)
    for file in there:
        say(f"kept: what was in {file} is {moved[file].name} now")


def read_report(option: str, given: str) -> dict[str, Any]:
    """An ``evaluation.json``, or that of a folder.

    Raises:
        CoatConfigError: it is none; names the option.
    """
    path = Path(given) / NAME if Path(given).is_dir() else Path(given)
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as problem:
        raise CoatConfigError(f"{option}: {path} cannot be read ({problem}), accepted: an evaluation.json") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT or not all(_complete(report, k) for k in KINDS):
        raise CoatConfigError(f"{option}: {path} is no evaluation.json of this program, accepted: one")
    return report


def _complete(report: Mapping[str, Any], kind: str) -> bool:
    found = report.get(kind)
    return isinstance(found, list) and all(isinstance(one, dict) and _COMPARED[kind] <= one.keys() for one in found)


def table(report: Mapping[str, Any]) -> str:
    """The results for a reader."""
    lines = [("input", "what", "value", "standard error", "of")]
    for kind in ("text", "data"):
        for one in report[kind]:
            of = f"{one['tokens_scored']:,} tokens"
            lines.append((one["name"], "loss (nats/token)", f"{one['loss']:.6f}", _plus(one["loss_stderr"], 6), of))
            lines.append((one["name"], "perplexity", _number(one["perplexity"]), "", of))
            if one["bits_per_byte"] is not None:
                lines.append(
                    (one["name"], "bits per byte", f"{one['bits_per_byte']:.6f}", "", f"{one['bytes']:,} bytes")
                )
    for one in report["choices"]:
        for key in ("acc", "acc_norm"):
            of = f"{one['questions']:,} questions"
            lines.append((one["name"], key, f"{one[key]:.4f}", _plus(one[f"{key}_stderr"], 4), of))
    return _aligned(lines)


def digests(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Kind, name and digest of each input."""
    return [(kind, one["name"], one["digest"]) for kind in KINDS for one in report[kind]]


def not_in(baseline: Mapping[str, Any], inputs: Iterable[tuple[str, str, str]], option: str) -> list[str]:
    """Names of the inputs that ``baseline`` has not.

    Args:
        inputs: kind, name and digest of each.

    Raises:
        CoatConfigError: it has none of them; names the option.
    """
    inputs, there = list(inputs), {(kind, digest) for kind, _, digest in digests(baseline)}
    missing = [name for kind, name, digest in inputs if (kind, digest) not in there]
    if len(missing) == len(inputs):
        raise CoatConfigError(
            f"{option}: has no input in common with this evaluation, accepted: one of the same files, windows and "
            "tokens (of --choices: the same questions)"
        )
    return missing


def differences(report: Mapping[str, Any], baseline: Mapping[str, Any], option: str) -> list[dict[str, Any]]:
    """What ``report`` has more than ``baseline``, for every input that both have, with paired standard errors.

    Each row or question is compared with itself, so that what makes some harder for both models does not count.

    Raises:
        CoatConfigError: they have no input in common; names the option.
    """
    not_in(baseline, digests(report), option)
    found = []
    for kind in KINDS:
        others = {one["digest"]: one for one in baseline[kind]}
        for one in report[kind]:
            if (other := others.get(one["digest"])) is None:
                continue
            if kind == "choices":
                for key, each in (("acc", "correct"), ("acc_norm", "correct_norm")):
                    change = [a - b for a, b in zip(one[each], other[each], strict=True)]
                    found.append(_difference(one["name"], key, one[key], other[key], mean(change), mean_error(change)))
            else:
                change = [a - b for a, b in zip(one["row_losses"], other["row_losses"], strict=True)]
                counts = one["row_tokens"]
                error = ratio_error(change, counts)
                found.append(_difference(one["name"], "loss", one["loss"], other["loss"], ratio(change, counts), error))
    return found


def _difference(
    name: str, what: str, value: float, baseline: float, difference: float, error: float | None
) -> dict[str, Any]:
    return {
        "name": name,
        "what": what,
        "value": value,
        "baseline": baseline,
        "difference": difference,
        "paired_stderr": error,
    }


def table_of_differences(found: Sequence[Mapping[str, Any]]) -> str:
    """Differences for a reader."""
    lines = [("input", "what", "baseline", "value", "difference", "paired standard error")]
    for one in found:
        digits = 6 if one["what"] == "loss" else 4
        values = (f"{one['baseline']:.{digits}f}", f"{one['value']:.{digits}f}", f"{one['difference']:+.{digits}f}")
        lines.append((one["name"], one["what"], *values, _plus(one["paired_stderr"], digits)))
    return _aligned(lines)


def _plus(error: float | None, digits: int) -> str:
    return "" if error is None else f"± {error:.{digits}f}"


def _number(value: float | None) -> str:
    return "too large" if value is None else f"{value:.4f}" if value < 1e6 else f"{value:.4e}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in lines)
