"""Everything that is to be scored: read, tokenized and cut into rows before a model is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from coat_dist import CoatConfigError
from launch.data import dataset as data
from launch.data.tokenizer import Tokenizer
from launch.evaluation import choices, tokens
from launch.evaluation.arguments import EvaluateOptions
from launch.evaluation.rows import Row, sliding_windows
from launch.prep import DataError
from launch.prep.documents import ReadOptions, texts
from launch.prep.sources import cut_into_shards, find
from launch.train.initial import tokenizer_warning, training_data
from launch.train.plan import as_typed
from launch.weights import Weights

__all__ = ["Input", "Inputs", "read_inputs", "read_samples"]

LONGEST_TEXT_WINDOW = 4096
"""Default of ``--window`` for text, where the model takes more."""
PARTS = ("train", "valid", "test")


@dataclass(kw_only=True)
class Input:
    """One file or set of prepared data, read and cut into rows."""

    kind: str
    """"text", "data" or "choices"."""
    name: str
    rows: list[Row]
    counts: dict[str, Any] = field(default_factory=dict)
    """What the result says of the reading. Text: documents, tokens (without begin tokens), bytes
    (UTF-8), skipped.
    """
    questions: list[choices.Question] = field(default_factory=list)
    """Of choices, whose rows follow each other."""


@dataclass
class Inputs:
    """Everything that is to be scored."""

    found: list[Input] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """What was taken where the command line leaves a choice."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know of the inputs, a line each."""


def read_inputs(args: EvaluateOptions, weights: Weights, run: Mapping[str, Any]) -> Inputs:
    """Everything the command line names, before a model is built.

    Raises:
        CoatConfigError, DataError: on every rank.
    """
    inputs = Inputs()
    longest, vocab = weights.model.seq_length, weights.model.vocab_size or 0
    if (args.window or 0) > longest:
        raise CoatConfigError(
            f"--window: got {args.window}, accepted: 2 to the model's longest context ({longest})"
        )
    if args.text or args.choices:
        _read_files(inputs, args, weights, run)
    if args.data:
        _read_data(inputs, args, weights, run)
    for one in inputs.found:
        if (largest := max(int(row.ids.max()) for row in one.rows)) >= vocab:
            raise CoatConfigError(
                f"{one.name}: got a token with the id {largest}, or as begin or end token (--bos, "
                "--eod), accepted: "
                f"ids below the model's {vocab}: another --tokenizer"
            )
    return inputs


def _read_files(
    inputs: Inputs, args: EvaluateOptions, weights: Weights, run: Mapping[str, Any]
) -> None:
    longest, vocab = weights.model.seq_length, weights.model.vocab_size or 0
    tokenizer, source = tokens.find_tokenizer(
        args.tokenizer, args.eod, list(weights.travelling().values()), run
    )
    digest, trained = tokenizer.fingerprint(), training_data(run)
    if tokenizer.ids_of_text() > vocab:
        raise CoatConfigError(
            f"--tokenizer: got {source} of {tokenizer.vocab_size} ids, accepted: at most {vocab}"
        )
    if trained is not None and trained[1].tokenizer_digest not in (None, digest):
        theirs = f"{trained[1].describe()} of {trained[0]}"
        inputs.notes.append(
            f"warning: --tokenizer: {source} is not that of the training data, {theirs}"
        )
    begin = tokens.begin_ids(tokenizer, args.bos)
    inputs.settings |= {
        "tokenizer": f"tokenizer: {source} ({tokenizer.vocab_size} ids)",
        "tokenizer_digest": digest,
    }
    inputs.settings |= {"bos": f"before every text: {begin or 'nothing'}", "begin_ids": begin}
    if args.text:
        window = args.window or min(longest, LONGEST_TEXT_WINDOW)
        stride = args.stride or max(1, window // 2)
        if stride > window:
            raise CoatConfigError(f"--stride: got {stride}, accepted: 1 to the window ({window})")
        for path in args.text:
            inputs.found.append(_read_text(path, args, tokenizer, begin, window, stride))
            left = ", ".join(
                f"{count} {reason}" for reason, count in inputs.found[-1].counts["skipped"].items()
            )
            inputs.notes += [f"note: {path}: left out: {left}"] if left else []
        inputs.settings |= {"text_window": window, "stride": stride}
    if args.choices:
        window = args.window or longest
        for path in args.choices:
            asked, bad = choices.read_questions(path, args.skip_bad, args.limit)
            rows, cut, unspaced = choices.ask(
                asked, tokenizer, begin, window=window, delimiter=args.delimiter
            )
            counts = {"truncated": cut, "malformed": bad}
            inputs.found.append(
                Input(kind="choices", name=path, rows=rows, counts=counts, questions=asked)
            )
            notes = {
                f"left out {len(bad)} malformed lines, such as {bad[:1]}": bad,
                f"the context of {cut} of {len(asked)} questions was cut from the left": cut,
                f"{unspaced} of {len(rows)} choices follow their context without white space; "
                "--delimiter ' ' puts a "
                "space, as lm-evaluation-harness does": unspaced,
            }
            inputs.notes += [f"note: {path}: {line}" for line, so in notes.items() if so]
        inputs.settings |= {"choices_window": window, "delimiter": args.delimiter}


def _read_text(
    given: str,
    args: EvaluateOptions,
    tokenizer: Tokenizer,
    begin: list[int],
    window: int,
    stride: int,
) -> Input:
    """Documents of a file or folder, as ``prepare_data.py`` reads them, each tokenized and cut
    by itself.
    """
    separator = args.separator and args.separator.replace("\\n", "\n").replace("\\t", "\t")
    options = ReadOptions(args.text_key, separator or None, args.skip_bad)
    counts, rows = {"documents": 0, "tokens": 0, "bytes": 0}, []
    try:
        files, skipped = find([given])
        pieces = [piece for shard in cut_into_shards(files, 1 << 62) for piece in shard]
        for document in islice(
            (one for piece in pieces for one in texts(piece, options, skipped)), args.limit
        ):
            own = tokenizer.encode(document)
            ids = np.asarray([*begin, *own], np.int32)
            counts["documents"] += 1
            counts["tokens"] += len(own)
            counts["bytes"] += len(document.encode())
            for start, end, scored in sliding_windows(len(ids), window, stride):
                # No begin token is scored, also where there are several.
                if (count := min(scored, end - max(len(begin), start + 1))) > 0:
                    rows.append(Row(ids[start:end], count))
    except DataError as problem:
        raise DataError(str(problem).replace("--input", "--text", 1)) from None
    if not rows:
        raise DataError(
            f"--text: got {given} of {counts['tokens']} tokens, accepted: text of two tokens or "
            "more"
        )
    return Input(kind="text", name=given, rows=rows, counts={**counts, "skipped": dict(skipped)})


def _read_data(
    inputs: Inputs, args: EvaluateOptions, weights: Weights, run: Mapping[str, Any]
) -> None:
    with as_typed():
        prefixes, _ = data.parse_blend(args.data)
        infos = [data.read_info(prefix) for prefix in prefixes]
        data.check_one_tokenizer(prefixes, infos)
    if warning := tokenizer_warning(weights, *data.telling(prefixes, infos), "--load"):
        inputs.notes.append(warning)
    of_run = run.get("data") or {}
    if of_run.get("separate_documents"):
        inputs.notes.append(
            "warning: --data: documents of a sample see each other here, which the run kept apart "
            "(--separate-documents): the loss is not its valid_loss"
        )
    given: dict[str, Any] = {
        "split": args.split or of_run.get("split") or "950,40,10",
        "part": args.part,
        "seed": args.seed if args.seed is not None else run.get("seed", 1234),
    }
    window = args.window or weights.model.seq_length
    rows = read_samples(
        args.data, **given, seq_length=window, samples=args.samples, cache_dir=args.data_cache
    )
    inputs.found.append(Input(kind="data", name=f"{' '.join(args.data)} ({args.part})", rows=rows))
    inputs.settings |= {**given, "data_window": window}


def read_samples(
    paths: Sequence[str],
    *,
    split: str,
    part: str,
    seq_length: int,
    seed: int,
    samples: int | None = None,
    cache_dir: str | None = None,
) -> list[Row]:
    """The first ``samples`` samples of a part of prepared data, in the order in which training
    evaluates them.

    With torch.distributed, call it on all ranks. Every token of a sample but the first is scored,
    ends of documents included; documents of a sample see each other, as in training. ``samples``
    None means every sample of the part once; a blend of data sets needs a number.

    Raises:
        DataError: names the option, or the file; more ``samples`` than the part of one data set
            has.
    """
    with as_typed():
        train, valid, test = ((samples or 1) * (name == part) for name in PARTS)
        without = (
            "take another --part: with other shares than the run's it has trained on what "
            "they hold out"
        )
        built = data.build_datasets(
            paths, split, seq_length, train, valid, test, seed, cache_dir, without=without
        )
    dataset: Any = built[PARTS.index(part)]
    there: int | None = getattr(dataset, "epoch_samples", None)  # None of a blend, which has no end
    taken = there if samples is None else samples
    if taken is None or (there is not None and taken > there):
        # Samples that come again would make the errors of means too small.
        accepted = (
            "a number, as --data has several sources"
            if there is None
            else f"up to {there}, which {part} has"
        )
        raise DataError(f"--samples: got {samples}, accepted: {accepted}")
    items = (dataset[i] for i in range(taken))
    ids = (
        np.append(one["tokens"].numpy(), one["labels"][-1].item()).astype(np.int32) for one in items
    )
    return [Row(one, len(one) - 1) for one in ids]
