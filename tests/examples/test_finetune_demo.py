"""The fine-tuning demo: its conversations, the loop around the model, a few steps of it, and
(slow) all of it.
"""

import importlib
import json
import random
import runpy
import subprocess
import sys

import pytest

from tests.examples.run import EXAMPLES, ROOT
from tests.support import Program

pytest.importorskip("transformers")
FOLDER = EXAMPLES / "finetune_demo"


@pytest.fixture
def demo(monkeypatch):
    """Modules of the demo, which import one another by their bare names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("task", "ask", "model")
    yield tuple(importlib.import_module(name) for name in names)
    for name in names:
        sys.modules.pop(name, None)


def test_conversations_are_right(demo):
    task, ask, _ = demo
    for question, calls, result in task.problems(50, seed=3):
        chat = task.conversation(question, calls, result)
        assert ask.right(chat, result) and not ask.right(chat, result + "0")
        last = calls[-1].split()
        assert str(eval(" ".join(last))) == result
        assert [m["content"] for m in chat if m["role"] == "tool"][-1] == result
    held_out = {question for question, *_ in task.problems(30, seed=1)}
    assert not held_out & {
        question for question, *_ in task.problems(300, seed=2, without=held_out)
    }
    assert task.calculator("2 + ") == "error" and task.calculator("__import__('os')") == "error"


def test_the_calculator_is_run_for_the_model(demo):
    task, ask, model = demo
    question, calls, result = next(
        p for p in task.problems(50, seed=random.Random(4).randint(0, 9)) if len(p[1]) == 2
    )
    perfect = task.conversation(question, calls, result)
    chat = perfect[:1]
    said = [model.spoken(message) for message in perfect if message["role"] == "assistant"]
    assert [ask.step(chat, text) for text in said] == [True, True, False]
    assert json.dumps(chat[1]["tool_calls"]) == json.dumps(perfect[1]["tool_calls"]) and ask.right(
        chat, result
    )
    assert not ask.step(perfect[:1], "<tool_call>{</tool_call>")


@pytest.mark.slow
def test_a_few_steps(tmp_path):
    """Every part runs; a model that has learnt nothing is not right, and that is status 1."""
    options = [
        "--output",
        str(tmp_path / "demo"),
        "--steps",
        "2",
        "--questions",
        "4",
        "--ranks",
        "1",
    ]
    # Ranks are not forked: run.py has made a model and a tokenizer before torchrun starts them, and
    # threads with these.
    program = Program(
        [str(FOLDER / "run.py"), *options], tmp_path, ROOT, ranks=False, CUDA_VISIBLE_DEVICES=""
    )
    printed, _ = program.communicate(timeout=600)
    assert program.returncode == 1 and "coat: 0 of 4 right, 0.0 %" in printed, printed
    assert (tmp_path / "demo" / "coat" / "hf" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "{file}"], "--output: got {file}, accepted: a folder to write to"),
        (
            ["--output", "{folder}"],
            "--output: got {folder}, which holds something else, accepted: another folder",
        ),
        (["--steps", "0"], "--steps: got 0, accepted: 1 or more"),
        (["--ranks", "two"], "--ranks: got 'two', accepted: a whole number"),
        (["--question", "3"], "--question: no such option (did you mean --questions?)"),
    ],
)
def test_a_wrong_option_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    filled = [text.format(file=tmp_path / "file", folder=tmp_path) for text in options]
    monkeypatch.setattr(sys, "argv", ["run.py", *filled])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(
        "finetune_demo: error: " + message.format(file=tmp_path / "file", folder=tmp_path)
    ), line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_all_of_it(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "--output", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0 and " % (at least 90 %)" in done.stdout, done.stdout + done.stderr
