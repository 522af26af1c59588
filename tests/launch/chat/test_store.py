"""Chat files on disk: what is left out, what is prepared again, and which conversations are held
out.
"""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("transformers")

from coat_dist import CoatConfigError
from launch.chat.store import Conversations, Reading, find_files, hold_out, prepare, records
from launch.chat.template import ChatTemplate
from launch.prep import DataError
from tests.launch.chat.support import chat, make_tokenizer


def test_lines_and_arrays_of_files(tmp_path):
    lines, array, empty = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "none"
    lines.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"b": 2}')
    array.write_text('[{"a": 1}, {"b": 2}]')
    assert [(line, json.loads(text)) for line, text in records(lines)] == [
        (1, {"a": 1}),
        (4, {"b": 2}),
    ]
    assert list(records(array)) == [(1, {"a": 1}), (2, {"b": 2})]
    array.write_text('[{"a": 1}, ')
    with pytest.raises(DataError, match="not a whole JSON array"):
        list(records(array))
    assert find_files([str(tmp_path)], "--data") == [lines, array]
    empty.mkdir()
    for given in ([str(empty)], [str(lines), str(lines)], [str(tmp_path / "missing")]):
        with pytest.raises(DataError, match="^--data: "):
            find_files(given, "--data")


def test_what_is_left_out_is_counted_and_listed(tmp_path):
    """Lines: kept, empty line, malformed, empty, too long, kept."""
    file, cache = tmp_path / "chats.jsonl", tmp_path / "cache"
    long = chat("user: q", "assistant: " + "hello " * 90)
    kept = [chat("user: q", f"assistant: {answer}") for answer in "ab"]
    file.write_text("\n".join([kept[0], "", '{"messages": 1}', chat("user: q"), long, kept[1]]))
    template = ChatTemplate(make_tokenizer())

    def read(**reading):
        return Conversations(
            prepare([file], template, Reading(seq_length=64, **reading), cache), [file]
        )

    with pytest.raises(DataError, match=rf"^{file}:3: messages: got 1.*--skip-bad"):
        read()
    assert not list(cache.iterdir())
    made = read(skip_bad=True)
    assert len(made) == 2 and made.summary["counts"] == {
        "kept": 2,
        "malformed": 1,
        "empty": 1,
        "too long": 1,
    }
    listed = [json.loads(line) for line in made.dropped().splitlines()]
    assert [(one["line"], one["what"]) for one in listed] == [
        (3, "malformed"),
        (4, "empty"),
        (5, "too long"),
    ]
    assert all(one["file"] == str(file) and one["why"] for one in listed)

    made = read(skip_bad=True, too_long="truncate")
    assert made.summary["counts"] == {"kept": 3, "malformed": 1, "empty": 1, "cut": 1}
    assert (
        made.lengths.tolist()[1] == 64
        and json.loads(made.dropped().splitlines()[2])["what"] == "cut"
    )

    file.write_text(long)
    with pytest.raises(
        DataError, match=f"no conversation .*too long 1; the first, {file}:1: 547 tokens, more"
    ):
        read()
    file.write_bytes(b"\xff")
    with pytest.raises(DataError, match=f"malformed 1; the first, {file}:1: not JSON"):
        read(skip_bad=True)


def test_what_is_prepared_is_used_again_until_anything_changes(tmp_path, monkeypatch):
    file, cache = tmp_path / "chats.jsonl", tmp_path / "cache"
    file.write_text(chat("user: q", "assistant: a") + "\n{}")
    template, bad = ChatTemplate(make_tokenizer()), Reading(seq_length=64, skip_bad=True)
    first, moved = prepare([file], template, bad, cache), tmp_path / "other.jsonl"
    shutil.copy(file, moved)
    with monkeypatch.context() as patch:
        patch.setattr(ChatTemplate, "encode", None)
        assert (
            prepare([file], template, bad, cache) == prepare([moved], template, bad, cache) == first
        )
    here, there = (Conversations(first, [path]) for path in (file, moved))
    assert str(file) in here.dropped() and there.dropped() == here.dropped().replace(
        str(file), str(moved)
    )
    assert prepare([file], template, Reading(seq_length=65, skip_bad=True), cache) != first
    assert prepare([file, moved], template, bad, cache) != first
    assert prepare([file], ChatTemplate(make_tokenizer(texts=["aa"] * 9)), bad, cache) != first
    file.write_text(chat("user: q", "assistant: b"))
    assert prepare([file], template, bad, cache) != first


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Files of conversations, read in the order in which they are asked for."""
    folder, template = tmp_path_factory.mktemp("chats"), ChatTemplate(make_tokenizer())
    for name, numbers in (("a", range(30)), ("b", range(30, 41)), ("one", [0])):
        lines = [chat(f"user: {n}?", f"assistant: {n}!") for n in numbers]
        (folder / name).with_suffix(".jsonl").write_text("\n".join(lines))

    def read(*names):
        files = [folder / f"{name}.jsonl" for name in names]
        return Conversations(
            prepare(files, template, Reading(seq_length=64), folder / "cache"), files
        )

    return read


def content(conversations, numbers):
    return sorted(conversations[n][0].tobytes() for n in numbers)


def test_the_order_of_files_does_not_change_what_is_held_out(stored):
    one, other = stored("a", "b"), stored("b", "a")
    (here, digest), (there, same) = (hold_out(c, 0.2, 7) for c in (one, other))
    assert content(one, here) == content(other, there) and digest == same
    assert here.tolist() != there.tolist(), "their places are others"
    assert len(here) == 9 and here.tolist() == sorted(set(here.tolist()))  # of 41


def test_every_seed_draws_others(stored):
    chats = stored("a", "b")
    drawn = [hold_out(chats, 0.2, seed) for seed in range(200)]
    counts = np.bincount(np.concatenate([numbers for numbers, _ in drawn]), minlength=41)
    assert len({digest for _, digest in drawn}) == 200
    # 44 each, standard deviation 5.9.
    assert counts.sum() == 200 * 9 and counts.min() > 15 and counts.max() < 80


def test_shares(stored):
    assert hold_out(stored("a"), 0.0, 0)[1] is None and not len(hold_out(stored("a"), 0.0, 0)[0])
    assert [len(hold_out(stored("a"), share, 0)[0]) for share in (0.001, 0.5, 0.999)] == [1, 15, 29]
    with pytest.raises(
        CoatConfigError, match=r"--valid-share: got 0.5 of 1 conversation, accepted: 0"
    ):
        hold_out(stored("one"), 0.5, 0)


def test_copies_are_held_out_together_in_any_order(stored):
    chats = stored("a")
    copies = [chats[n] for n in [*range(30)] * 3]
    (here, digest), (there, same) = (hold_out(c, 0.1, 3) for c in (copies, copies[::-1]))
    assert (
        len(here) == 9 and digest == same and content(copies, here) == content(copies[::-1], there)
    )
    for seed in range(20):  # a tenth and a bit more: the cut would go through copies
        held, _ = hold_out(copies, 0.12, seed)
        left = set(range(90)) - set(held.tolist())
        assert len(held) == 12 and not set(content(copies, held)) & set(content(copies, left))
    assert len(hold_out([chats[4], chats[4]], 0.5, 0)[0]) == 1, "something is left to train on"
