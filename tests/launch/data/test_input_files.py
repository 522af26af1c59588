"""Finding input: what is taken, in which order, and what is counted as left out."""

from __future__ import annotations

import os
from collections import Counter

from launch.data.input_files import find
from tests.launch.data.prepare_runs import decoded, documents, run, some_texts


def test_folder_of_text_counts_what_it_leaves_out(tmp_path):
    folder = tmp_path / "in"
    expected = {f"{i % 3}/f{i}.py": t for i, t in enumerate(some_texts(30, 1))}
    for name, text in expected.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "null.py").write_bytes(b"a\0b")
    (folder / "empty.md").write_bytes(b"")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.py").write_bytes(b"x = 1")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.txt").write_bytes(b"no")
    (folder / "gone.py").symlink_to(folder / "nowhere")
    (folder / "again.py").symlink_to(folder / "0/f0.py")
    os.mkfifo(folder / "pipe.py")
    summary = run(folder, tmp_path / "out")
    assert Counter(decoded(tmp_path / "out")) == Counter([*expected.values(), "marked"])
    assert summary["skipped"] == {
        "binary": 1,
        "duplicate": 1,
        "empty": 1,
        "not UTF-8": 1,
        "other name": 2,
        "unreadable": 2,
    }
    order = [s.name for s in find([str(folder)])[0]]
    assert order != sorted(order) and order == [s.name for s in find([str(folder)])[0]]
    run(folder, tmp_path / "globbed", "--glob", "f1*.py")
    assert len(documents(tmp_path / "globbed")) == 11


def test_standard_library(tmp_path):
    summary = run("stdlib", tmp_path / "a", "--max-files", 40, "--max-bytes", "10M")
    assert summary["files"] == 40 and summary["documents"] > 20
    names = [s.name for s in find(["stdlib"])[0]]
    assert all(n.endswith(".py") and "site-packages" not in n for n in names) and len(names) > 200
    assert len({n.split("/")[0] for n in names[:40]}) > 10  # not one package only
