"""Data preparation: workers are irrelevant, files of others are not replaced, bad input is
named.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.common.errors import DataError
from launch.data.tokenizer import for_data
from launch.prepare_data import main
from tests.launch.data.prepare_runs import (
    argv,
    decoded,
    documents,
    files_of,
    run,
    some_texts,
    write_jsonl,
)
from tests.support import held_elsewhere


def test_sentencepiece_and_hf_files_travel_with_the_data(tmp_path, sentencepiece_file):
    write_jsonl(tmp_path / "in.jsonl", ["one two", "ten nine eight"])
    run(
        tmp_path / "in.jsonl",
        tmp_path / "a",
        tokenizer=f"sentencepiece:{sentencepiece_file}",
    )
    assert decoded(tmp_path / "a") == ["one two", "ten nine eight"]
    assert (tmp_path / "a.tokenizer.model").read_bytes() == sentencepiece_file.read_bytes()
    run(tmp_path / "in.jsonl", tmp_path / "b", tokenizer="bpe:300")
    source = f"hf:{tmp_path / 'b.tokenizer.json'}"
    run(
        tmp_path / "in.jsonl",
        tmp_path / "c",
        "--eod",
        "<|endoftext|>",
        tokenizer=source,
    )
    assert documents(tmp_path / "b") == documents(tmp_path / "c")
    assert for_data(tmp_path / "c").fingerprint() == for_data(tmp_path / "b").fingerprint()


def test_append_eod_can_be_left_out(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["ab", "c"])
    run(tmp_path / "in.jsonl", tmp_path / "out", "--no-append-eod")
    assert documents(tmp_path / "out") == [[97, 98], [99]]


def test_result_does_not_depend_on_workers_or_how_files_are_given(tmp_path):
    for name, seed in (("a", 5), ("b", 6)):
        write_jsonl(tmp_path / f"{name}.jsonl", some_texts(150, seed))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    common = ["--shard-bytes", "2k", "--tokenizer", "bpe:300"]
    assert main(["--input", *map(str, files), "--output", str(tmp_path / "1/x"), *common]) == 0
    run(files[0], tmp_path / "n/x", "--input", files[1], *common, workers=3)
    first, second = files_of(tmp_path / "1/x"), files_of(tmp_path / "n/x")
    assert first == second and set(first) == {".bin", ".idx", ".json"}
    assert decoded(tmp_path / "n/x") == some_texts(150, 5) + some_texts(150, 6)


def test_other_settings_are_refused_unless_overwritten(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["ab"], key="body")
    (tmp_path / "in.txt").write_text("xyz")
    out = tmp_path / "out"
    run(tmp_path / "in.jsonl", out, "--text-key", "body")
    with pytest.raises(
        DataError, match=r"--output: .*text_key: 'body' then, 'text' now.*--overwrite"
    ):
        run(tmp_path / "in.txt", out)
    assert decoded(out) == ["ab"]
    run(tmp_path / "in.txt", out, "--overwrite")
    assert decoded(out) == ["xyz"]
    (tmp_path / "in.txt").write_text("changed")
    with pytest.raises(DataError, match="files_digest"):
        run(tmp_path / "in.txt", out)


def test_a_corrected_command_is_not_one_of_other_settings(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"body": "xyz"}\n')
    for wrong in ("empty.txt", "bad.jsonl"):
        with pytest.raises(DataError, match=r"no document in|no key 'text'"):
            run(tmp_path / wrong, tmp_path / "out")
    run(tmp_path / "bad.jsonl", tmp_path / "out", "--text-key", "body")
    assert decoded(tmp_path / "out") == ["xyz"]


@pytest.mark.parametrize(("separator", "noted"), [("\\n", False), ("xyz", True)])
def test_a_separator_that_is_nowhere_is_noted(tmp_path, capsys, separator, noted):
    (tmp_path / "t.txt").write_text("one\ntwo")
    assert main(argv(tmp_path / "t.txt", tmp_path / "made", "--separator", separator)) == 0
    assert ("note: --separator: got 'xyz', which divides no" in capsys.readouterr().err) == noted


def test_what_is_missing_of_an_output_is_made_again(tmp_path):
    (tmp_path / "in.txt").write_text("some text and more text " * 99)
    given = tmp_path / "in.txt", tmp_path / "out"
    run(*given, tokenizer="bpe:270")
    files = {
        file: file.read_bytes()
        for file in tmp_path.glob("out.*")
        if file.suffix != ".json" or "tok" in file.name
    }
    assert len(files) == 3
    for file in files:
        file.unlink()
        run(*given, tokenizer="bpe:270")
        assert {one: one.read_bytes() for one in files} == files, file


@pytest.mark.parametrize("name", ["x.bin", "x.idx", "x.json"])
def test_files_of_others_are_not_replaced(tmp_path, name):
    (tmp_path / "in.txt").write_text("xyz")
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(DataError, match=f"--output: .*{name} was not made by this program"):
        run(tmp_path / "in.txt", tmp_path / "x")
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def test_two_processes_do_not_write_one_output(tmp_path):
    (tmp_path / "in.txt").write_text("xyz")
    (tmp_path / "x.parts").mkdir()
    with (
        held_elsewhere(tmp_path / "x.parts/.lock"),
        pytest.raises(DataError, match="another program is writing"),
    ):
        run(tmp_path / "in.txt", tmp_path / "x")
    assert not (tmp_path / "x.bin").exists()


def bad_inputs(folder):
    (folder / "t.txt").write_text("abc")
    (folder / "empty.txt").write_text("")
    (folder / "x.png").write_text("abc")
    (folder / "none").mkdir()
    (folder / "p.parquet").write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"body": ["a"]}), folder / "q.parquet")
    (folder / "g.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 999)[:-9])
    return [
        (["missing"], "--input: got missing, which does not exist"),
        (["x.png"], "--input: got x.png, accepted: .*jsonl"),
        (["none"], "--input: got none .*, accepted: a file ending in"),
        (["empty.txt"], "--input: got no document .*'empty': 1"),
        (["p.parquet"], "p.parquet: got no readable Parquet file"),
        (["q.parquet"], "--text-key: got 'text', accepted: .*body"),
        (["g.jsonl.gz"], "cannot read g.jsonl.gz"),
        (["t.txt", "--max-bytes", "2"], "--max-bytes 2"),
        (["t.txt", "--tokenizer", "bpe:9"], "--tokenizer: got 'bpe:9'"),
    ]


def test_bad_input_is_named(tmp_path, capsys, monkeypatch):
    cases = bad_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments, words in cases:
        source, *more = arguments
        assert main(argv(source, "o", "--overwrite", *more)) == 2, arguments
        error = capsys.readouterr().err
        assert re.search(words, error), (arguments, error)
        assert (
            error.startswith("prepare_data: error: ")
            and error.count("\n") == 1
            and "Traceback" not in error
        )
        assert not Path("o.json").exists() and not Path("o.bin").exists()


def test_error_of_a_worker_reaches_the_user(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", some_texts(100, 2))
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("broken\n")
    with pytest.raises(DataError, match="in.jsonl:101: not JSON"):
        run(
            tmp_path / "in.jsonl",
            tmp_path / "o",
            "--shard-bytes",
            "1K",
            workers=2,
        )


def test_what_cannot_be_read_is_not_taken_for_absent(tmp_path, monkeypatch, capsys):
    """An error of the disk must not make a finished output, or finished shards, look unfinished."""
    write_jsonl(tmp_path / "in.jsonl", some_texts(5, 9))
    arguments = argv(tmp_path / "in.jsonl", tmp_path / "x")
    assert main(arguments) == 0
    before = files_of(tmp_path / "x")
    original = Path.read_text

    def read_text(self, *args, **kwargs):
        if self == tmp_path / "x.json":
            raise OSError(5, "Input/output error", str(self))
        return original(self, *args, **kwargs)

    (tmp_path / "x.parts").mkdir()
    monkeypatch.setattr(Path, "read_text", read_text)
    assert main(arguments) == 2
    assert "Input/output error" in capsys.readouterr().err
    monkeypatch.undo()
    assert files_of(tmp_path / "x") == before
