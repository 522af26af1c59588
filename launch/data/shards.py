"""The work of ``prepare_data.py``: tokenize shards of input in several processes, and join them to
one output.

A shard is finished when its ``NUMBER.json`` exists; everything is written under a temporary name
first.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.common.errors import DataError
from launch.common.log_level import say
from launch.common.progress import Progress
from launch.data.documents import ReadOptions, texts
from launch.data.input_files import Piece
from launch.data.tokenizer import Tokenizer, load


@dataclass(frozen=True)
class Job:
    """What a worker needs to know to turn pieces of input into tokens."""

    parts: str
    tokenizer: str  # for tokenizer.load
    eod: int
    read: ReadOptions
    dtype: str  # of the output
    append_eod: bool

    def stem(self, shard: int) -> str:
        """Path of a shard's files, without the suffix."""
        return f"{self.parts}/{shard:06d}"


_tokenizer: Callable[..., Tokenizer] = functools.lru_cache(maxsize=1)(load)  # loaded once a worker


def _documents(job: Job, piece: Piece, counts: Counter) -> Iterator[np.ndarray]:
    tokenizer = _tokenizer(job.tokenizer, job.eod)
    for text in texts(piece, job.read, counts):
        counts["text bytes"] += len(text.encode())
        yield np.asarray(tokenizer.encode(text), np.int64)


def _run_shard(job: Job, number: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Tokenize one shard into ``NUMBER.bin`` (tokens) and ``.npy`` (int32 document lengths
    ``[documents]``).

    ``NUMBER.json`` with the counts is written last: where it exists, the shard is complete. Returns
    its content.
    """
    counts: Counter = Counter()
    lengths: list[int] = []
    stem = job.stem(number)
    with replacing(f"{stem}.bin") as temporary, open(temporary, "wb") as out:
        for piece in pieces:
            for ids in _documents(job, piece, counts):
                if not ids.size:
                    counts["empty"] += 1
                    continue
                if job.append_eod and ids[-1] != job.eod:
                    ids = np.append(ids, job.eod)
                out.write(ids.astype(job.dtype).tobytes())
                lengths.append(ids.size)
    with replacing(f"{stem}.npy") as temporary, open(temporary, "wb") as out:
        np.save(out, np.asarray(lengths, np.int32))
    done = {"text_bytes": counts.pop("text bytes", 0), "skipped": dict(counts)}
    done |= {"documents": len(lengths), "tokens": sum(lengths)}
    write_json(f"{stem}.json", done)
    return done


def _shard_done(job: Job, number: int) -> dict[str, Any] | None:
    """The counts of a shard that an earlier run finished; None where its files are missing or
    cut short.
    """
    stem = job.stem(number)
    try:
        done = _read_json(f"{stem}.json")
        tokens = int(np.load(f"{stem}.npy").sum(dtype=np.int64))
        size = os.path.getsize(f"{stem}.bin")
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return (
        done if done and tokens == done["tokens"] == size // np.dtype(job.dtype).itemsize else None
    )


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[str]:
    """A temporary name that becomes ``path`` when the block ends without an error, after the
    content is on disk.
    """
    temporary = f"{path}.tmp{secrets.token_hex(8)}"  # a name for which nobody else can plant a link
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
        Path(temporary).write_text(
            json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )


def _read_json(path: str | Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none. OSError where it is there and cannot
    be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:  # else the workers of a killed parent would hang
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def tokenize(job: Job, shards: list[list[Piece]], workers: int) -> list[dict[str, Any]]:
    """Run the shards that are not finished yet; the counts of all, in order."""
    results = {n: done for n in range(len(shards)) if (done := _shard_done(job, n)) is not None}
    sizes = [sum(piece.size for piece in shard) for shard in shards]
    todo = [n for n in range(len(shards)) if n not in results]
    if results:
        say(f"continuing: {len(results)} of {len(shards)} shards are there already")
    workers = min(workers, len(todo))
    with Progress(sum(sizes), "tokenize", unit="B", initial=sum(sizes[n] for n in results)) as bar:
        if workers <= 1:
            for number in todo:
                results[number] = _run_shard(job, number, shards[number])
                bar.update(sizes[number])
            return [results[number] for number in range(len(shards))]
        # spawn: a fork of a process in which a tokenizer's threads have run may deadlock.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
        try:
            # Workers inherit what is blocked: Ctrl-C reaches the parent alone, which reports it
            # once.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            futures = {
                pool.submit(_run_shard, job, number, shards[number]): number for number in todo
            }
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                bar.update(sizes[futures[future]])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [results[number] for number in range(len(shards))]


def _compare(then: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """Refuse to continue or keep what other settings made."""
    keys = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    if keys:
        changed = "; ".join(f"{key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in keys)
        accepted = "the same settings and input files, another --output, or --overwrite"
        raise DataError(f"--output: got {what} of other settings ({changed}), accepted: {accepted}")


def finished(prefix: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of an output that is complete and of these settings; refuses to replace other
    files.
    """
    summary = _read_json(f"{prefix}.json")
    if summary is None or "settings" not in summary:
        there = [kind for kind in ("json", "bin", "idx") if Path(f"{prefix}.{kind}").exists()]
        if there and not Path(f"{prefix}.parts/manifest.json").exists():
            foreign = f"{prefix}.{there[0]} was not made by this program"
            raise DataError(
                f"--output: got {prefix}, but {foreign}, accepted: another --output, or --overwrite"
            )
        return None
    _compare(summary["settings"], settings, f"{prefix}.bin")
    files = [f"{prefix}.bin", f"{prefix}.idx"]
    if summary["tokenizer_file"]:
        files.append(str(Path(prefix).with_name(summary["tokenizer_file"])))
    return summary if all(map(os.path.exists, files)) else None


def open_parts(prefix: str, parts: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Continue the folder of finished shards if it is of these settings, or start it."""
    from launch.common.lock import LOCK  # brings torch, which workers do not need

    manifest = _read_json(parts / "manifest.json")
    if manifest is not None and not overwrite and any(parts.glob("[0-9]*.json")):
        _compare(manifest, settings, str(parts))
    for file in parts.iterdir():
        if file.name != LOCK and (manifest != settings or ".tmp" in file.name):
            file.unlink()
    for half_written in glob.glob(f"{glob.escape(prefix)}.*.tmp*"):  # by a killed run
        os.unlink(half_written)
    write_json(parts / "manifest.json", settings)


def merge(job: Job, prefix: str, shards: int) -> None:
    """Join the shards, in order, to ``PREFIX.bin`` and ``PREFIX.idx``."""
    # Takes seconds, and workers import this.
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with replacing(f"{prefix}.idx") as index, replacing(f"{prefix}.bin") as data:
        builder = IndexedDatasetBuilder(data, dtype=np.dtype(job.dtype).type)
        for number in range(shards):
            with open(f"{job.stem(number)}.bin", "rb") as tokens:
                shutil.copyfileobj(tokens, builder.data_file)
            builder.sequence_lengths += np.load(f"{job.stem(number)}.npy").tolist()
        builder.document_indices = list(range(len(builder.sequence_lengths) + 1))
        builder.finalize(index)
