"""Turn text into a Megatron dataset: ``PREFIX.bin``, ``PREFIX.idx`` and a summary, ``PREFIX.json``.

    python launch/prepare_data.py --input FOLDER --output data/code --tokenizer bpe:8192

The input is cut into shards that depend on the input alone. Each finished shard is kept under
``PREFIX.parts/``, so a run that was killed continues with the same command, and the result is the
same to the byte for any number of workers and restarts. docs/data.md describes inputs, tokenizers
and options.

    python launch/prepare_data.py --index dolma.json

checks token files of Dolma or OLMo and indexes their documents; `pretrain.py --data dolma.json`
reads the tokens where they lie. Exit status: 0 done, 2 bad input or settings, 130 interrupted.
"""

from __future__ import annotations

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

from launch.common.errors import DataError
from launch.common.log_level import say, set_log_level
from launch.data.documents import ReadOptions, texts
from launch.data.input_files import Piece, cut_into_shards, find
from launch.data.prepare_options import PrepareOptions, parser
from launch.data.shards import Job, finished, merge, open_parts, replacing, tokenize, write_json
from launch.data.tokenizer import Tokenizer, bpe_size, load, train_bpe

FORMAT = 1  # version of the files under PREFIX.parts and of PREFIX.json


def _train(
    parts: Path, shards: list[list[Piece]], args: PrepareOptions, read: ReadOptions, vocab: int
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


def prepare(args: PrepareOptions) -> dict[str, Any]:
    """Do what the command line asks; the summary that ``PREFIX.json`` holds.

    Raises:
        DataError: names the argument, what was given and what is accepted.
    """
    # Brings torch, which workers do not need.
    from launch.common.lock import locked_folder

    for name in ("input", "output", "tokenizer"):
        if not getattr(args, name):
            raise DataError(f"--{name}: missing, accepted: a value (or --index FILE alone)")
    size = bpe_size(args.tokenizer)
    tokenizer = None if size else load(args.tokenizer, args.eod)
    limits = {"max_files": args.max_files, "max_bytes": args.max_bytes}
    files, skipped = find(args.input, glob=args.glob, **limits)
    listing = json.dumps([[f.name, f.size, f.mtime_ns] for f in files])
    settings = {
        "format": FORMAT,
        "files": len(files),
        "files_digest": hashlib.sha256(listing.encode()).hexdigest(),
        "tokenizer_digest": tokenizer.fingerprint() if tokenizer else None,
    }
    names = "tokenizer eod train_bytes text_key separator append_eod shard_bytes"
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
    args: PrepareOptions,
    tokenizer: Tokenizer | None,
    shards: list[list[Piece]],
    parts: Path,
    skipped: Counter,
) -> dict[str, Any]:
    """Tokenize and write all files but ``PREFIX.json``; its values."""
    read = ReadOptions(args.text_key, args.separator, args.skip_bad)
    spec, size = args.tokenizer, bpe_size(args.tokenizer)
    if size is not None:
        spec = f"hf:{_train(parts, shards, args, read, size)}"
        tokenizer = load(spec, args.eod)
        if (found := tokenizer.vocab_size) < size:
            enough = f"the text is enough for {found} tokens only; the vocabulary is {found}"
            say(
                f"prepare_data: warning: --tokenizer: got {args.tokenizer}, but {enough}", "warning"
            )
    assert tokenizer is not None
    vocab_size = tokenizer.vocab_size
    job = Job(
        parts=str(parts),
        tokenizer=spec,
        eod=tokenizer.eod,
        read=read,
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
    if args.separator is not None:
        files = len({piece.path for shard in shards for piece in shard})
        if totals["documents"] <= files:
            say(
                f"prepare_data: note: --separator: got {args.separator!r}, which divides no file: "
                "each is one document",
                "warning",
            )
    Path(f"{args.output}.json").unlink(missing_ok=True)  # what it vouches for is replaced now
    merge(job, args.output, len(shards))
    file = None
    if tokenizer.file is not None:
        sentencepiece = args.tokenizer.startswith("sentencepiece")
        file = f"{Path(args.output).name}.tokenizer{'.model' if sentencepiece else '.json'}"
        with replacing(Path(args.output).with_name(file)) as temporary:
            shutil.copyfile(tokenizer.file, temporary)
    return {
        **totals,
        "skipped": dict(sorted(skipped.items())),
        "tokenizer": args.tokenizer,
        "tokenizer_file": file,
        "tokenizer_digest": tokenizer.fingerprint(),
        "vocab_size": vocab_size,
        "eod": tokenizer.eod,
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


def index(args: PrepareOptions) -> None:
    """Index the token files of ``--index``, and print what they hold.

    Raises:
        DataError: a description or token file that cannot be used.
    """
    # Late: text needs none of it.
    from launch.data.mixture import read_mixture
    from launch.data.token_files import TokenFiles, build_index, cache_folder

    mixture = read_mixture(str(args.index))
    paths = build_index(mixture, cache_folder([mixture.path], args.data_cache))
    rows = []
    for source, path in zip(mixture.sources, paths, strict=True):
        files = TokenFiles(source, path)
        rows.append((source, files, source.weight or float(files.tokens)))
    whole = sum(weight for _, _, weight in rows)
    say(f"{'source':<20}{'files':>8}{'documents':>16}{'tokens':>20}{'share of samples':>18}")
    for source, files, weight in rows:
        counts = f"{len(source.files):>8,}{len(files):>16,}{files.tokens:>20,}"
        say(f"{source.name:<20}{counts}{weight / whole:>18.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    args = PrepareOptions(**vars(parser(__doc__).parse_args(arguments)))
    set_log_level("error" if args.quiet else args.log_level)
    try:
        if args.index is not None:
            index(args)
            return 0
        summary = prepare(args)
    # A full disk, or a worker that ran out of memory.
    except (DataError, OSError, BrokenProcessPool) as problem:
        more = "" if isinstance(problem, DataError) else "; the same command continues"
        text = str(problem).replace("cache_dir:", "--data-cache:")
        print(f"prepare_data: error: {text}{more}", file=sys.stderr)
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
