"""The work of ``prepare_data.py``: tokenize shards of input in several processes, and join what they give.

A shard is finished when its ``NUMBER.json`` exists; everything is written under a temporary name first.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.data.tokenizer import Tokenizer, load
from launch.log_level import say
from launch.prep import DataError
from launch.prep.documents import ReadOptions, texts, token_documents
from launch.prep.sources import Piece
from launch.progress import Progress

__all__ = ["Job", "merge", "read_json", "replacing", "run_shard", "tokenize", "write_json"]


@dataclass(frozen=True)
class Job:
    """What a worker needs to know to turn pieces of input into tokens."""

    parts: str
    tokenizer: str | None  # for tokenizer.load; None = the input is token files
    eod: int
    vocab_size: int
    read: ReadOptions
    token_dtype: str | None  # of headerless token files
    dtype: str  # of the output
    append_eod: bool


_tokenizer: Callable[..., Tokenizer] = functools.lru_cache(maxsize=1)(load)  # loaded once a worker


def _documents(job: Job, piece: Piece, counts: Counter) -> Iterator[np.ndarray]:
    if job.tokenizer is None:
        dtype = None if job.token_dtype is None else np.dtype(job.token_dtype)
        yield from token_documents(piece, dtype, job.eod, counts)
        return
    tokenizer = _tokenizer(job.tokenizer, job.eod)
    for text in texts(piece, job.read, counts):
        counts["text bytes"] += len(text.encode())
        yield np.asarray(tokenizer.encode(text), np.int64)


def run_shard(job: Job, number: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Tokenize one shard into ``parts/NUMBER.bin`` (tokens) and ``.npy`` (int32 document lengths ``[documents]``).

    ``NUMBER.json`` with the counts is written last: where it exists, the shard is complete. Returns its content.
    """
    counts: Counter = Counter()
    lengths: list[int] = []
    stem = f"{job.parts}/{number:06d}"
    with replacing(f"{stem}.bin") as temporary, open(temporary, "wb") as out:
        for piece in pieces:
            for ids in _documents(job, piece, counts):
                if not ids.size:
                    counts["empty"] += 1
                    continue
                if int(ids.max()) >= job.vocab_size or int(ids.min()) < 0:
                    raise DataError(
                        f"{piece.path}: holds the id {int(ids.max() if ids.min() >= 0 else ids.min())}, accepted: "
                        f"0 to {job.vocab_size - 1} (--vocab-size)"
                    )
                if job.append_eod and ids[-1] != job.eod:
                    ids = np.append(ids, job.eod)
                if ids.size > np.iinfo(np.int32).max:
                    raise DataError(
                        f"{piece.path}: a document of {ids.size} tokens, accepted: fewer than 2**31 (--separator)"
                    )
                out.write(ids.astype(job.dtype).tobytes())
                lengths.append(ids.size)
    with replacing(f"{stem}.npy") as temporary, open(temporary, "wb") as out:
        np.save(out, np.asarray(lengths, np.int32))
    of_text, of_tokens = counts.pop("text bytes", 0), counts.pop("no eod", 0)
    done = {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "text_bytes": of_text,
        "files_without_eod": of_tokens,
        "skipped": dict(counts),
    }
    write_json(f"{stem}.json", done)
    return done


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[str]:
    """A temporary name that becomes ``path`` when the block ends without an error, after the content is on disk."""
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        Path(temporary).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file or nothing of the kind in it.

    Raises:
        OSError: it is there and cannot be read. What it vouches for must not be taken for unfinished then.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports the interruption, once
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:  # a killed parent must not leave workers waiting for ever
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Ctrl-C comes afterwards, and never to processes that are started meanwhile: they inherit what is blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def tokenize(job: Job, shards: list[list[Piece]], workers: int) -> list[dict[str, Any]]:
    """Run the shards that are not there yet; the counts of all, in order."""
    results: dict[int, dict[str, Any]] = {}
    for number in range(len(shards)):
        done = read_json(f"{job.parts}/{number:06d}.json")
        if done is not None:
            results[number] = done
    sizes = [sum(piece.size for piece in shard) for shard in shards]
    todo = [n for n in range(len(shards)) if n not in results]
    if results:
        say(f"continuing: {len(results)} of {len(shards)} shards are there already")
    bar = Progress(sum(sizes), "tokenize", unit="B", initial=sum(sizes[n] for n in results))
    workers = min(workers, len(todo))
    with bar:
        if workers <= 1:
            for number in todo:
                results[number] = run_shard(job, number, shards[number])
                bar.update(sizes[number])
        else:
            # spawn: a fork of a process in which a tokenizer's threads have run may deadlock.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
            try:
                with _unheard():  # or a worker that is still importing would print where it was
                    futures = {pool.submit(run_shard, job, number, shards[number]): number for number in todo}
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
                    bar.update(sizes[futures[future]])
            except BrokenProcessPool:
                raise DataError(
                    "a worker process was killed (out of memory?), accepted: fewer --workers; "
                    "the same command continues"
                ) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    return [results[number] for number in range(len(shards))]


def merge(job: Job, prefix: str, results: Sequence[dict[str, Any]]) -> None:
    """Join the shards, in order, to ``PREFIX.bin`` and ``PREFIX.idx``.

    Raises:
        DataError: a shard's files are damaged; the next run makes it again.
    """
    # Imported late: it takes seconds, and workers, which import this file, do not need it.
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with replacing(f"{prefix}.idx") as index, replacing(f"{prefix}.bin") as data:
        builder = IndexedDatasetBuilder(data, dtype=np.dtype(job.dtype).type)
        with Progress(sum(r["documents"] for r in results), "merge", unit="doc") as bar:
            for number, result in enumerate(results):
                tokens, lengths = _part(job, number, result)
                for end, length in zip(np.cumsum(lengths, dtype=np.int64), lengths, strict=True):
                    builder.add_document(tokens[end - length : end], [int(length)])
                bar.update(len(lengths))
        builder.finalize(index)


def _part(job: Job, number: int, result: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and document lengths of a finished shard."""
    stem = f"{job.parts}/{number:06d}"
    try:
        lengths = np.load(f"{stem}.npy", allow_pickle=False)
        tokens = np.memmap(f"{stem}.bin", job.dtype, "r") if lengths.size else np.empty(0, job.dtype)
        if not len(tokens) == lengths.sum(dtype=np.int64) == result["tokens"]:
            raise ValueError(f"{len(tokens)} tokens, {result['tokens']} were written")
    except (OSError, ValueError, EOFError) as problem:
        Path(f"{stem}.json").unlink(missing_ok=True)
        raise DataError(f"{stem}.bin is damaged ({problem}); the same command makes it again") from None
    return tokens, lengths
