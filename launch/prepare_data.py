"""Turn text into a Megatron dataset: ``PREFIX.bin``, ``PREFIX.idx`` and a summary, ``PREFIX.json``.

    python launch/prepare_data.py --input FOLDER --output data/code --tokenizer bpe:8192

The input is cut into shards that depend on the input alone. Each finished shard is kept under
``PREFIX.parts/``, so a run that was killed continues with the same command, and the result is the
same to the byte for any number of workers and restarts. docs/data.md describes inputs, tokenizers
and options.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from launch.common.command_line import Parser, local_path
from launch.common.errors import DataError
from launch.common.log_level import add_log_level, say, set_log_level
from launch.data.documents import ReadOptions, texts
from launch.data.input_files import Piece, cut_into_shards, find
from launch.data.shards import Job, finished, merge, open_parts, replacing, tokenize, write_json
from launch.data.tokenizer import Tokenizer, bpe_size, load, train_bpe

__all__ = ["main", "parser", "prepare"]

FORMAT = 1  # version of the files under PREFIX.parts and of PREFIX.json


def _number(text: str) -> int:
    """A positive whole number, with an optional k, M or G, small or capital (1000, 1000000,
    ...).
    """
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, accepted: a whole number from 1, k, M or G may follow"
        )
    return int(digits) * factor


def _separator(text: str) -> str:
    """A separator as typed in a shell: backslash n and backslash t stand for newline and tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    p = Parser(
        prog="prepare_data", prefix="prepare_data: ", description=__doc__, formatter_class=raw
    )

    def add(name: str, text: str, kind: Any = str, metavar: str | None = None, **more: Any) -> None:
        p.add_argument(name, help=text, type=kind, metavar=metavar, **more)

    def add_flag(name: str, text: str) -> None:
        p.add_argument(name, help=text, action="store_true")

    given = "files or folders (recursive); 'stdlib' is the running Python's own standard library"
    add("--input", given, local_path, "PATH", nargs="+", action="extend", required=True)
    add(
        "--output",
        "write PREFIX.bin, PREFIX.idx and PREFIX.json",
        local_path,
        "PREFIX",
        required=True,
    )
    kinds = (
        "bpe:VOCABSIZE (trained on the input), hf:FILE, FOLDER or org/name, "
        "sentencepiece:FILE, bytes, none "
    )
    add("--tokenizer", kinds + "(token files)", metavar="KIND", required=True)
    add(
        "--workers",
        "processes (default: one a core)",
        _number,
        default=len(os.sched_getaffinity(0)),
    )
    add("--text-key", "JSON key or Parquet column of the text (default: text)", default="text")
    between = (
        "what separates documents in a text file, e.g. '\\n\\n' (default: a file is one document)"
    )
    add("--separator", between, _separator, "TEXT")
    add("--glob", "of folders take the files with such names only, e.g. '*.py'", metavar="PATTERN")
    add("--max-files", "use the first N files", _number, "N")
    add("--max-bytes", "use the first files of together at most N bytes (200M, 2G)", _number, "N")
    eod = "end every document with the end-of-document id (default: yes)"
    p.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True, help=eod)
    eod = (
        "end-of-document token, where the tokenizer names none; with --tokenizer none the id "
        "that ends documents"
    )
    add("--eod", eod, metavar="TOKEN_OR_ID")
    add("--dtype", "numbers in headerless token files", choices=["uint16", "uint32"])
    add("--vocab-size", "with --tokenizer none: ids are below N", _number, "N")
    add_flag("--skip-bad", "count lines and rows without usable text instead of stopping")
    add("--train-bytes", "text that bpe:N learns from (default: 100M)", _number, "N", default=10**8)
    shard = "input of one unit of work that survives a kill (default: 8M)"
    add("--shard-bytes", shard, _number, "N", default=8 * 10**6)
    add_flag("--overwrite", "replace an output of other settings")
    add_flag("--quiet", "print errors only, as --log-level error does")
    add_log_level(p)
    return p


def _train(
    parts: Path, shards: list[list[Piece]], args: argparse.Namespace, read: ReadOptions, vocab: int
) -> Path:
    """Train the BPE on documents from all over the input, once; a later run finds it under
    ``parts``.
    """
    file = parts / "tokenizer.json"
    if file.exists():
        return file
    shuffled = shards.copy()
    random.Random(0).shuffle(shuffled)

    def sample() -> Iterator[str]:
        left = args.train_bytes
        for piece in itertools.chain(*shuffled):
            for text in texts(piece, read, Counter()):
                if left <= 0:
                    return
                yield text
                left -= len(text.encode())

    say(f"training a byte-level BPE of {vocab} tokens")
    with replacing(file) as temporary:
        train_bpe(sample(), vocab, Path(temporary))
    return file


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Do what the command line asks; the summary that ``PREFIX.json`` holds.

    Raises:
        DataError: names the argument, what was given and what is accepted.
    """
    # Brings torch, which workers do not need.
    from coat_dist.checkpoint.write.lock import locked_folder

    tokens, size = args.tokenizer == "none", bpe_size(args.tokenizer)
    if tokens and not (
        args.vocab_size and args.eod and args.eod.isdecimal() and int(args.eod) < args.vocab_size
    ):
        ids = "the ids of the tokenizer that made the files, --eod below --vocab-size"
        raise DataError(
            f"--tokenizer: got none with --vocab-size {args.vocab_size}, --eod {args.eod}, "
            f"accepted: {ids}"
        )
    tokenizer = None if tokens or size else load(args.tokenizer, args.eod)
    limits = {"max_files": args.max_files, "max_bytes": args.max_bytes}
    files, skipped = find(args.input, glob=args.glob, tokens=tokens, output=args.output, **limits)
    listing = json.dumps([[f.name, f.size, f.mtime_ns] for f in files])
    settings = {
        "format": FORMAT,
        "files": len(files),
        "files_digest": hashlib.sha256(listing.encode()).hexdigest(),
        "tokenizer_digest": tokenizer.fingerprint() if tokenizer else None,
    }
    names = "tokenizer eod vocab_size dtype train_bytes text_key separator append_eod shard_bytes"
    settings |= {name: getattr(args, name) for name in names.split()}
    prefix, parts = args.output, Path(f"{args.output}.parts")
    with locked_folder(parts, "--output", DataError):
        summary = None if args.overwrite else finished(prefix, settings)
        if summary is not None:
            say(f"{prefix}: already prepared with these settings, nothing to do")
        else:
            open_parts(prefix, parts, settings, args.overwrite)
            shards = cut_into_shards(files, args.shard_bytes)
            summary = {
                "input_bytes": sum(f.size for f in files),
                "files": len(files),
                "settings": settings,
            }
            summary |= _write(args, tokenizer, shards, parts, skipped)
            write_json(f"{prefix}.json", summary)  # last: it vouches for the others
        shutil.rmtree(parts)
    return summary


def _write(
    args: argparse.Namespace,
    tokenizer: Tokenizer | None,
    shards: list[list[Piece]],
    parts: Path,
    skipped: Counter,
) -> dict[str, Any]:
    """Tokenize and write all files but ``PREFIX.json``; its values."""
    read = ReadOptions(args.text_key, args.separator, args.skip_bad)
    spec, size = None if args.tokenizer == "none" else args.tokenizer, bpe_size(args.tokenizer)
    if size is not None:
        spec = f"hf:{_train(parts, shards, args, read, size)}"
        tokenizer = load(spec, args.eod)
        if (found := tokenizer.vocab_size) < size:
            enough = f"the text is enough for {found} tokens only; the vocabulary is {found}"
            say(
                f"prepare_data: warning: --tokenizer: got {args.tokenizer}, but {enough}", "warning"
            )
    vocab_size, eod = (
        (tokenizer.vocab_size, tokenizer.eod) if tokenizer else (args.vocab_size, int(args.eod))
    )
    job = Job(
        parts=str(parts),
        tokenizer=spec,
        eod=eod,
        vocab_size=vocab_size,
        read=read,
        token_dtype=args.dtype,
        dtype="uint16" if vocab_size < 65500 else "int32",  # Megatron's own rule
        append_eod=args.append_eod,
    )
    results = tokenize(job, shards, args.workers)
    for result in results:
        skipped.update(result["skipped"])
    totals = {key: sum(r[key] for r in results) for key in ("documents", "tokens", "text_bytes")}
    if not totals["documents"]:
        shutil.rmtree(parts)
        left_out = dict(skipped) or "nothing"
        raise DataError(
            f"--input: got no document in {' '.join(args.input)} (left out: {left_out}), accepted: "
            "some"
        )
    files = len({piece.path for shard in shards for piece in shard})
    for option, value in (
        ("--eod", args.eod if tokenizer is None else None),
        ("--separator", args.separator),
    ):
        if value is not None and totals["documents"] <= files:
            say(
                f"prepare_data: note: {option}: got {value!r}, which divides no file: each is one "
                "document",
                "warning",
            )
    Path(f"{args.output}.json").unlink(missing_ok=True)  # what it vouches for is replaced now
    merge(job, args.output, len(shards))
    file = None
    if tokenizer is not None and tokenizer.file is not None:
        sentencepiece = args.tokenizer.startswith("sentencepiece")
        file = f"{Path(args.output).name}.tokenizer{'.model' if sentencepiece else '.json'}"
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


def _report(prefix: str, summary: dict[str, Any]) -> str:
    """What was written, from what, and what was left out."""
    left_out = (
        ", ".join(f"{reason} {count}" for reason, count in summary["skipped"].items()) or "nothing"
    )
    return (
        f"{prefix}: {summary['documents']:,} documents, {summary['tokens']:,} tokens of "
        f"{summary['dtype']} "
        f"from {summary['files']:,} files ({summary['input_bytes']:,} bytes)\n"
        f"  vocabulary {summary['vocab_size']:,}, end of document {summary['eod']}, tokenizer "
        f"{summary['tokenizer']}\n"
        f"  left out: {left_out}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status: 0 done, 2 bad input or settings, 130 interrupted."""
    args = parser().parse_args(arguments)
    set_log_level("error" if args.quiet else args.log_level)
    try:
        summary = prepare(args)
    # A full disk, or a worker that ran out of memory.
    except (DataError, OSError, BrokenProcessPool) as problem:
        more = "" if isinstance(problem, DataError) else "; the same command continues"
        print(f"prepare_data: error: {problem}{more}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_data: interrupted; the same command continues", file=sys.stderr)
        return 130
    say(_report(args.output, summary))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # do not wait for workers that are in the middle of a shard nobody will use
