"""The fine-tuning demo: its conversations, the loop around the model, a few steps of it, and (slow) all of it."""

import importlib
import json
import random
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
    assert not held_out & {question for question, *_ in task.problems(300, seed=2, without=held_out)}
    assert task.calculator("2 + ") == "error" and task.calculator("__import__('os')") == "error"


def test_the_calculator_is_run_for_the_model(demo):
    task, ask, model = demo
    question, calls, result = next(p for p in task.problems(50, seed=random.Random(4).randint(0, 9)) if len(p[1]) == 2)
    perfect = task.conversation(question, calls, result)
    chat = perfect[:1]
    said = [model.spoken(message) for message in perfect if message["role"] == "assistant"]
    assert [ask.step(chat, text) for text in said] == [True, True, False]
    assert json.dumps(chat[1]["tool_calls"]) == json.dumps(perfect[1]["tool_calls"]) and ask.right(chat, result)
    assert not ask.step(perfect[:1], "<tool_call>{</tool_call>")


def test_a_few_steps(tmp_path):
    """Every part runs; a model that has learnt nothing is not right, and that is status 1."""
    options = ["--output", str(tmp_path / "demo"), "--steps", "2", "--questions", "4", "--ranks", "1"]
    program = Program([str(FOLDER / "run.py"), *options], tmp_path, ROOT, CUDA_VISIBLE_DEVICES="")
    printed, _ = program.communicate(timeout=600)
    assert program.returncode == 1 and "coat: 0 of 4 right, 0.0 %" in printed, printed
    assert (tmp_path / "demo" / "coat" / "hf" / "config.json").exists()


@pytest.mark.slow
def test_all_of_it(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "--output", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0 and "wanted: 90 %" in done.stdout, done.stdout + done.stderr
