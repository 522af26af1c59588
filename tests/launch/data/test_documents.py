"""Reading: every kind of input comes back token for token, pieces neither lose nor repeat, bad
lines are named.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.common.errors import DataError
from launch.data.documents import ReadOptions, texts
from launch.data.input_files import cut_into_shards, find
from tests.launch.data.prepare_runs import decoded, documents, run, some_texts, write_jsonl


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json.gz", "parquet"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_documents_come_back(tmp_path, kind, tokenizer):
    expected = some_texts(200, kind)
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"n": list(range(200)), "text": expected}), path, row_group_size=7)
    else:
        write_jsonl(path, expected)
    summary = run(path, tmp_path / "out", "--shard-bytes", "3k", tokenizer=tokenizer)
    assert decoded(tmp_path / "out") == expected
    assert summary["documents"] == 200 and summary["skipped"] == {}
    assert summary["tokens"] == sum(map(len, documents(tmp_path / "out")))
    assert summary["text_bytes"] == sum(len(t.encode()) for t in expected)
    assert summary == json.loads((tmp_path / "out.json").read_text())
    assert not [path for end in ("parts", "tmp*", "lock") for path in tmp_path.glob(f"*.{end}")]


@pytest.mark.parametrize("opened, name", [(open, "in.jsonl"), (gzip.open, "in.jsonl.gz")])
def test_lines_of_a_file_from_windows(tmp_path, opened, name):
    with opened(tmp_path / name, "wb") as file:
        file.write(b'\xef\xbb\xbf{"text": "first"}\r\n{"text": "second"}\r\n')
    run(tmp_path / name, tmp_path / "out")
    assert decoded(tmp_path / "out") == ["first", "second"]


@pytest.mark.parametrize(
    "content, separator, expected",
    [
        (b"one\n\ntwo\nlines\n\n\n\nthree", r"\n\n", ["one", "two\nlines", "three"]),
        (
            b"one.\r\n\r\ntwo\r\nlines\r\n--\r\nthree",
            r"\n\n",
            ["one.", "two\r\nlines\r\n--\r\nthree"],
        ),
        (
            b"one.\r\n\r\ntwo\r\nlines\r\n--\r\nthree",
            r"\n--\n",
            ["one.\r\n\r\ntwo\r\nlines", "three"],
        ),
    ],
)
def test_separator_splits_text_files(tmp_path, content, separator, expected):
    (tmp_path / "in.txt").write_bytes(content)
    summary = run(tmp_path / "in.txt", tmp_path / "out", "--separator", separator)
    assert decoded(tmp_path / "out") == expected
    assert summary["skipped"].get("empty", 0) == (b"\n\n\n\n" in content)


@pytest.mark.parametrize("step", [1, 2, 5, 13, 10**6])
@pytest.mark.parametrize("newline_at_end", [True, False])
def test_pieces_of_json_lines_neither_lose_nor_repeat(tmp_path, step, newline_at_end):
    expected = ["", "a", "b" * 40, "", "c\nd", "é"]
    lines = (
        "\n\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in expected)
        + "\n" * newline_at_end
    )
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines.encode())
    shards = cut_into_shards(find([str(path)])[0], step)
    counts: Counter = Counter()
    found = [t for shard in shards for piece in shard for t in texts(piece, ReadOptions(), counts)]
    assert found == [t for t in expected if t] and counts == {"empty": 2}


def test_bad_lines_are_named_or_counted(tmp_path):
    good = [json.dumps({"text": f"line {i}"}) for i in range(50)]
    bad = ["{", "[1]", '{"txt": "a"}', '{"text": 3}', '{"text": null}', r'{"text": "\ud800"}', "é"]
    for number, line in enumerate(bad):
        path, out = tmp_path / f"{number}.jsonl", tmp_path / f"o{number}"
        path.write_bytes("\n".join([*good, line, *good]).encode("latin-1"))
        with pytest.raises(DataError, match=rf"{number}.jsonl:51: .*--skip-bad"):
            run(path, out, "--shard-bytes", "100")
        summary = run(path, out, "--skip-bad", "--shard-bytes", "1M", "--overwrite")
        assert summary["skipped"] == {"bad line": 1} and summary["documents"] == 100
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write("\n".join([*good, *bad]))
    with pytest.raises(DataError, match="z.jsonl.gz:51: "):
        run(tmp_path / "z.jsonl.gz", tmp_path / "z", tokenizer="bpe:300")
    pq.write_table(
        pa.table({"text": ["a", "b", None, "c"]}), tmp_path / "p.parquet", row_group_size=1
    )
    with pytest.raises(DataError, match="p.parquet: row 3: 'text' is NoneType"):
        run(tmp_path / "p.parquet", tmp_path / "p")
    assert run(tmp_path / "p.parquet", tmp_path / "p", "--skip-bad")["documents"] == 3
