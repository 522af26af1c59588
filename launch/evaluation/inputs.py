"""Everything that is to be scored: read, tokenized and cut into rows before a model is built."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coat_dist import CoatConfigError
from launch.evaluation import choices, prepared, rows, tokens
from launch.evaluation.rows import Row
from launch.evaluation.text import Text, read_text
from launch.prep.documents import ReadOptions
from launch.train.initial import tokenizer_warning
from launch.weights import Weights

__all__ = ["Inputs", "digests", "notes", "read_inputs"]

LONGEST_TEXT_WINDOW = 4096
"""Default of ``--window`` for text, where the model takes more."""


@dataclass
class Inputs:
    """Everything that is to be scored, read and tokenized."""

    texts: list[Text] = field(default_factory=list)
    data: list[Row] = field(default_factory=list)
    questions: list[tuple[str, list[choices.Question], choices.Asked, list[str]]] = field(default_factory=list)
    """File, questions, their rows, lines that were left out."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What was taken where the command line leaves a choice."""
    warnings: list[str] = field(default_factory=list)
    """What makes results doubtful, a line each."""


def read_inputs(args: argparse.Namespace, weights: Weights, run: Mapping[str, Any]) -> Inputs:
    """Everything the command line names, before a model is built.

    Raises:
        USER_ERRORS: on every rank.
    """
    found = Inputs()
    longest, vocab = weights.model.seq_length, weights.model.vocab_size or 0
    window = args.window or longest
    if window > longest:
        raise CoatConfigError(f"--window: got {window}, accepted: 2 to the model's longest context ({longest})")
    if args.text or args.choices:
        tokenizer, source = tokens.find_tokenizer(args.tokenizer, args.eod, weights.tokenizer_files(), run)
        tokens.check_fits(f"--tokenizer: {source}", tokenizer.ids_of_text(), vocab)
        tokens.check_trained_with(f"--tokenizer: {source}", tokenizer.vocab_size, tokenizer.fingerprint(), run)
        begin = tokens.begin_ids(tokenizer, args.bos or "auto")
        found.settings |= {"tokenizer": f"tokenizer: {source} ({tokenizer.vocab_size} ids)"}
        found.settings |= {"bos": f"before every text: {begin or 'nothing'}", "begin_ids": begin}
        found.settings |= {"tokenizer_digest": tokenizer.fingerprint()}
    if args.text:
        size = args.window or min(longest, LONGEST_TEXT_WINDOW)
        stride = args.stride or max(1, size // 2)
        if stride > size:
            raise CoatConfigError(f"--stride: got {stride}, accepted: 1 to the window ({size})")
        options = ReadOptions(args.text_key or "text", _unescape(args.separator), args.skip_bad)
        for path in args.text:
            found.texts.append(
                read_text(path, tokenizer, begin, window=size, stride=stride, options=options, limit=args.limit)
            )
            tokens.check_rows(path, found.texts[-1].rows, vocab)
        found.settings |= {"text_window": size, "stride": stride}
    for path in args.choices:
        asked, bad = choices.read_questions(path, args.skip_bad, args.limit)
        of_choices = choices.ask(asked, tokenizer, begin, window=window, delimiter=args.delimiter or "")
        tokens.check_rows(path, of_choices.rows, vocab)
        found.questions.append((path, asked, of_choices, bad))
        found.settings |= {"choices_window": window, "delimiter": args.delimiter or ""}
    if args.data:
        prefix, info = prepared.check_data(args.data)
        tokens.check_fits(f"--data: {prefix}", info.vocab_size, vocab)
        tokens.check_trained_with(f"--data: {prefix}", info.vocab_size, info.tokenizer_digest, run)
        if warning := tokenizer_warning(weights, prefix, info, "--load"):
            found.warnings.append(warning)
        part = args.part or "valid"
        recorded = run.get("data")
        of_run = recorded if isinstance(recorded, dict) else {}
        if of_run.get("separate_documents"):
            found.warnings.append(
                "warning: --data: documents of a sample see each other here, which the run kept apart "
                "(--separate-documents): the loss is not its valid_loss"
            )
        split = args.split or of_run.get("split") or "950,40,10"
        seed = args.seed if args.seed is not None else run.get("seed", 1234)
        found.data = prepared.read_samples(
            args.data,
            split=split,
            part=part,
            seq_length=window,
            seed=seed,
            samples=args.samples,
            cache_dir=args.data_cache,
        )
        found.settings |= {"split": split, "part": part, "seed": seed, "data_window": window}
    return found


def digests(inputs: Inputs) -> list[tuple[str, str, str]]:
    """Kind, name and digest of each input, as the results will have them."""
    found = [("text", text.name, rows.digest(text.rows)) for text in inputs.texts]
    found += [("data", "--data", rows.digest(inputs.data))] if inputs.data else []
    return found + [("choices", path, choices.digest(asked)) for path, asked, _, _ in inputs.questions]


def notes(inputs: Inputs) -> list[str]:
    """What a reader should know of the inputs, one line each."""
    lines = list(inputs.warnings)
    for text in inputs.texts:
        left = [f"{count} {reason}" for reason, count in text.skipped.items()]
        left += [f"{text.unscored_documents} with no token to score"] if text.unscored_documents else []
        lines += [f"note: {text.name}: left out: {', '.join(left)}"] if left else []
    for path, asked, of_choices, bad in inputs.questions:
        if bad:
            lines.append(f"note: {path}: left out {len(bad)} malformed lines:")
            lines += [f"  {line}" for line in bad[:20]] + ([f"  and {len(bad) - 20} more"] if len(bad) > 20 else [])
        if of_choices.truncated:
            lines.append(
                f"note: {path}: the context of {of_choices.truncated} of {len(asked)} questions was cut from the left"
            )
        if of_choices.unspaced:
            lines.append(
                f"note: {path}: {of_choices.unspaced} of {len(of_choices.rows)} choices follow their context without "
                "white space; --delimiter ' ' puts a space, as lm-evaluation-harness does"
            )
    return lines


def _unescape(separator: str | None) -> str | None:
    return None if separator is None else separator.replace("\\n", "\n").replace("\\t", "\t")
