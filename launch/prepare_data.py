"""Turn text into a Megatron dataset: ``PREFIX.bin``, ``PREFIX.idx`` and a summary, ``PREFIX.json``.

    python launch/prepare_data.py --input FOLDER --output data/code --tokenizer bpe:8192

The input is cut into shards that depend on the input alone. Each finished shard is kept under ``PREFIX.parts/``, so a
run that was killed continues with the same command, and the result is the same to the byte for any number of workers
and restarts. docs/data.md describes inputs, tokenizers and options.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import argparse
import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from launch.data.tokenizer import Tokenizer, bpe_size, load, train_bpe
from launch.log_level import say, set_log_level
from launch.prep import DataError
from launch.prep.arguments import TRAIN_BYTES, parser
from launch.prep.documents import ReadOptions, texts
from launch.prep.output import finished, locked, open_parts
from launch.prep.shards import Job, merge, read_json, replacing, tokenize, write_json
from launch.prep.sources import Piece, cut_into_shards, find

__all__ = ["main", "prepare"]

FORMAT = 1
"""Version of the files under PREFIX.parts and of PREFIX.json."""


def _train(parts: Path, shards: list[list[Piece]], args: argparse.Namespace, vocab: int) -> Path:
    """Train the BPE on documents from all over the input, once; a later run finds it under ``parts``."""
    file = parts / "tokenizer.json"
    if file.exists():
        return file
    order = list(range(len(shards)))
    random.Random(0).shuffle(order)
    taken = 0

    def sample() -> Iterator[str]:
        nonlocal taken
        for number in order:
            for piece in shards[number]:
                for text in texts(piece, _read_options(args), Counter()):
                    yield text
                    taken += len(text.encode())
                    if taken >= args.train_bytes:
                        return

    say(f"training a byte-level BPE of {vocab} tokens")
    with replacing(file) as temporary:
        train_bpe(sample(), vocab, Path(temporary))
        if not taken:
            raise DataError(f"--input: no text in {' '.join(args.input)}, accepted: at least one document")
    return file


def _read_options(args: argparse.Namespace) -> ReadOptions:
    return ReadOptions(text_key=args.text_key, separator=args.separator, skip_bad=args.skip_bad)


def _check_arguments(args: argparse.Namespace) -> None:
    tokens = args.tokenizer == "none"
    for name, value in (("--dtype", args.dtype), ("--vocab-size", args.vocab_size)):
        if value is not None and not tokens:
            raise DataError(f"{name}: got {value}, accepted: only with --tokenizer none (ready token files)")
    if tokens:
        for option in ("text_key", "separator", "skip_bad"):
            if (value := getattr(args, option)) != getattr(ReadOptions, option):
                shown = "given" if value is True else f"got {value!r}"
                name = option.replace("_", "-")
                raise DataError(f"--{name}: {shown}, accepted: not with --tokenizer none (ready token files)")
        if args.vocab_size is None or args.eod is None:
            raise DataError("--tokenizer: none needs --vocab-size N and --eod ID of the tokenizer that made the files")
        if not (args.eod.isascii() and args.eod.isdigit() and int(args.eod) < args.vocab_size):
            raise DataError(f"--eod: got {args.eod!r}, accepted: an id from 0 to {args.vocab_size - 1}")
    if args.separator == "":
        raise DataError("--separator: got an empty text, accepted: one character or more")
    size = bpe_size(args.tokenizer)
    if size is not None and args.eod is not None:
        raise DataError(f"--eod: got {args.eod!r}, accepted: nothing with --tokenizer bpe:N, which makes its own")
    if size is None and args.train_bytes != TRAIN_BYTES:
        raise DataError(
            f"--train-bytes: got {args.train_bytes}, accepted: only with --tokenizer bpe:N, which is trained"
        )


def _tokenizer_spec(args: argparse.Namespace) -> tuple[Tokenizer | None, dict[str, Any]]:
    """The tokenizer where it exists already, and what identifies it among the settings."""
    if args.tokenizer == "none":
        return None, {"vocab_size": args.vocab_size, "eod": int(args.eod), "dtype": args.dtype}
    if bpe_size(args.tokenizer) is not None:
        return None, {"train_bytes": args.train_bytes}
    tokenizer = load(args.tokenizer, args.eod)
    return tokenizer, {"tokenizer_digest": tokenizer.fingerprint()}


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Do what the command line asks; the summary that ``PREFIX.json`` holds.

    Raises:
        DataError: names the argument, what was given and what is accepted.
    """
    _check_arguments(args)
    tokenizer, identity = _tokenizer_spec(args)
    files, skipped = find(
        args.input,
        glob=args.glob,
        tokens=args.tokenizer == "none",
        max_files=args.max_files,
        max_bytes=args.max_bytes,
        output=args.output,
    )
    listing = json.dumps([[f.name, f.size, f.mtime_ns] for f in files])
    settings = {
        "format": FORMAT,
        "files": len(files),
        "files_digest": hashlib.sha256(listing.encode()).hexdigest(),
        "tokenizer": args.tokenizer,
        "text_key": args.text_key,
        "separator": args.separator,
        "append_eod": args.append_eod,
        "shard_bytes": args.shard_bytes,
        **identity,
    }
    prefix, parts = args.output, Path(f"{args.output}.parts")
    with locked(prefix, parts):
        if finished(prefix, settings, args.overwrite):
            say(f"{prefix}: already prepared with these settings, nothing to do")
            summary = read_json(f"{prefix}.json")
            assert summary is not None
        else:
            open_parts(prefix, parts, settings, args.overwrite)
            summary = {"input_bytes": sum(f.size for f in files), "files": len(files), "settings": settings}
            try:
                shards = cut_into_shards(files, args.shard_bytes, None if args.dtype is None else np.dtype(args.dtype))
                summary |= _write(args, tokenizer, shards, parts, skipped)
            except DataError:  # nothing is finished: the corrected command must not find other settings
                if not any(parts.glob("[0-9]*.json")):
                    shutil.rmtree(parts, ignore_errors=True)
                raise
            write_json(f"{prefix}.json", summary)  # last: it vouches for the others
        shutil.rmtree(parts, ignore_errors=True)
    return summary


def _write(
    args: argparse.Namespace, tokenizer: Tokenizer | None, shards: list[list[Piece]], parts: Path, skipped: Counter
) -> dict[str, Any]:
    """Tokenize and write all files but ``PREFIX.json``; what it is to say of them."""
    spec = None if args.tokenizer == "none" else args.tokenizer
    size = bpe_size(args.tokenizer)
    if size is not None:
        spec = f"hf:{_train(parts, shards, args, size)}"
        tokenizer = load(spec)
        if tokenizer.vocab_size < size:
            say(
                f"prepare_data: warning: --tokenizer: got {args.tokenizer}, but the text is enough for "
                f"{tokenizer.vocab_size} tokens only; the vocabulary is {tokenizer.vocab_size}",
                "warning",
            )
    vocab_size, eod = (tokenizer.vocab_size, tokenizer.eod) if tokenizer else (args.vocab_size, int(args.eod))
    job = Job(
        parts=str(parts),
        tokenizer=spec,
        eod=eod,
        vocab_size=vocab_size,
        read=_read_options(args),
        token_dtype=args.dtype,
        dtype="uint16" if vocab_size < 65500 else "int32",  # Megatron's own rule
        append_eod=args.append_eod,
    )
    results = tokenize(job, shards, args.workers)
    for result in results:
        skipped.update(result["skipped"])
    totals = {key: sum(r[key] for r in results) for key in ("documents", "tokens", "text_bytes")}
    if not totals["documents"]:
        shutil.rmtree(parts, ignore_errors=True)
        raise DataError(
            f"--input: no document in {' '.join(args.input)} (left out: {dict(skipped) or 'nothing'}), "
            "accepted: one or more"
        )
    files = len({piece.path for one in shards for piece in one})
    if whole := sum(r.get("files_without_eod", 0) for r in results):  # parts of an earlier version do not say
        say(
            f"prepare_data: note: --eod: got {eod}, which does not occur in {whole} of {files} files: each of those is "
            "one document",
            "warning",
        )
    if args.separator is not None and totals["documents"] == files:
        say(
            f"prepare_data: note: --separator: got {args.separator!r}, which divides no file: each is one document",
            "warning",
        )
    Path(f"{args.output}.json").unlink(missing_ok=True)  # what it vouches for is about to be replaced
    merge(job, args.output, results)
    file = None
    if tokenizer is not None and tokenizer.file is not None:
        file = (
            f"{Path(args.output).name}.tokenizer{'.model' if args.tokenizer.startswith('sentencepiece') else '.json'}"
        )
        with replacing(Path(args.output).with_name(file)) as temporary:
            shutil.copyfile(tokenizer.file, temporary)
    return {
        **totals,
        "skipped": dict(sorted(skipped.items())),
        "tokenizer": args.tokenizer,
        "tokenizer_file": file,
        "tokenizer_digest": tokenizer.fingerprint() if tokenizer else None,
        "vocab_size": vocab_size,
        "eod": eod,
        "dtype": job.dtype,
    }


def _report(prefix: str, summary: dict[str, Any]) -> None:
    left_out = ", ".join(f"{reason} {count}" for reason, count in summary["skipped"].items()) or "nothing"
    size = os.path.getsize(f"{prefix}.bin")
    say(
        f"{prefix}: {summary['documents']:,} documents, {summary['tokens']:,} tokens "
        f"({size:,} bytes of {summary['dtype']}) "
        f"from {summary['files']:,} files ({summary['input_bytes']:,} bytes)"
    )
    say(f"  vocabulary {summary['vocab_size']:,}, end of document {summary['eod']}, tokenizer {summary['tokenizer']}")
    say(f"  left out: {left_out}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status: 0 done, 2 bad input or settings, 130 interrupted."""
    args = parser(__doc__).parse_args(arguments)
    set_log_level("error" if args.quiet else args.log_level)
    try:
        summary = prepare(args)
    except DataError as problem:
        print(f"prepare_data: error: {problem}", file=sys.stderr)
        return 2
    except OSError as problem:  # a full disk, most likely
        print(f"prepare_data: error: {problem}; the same command continues", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_data: interrupted; the same command continues", file=sys.stderr)
        return 130
    _report(args.output, summary)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # do not wait for workers that are in the middle of a shard nobody will use
