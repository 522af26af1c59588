"""Run data preparation in this process and read back what it wrote."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from megatron.core.datasets.indexed_dataset import IndexedDataset

from launch.data.prepare_options import PrepareOptions, parser
from launch.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, for_data
from launch.prepare_data import prepare


def argv(source, output, *more, tokenizer="bytes", workers=1):
    """Arguments of ``prepare_data.py``."""
    kinds = "--tokenizer", tokenizer, "--workers", workers
    return [str(word) for word in ("--input", source, "--output", output, *kinds, *more)]


def run(source, output, *more, **kinds):
    """The summary of a preparation; errors are raised."""
    words = argv(source, output, *more, "--quiet", **kinds)
    return prepare(PrepareOptions(**vars(parser().parse_args(words))))


def documents(prefix):
    data = IndexedDataset(str(prefix), mmap=False)
    return [data[i].tolist() for i in range(len(data))]


def text_of(tokenizer, ids):
    """The text of ids, without the end of document."""
    ids = [int(i) for i in ids if i != tokenizer.eod]
    if isinstance(tokenizer, ByteTokenizer):
        return bytes(ids).decode(errors="replace")
    if isinstance(tokenizer, SentencePieceTokenizer):
        return tokenizer._library.DecodeIds(ids)
    return tokenizer._library.decode(ids, skip_special_tokens=True)


def decoded(prefix):
    tokenizer = for_data(prefix)
    found = documents(prefix)
    assert all(d[-1] == tokenizer.eod and tokenizer.eod not in d[:-1] for d in found)
    return [text_of(tokenizer, d) for d in found]


def some_texts(n, seed):
    rng = random.Random(seed)
    alphabet = 'abc \n\t"\\{}é東🙂'
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 300))) for _ in range(n)]


def files_of(prefix):
    return {
        p.suffixes[-1]: p.read_bytes()
        for p in Path(prefix).parent.glob(f"{Path(prefix).name}.*")
        if p.is_file()
    }


def write_jsonl(path, texts, key="text"):
    lines = "".join(
        json.dumps({key: t, "id": i}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(texts)
    )
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "wb") as file:
        file.write(lines.encode())
