"""Questions of JSONL files, what of them is scored, and who is right."""

import json
from pathlib import Path

import pytest

from launch.data.tokenizer import ByteTokenizer
from launch.evaluation.choices import ask, best, digest, read_questions
from launch.prep import DataError

GOOD = {"context": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}


def written(tmp_path, *lines):
    file = tmp_path / "questions.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
    )
    return str(file)


@pytest.mark.parametrize(
    ("answer", "choices", "index"),
    [
        (0, ["a", "b"], 0),
        (1, ["a", "b"], 1),
        ("b", ["a", "b"], 1),
        (" 4", [" 3", " 4"], 1),
        ("4", [" 3", " 4"], 1),
        ("B", [" 3", " 4"], 1),
        ("c", [" 3", " 4", " 5"], 2),
        ("A", ["B", "A"], 1),  # a choice's own text comes before its letter
        ("1", ["1", "0"], 0),
    ],
)
def test_an_answer_is_an_index_a_text_or_a_letter(tmp_path, answer, choices, index):
    questions, bad = read_questions(
        written(tmp_path, {"context": "x", "choices": choices, "answer": answer})
    )
    assert questions[0].answer == index and not bad


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", "Invalid JSON"),
        ({"question": "x", "choices": ["a", "b"], "answer": 0}, "context: Field required"),
        ({**GOOD, "choices": ["a"]}, "choices: List should have at least 2 items"),
        ({**GOOD, "choices": ["a", ""]}, "choices: String should have at least 1 character"),
        ({**GOOD, "answer": 2}, "answer: got 2, accepted: an index 0 to 1"),
        ({**GOOD, "answer": -1}, "answer: got -1"),
        ({**GOOD, "answer": True}, "answer: Input should be a valid integer"),
        ({**GOOD, "answer": "five"}, 'answer: got "five"'),
        ({**GOOD, "choices": ["a", "a"], "answer": "a"}, 'answer: got "a"'),
    ],
)
def test_a_malformed_line_is_named_and_can_be_left_out(tmp_path, line, why):
    path = written(tmp_path, GOOD, "", line)
    with pytest.raises(DataError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}:3: ") and why in str(caught.value)
    questions, bad = read_questions(path, skip_bad=True)
    assert (
        [q.where for q in questions] == [f"{path}:1"]
        and len(bad) == 1
        and bad[0].startswith(f"{path}:3: ")
    )


def test_the_lines_of_the_page_are_questions(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith('{"context"')]
    questions, _ = read_questions(written(tmp_path, *lines))
    assert [(len(q.choices), q.answer) for q in questions] == [(2, 1), (3, 1)]


def test_a_file_without_questions_is_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no question"):
        read_questions(written(tmp_path))
    with pytest.raises(DataError, match="--choices: got .*missing.jsonl"):
        read_questions(str(tmp_path / "missing.jsonl"))


class Words:
    """A tokenizer that joins a space to the word behind it, as byte-level BPE does."""

    vocab_size, eod, file = 1000, 999, None

    def __init__(self):
        self.ids = {}

    def encode(self, text):
        pieces, word = [], ""
        for c in text:
            if c == " " and word.strip():
                pieces.append(word)
                word = ""
            word += c
        return [self.ids.setdefault(piece, len(self.ids)) for piece in [*pieces, word] if piece]


def asked(tmp_path, question, tokenizer=None, begin=(), window=64, **options):
    questions, _ = read_questions(written(tmp_path, question))
    return ask(questions, tokenizer or ByteTokenizer(), list(begin), window=window, **options)


def test_white_space_at_the_end_of_a_context_is_the_choices(tmp_path):
    words = Words()
    inside = asked(tmp_path, {"context": "two and ", "choices": ["two", "six"], "answer": 0}, words)
    before = asked(
        tmp_path, {"context": "two and", "choices": [" two", " six"], "answer": 0}, words
    )
    delimiter = asked(
        tmp_path,
        {"context": "two and", "choices": ["two", "six"], "answer": 0},
        words,
        delimiter=" ",
    )
    rows = [[(r.ids.tolist(), r.scored) for r in one.rows] for one in (inside, before, delimiter)]
    assert rows[0] == rows[1] == rows[2] and rows[0][0][1] == 1
    assert (inside.unspaced, before.unspaced, delimiter.unspaced) == (0, 0, 0)
    joined = {"context": "two and", "choices": ["two", " six"], "answer": 0}
    assert asked(tmp_path, joined).unspaced == 1
    with pytest.raises(DataError, match="the choice 'two' has 0 tokens of its own"):
        asked(tmp_path, joined, words)


def test_an_empty_context_begins_with_the_begin_token_or_the_end_of_a_document(tmp_path):
    question = {"context": "", "choices": ["ab", "c"], "answer": 0}
    assert [r.ids.tolist() for r in asked(tmp_path, question).rows] == [[256, 97, 98], [256, 99]]
    assert [r.ids.tolist() for r in asked(tmp_path, question, begin=[7]).rows] == [
        [7, 97, 98],
        [7, 99],
    ]
    assert [r.scored for r in asked(tmp_path, question).rows] == [2, 1]


def test_a_long_context_is_cut_from_the_left_and_counted(tmp_path):
    question = {"context": "0123456789", "choices": ["ab", "c"], "answer": 0}
    found = asked(tmp_path, question, window=4)
    assert [bytes(r.ids.tolist()) for r in found.rows] == [b"789ab", b"6789c"]
    assert found.truncated == 1 and asked(tmp_path, question, window=11).truncated == 0
    with pytest.raises(DataError, match=r":1: the choice 'abcde' has 5 tokens .*accepted: 1 to 4"):
        asked(tmp_path, {**question, "choices": ["abcde", "c"]}, window=4)


def test_the_best_choice_by_total_and_by_characters():
    assert best([-3.0, -2.0, -2.0]) == 1
    assert best([-3.0, -2.0], ["long one", "b"]) == 0
    # Characters, not bytes: both are 2.0 a character, the first wins.
    assert best([-4.0, -2.0], ["éé", "x"]) == 0


def test_a_digest_does_not_depend_on_the_files_name(tmp_path):
    (tmp_path / "b").mkdir()
    first, second = (
        read_questions(written(folder, GOOD))[0] for folder in (tmp_path, tmp_path / "b")
    )
    other, _ = read_questions(written(tmp_path, {**GOOD, "answer": 0}))
    assert digest(first) == digest(second) != digest(other)
