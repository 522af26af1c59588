"""Layouts of chat files, and what is refused in them."""

import json

import pytest

from launch.chat.files import find_files, records
from launch.chat.records import Malformed, parse
from launch.prep import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def roles(text):
    found = parse(text)
    return [(m["role"], m["content"], learnt) for m, learnt in zip(found.messages, found.learnt, strict=True)]


def test_layouts_mean_the_same():
    wanted = [("user", "hi", False), ("assistant", "hello", True)]
    assert roles(json.dumps({"messages": CHAT, "id": 7})) == wanted
    assert roles(json.dumps({"conversations": CHAT})) == wanted
    for user, assistant in (("human", "gpt"), ("user", "assistant")):
        turns = [{"from": user, "value": "hi"}, {"from": assistant, "value": "hello"}]
        assert roles(json.dumps({"conversations": turns})) == wanted
    assert roles(json.dumps({"prompt": CHAT[:1], "completion": CHAT[1:]})) == wanted


def test_toolbench_layout():
    turns = [("system", "S"), ("user", "U"), ("assistant", "Action: f"), ("function", "{}"), ("assistant", "done")]
    found = roles(json.dumps({"id": "x", "conversations": [{"from": f, "value": v} for f, v in turns]}))
    assert [role for role, *_ in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert [learnt for *_, learnt in found] == [False, False, True, False, True]


def test_of_a_prompt_nothing_is_learnt():
    found = roles(json.dumps({"prompt": [*CHAT, CHAT[0]], "completion": [CHAT[1]]}))
    assert [learnt for *_, learnt in found] == [False, False, False, True]


def test_weight_zero_is_not_learnt():
    found = roles(json.dumps({"messages": [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT]}))
    assert [learnt for *_, learnt in found] == [False, False, False, True]


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss", "loss_mask", "loss_scale"])
def test_a_turn_that_its_data_masks_is_not_learnt(key):
    for no, yes in ((0, 1), (False, True), (0, None)):
        found = roles(json.dumps({"messages": [CHAT[0], {**CHAT[1], key: no}, CHAT[0], {**CHAT[1], key: yes}]}))
        assert [learnt for *_, learnt in found] == [False, False, False, True]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no", key: 0}, {"from": "gpt", "value": "a"}]
    assert [learnt for *_, learnt in roles(json.dumps({"conversations": turns}))] == [False, False, True]


@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
def test_a_system_prompt_beside_the_turns_is_the_first_message(key):
    wanted = [("system", "S", False), ("user", "hi", False), ("assistant", "hello", True)]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert roles(json.dumps({"conversations": turns, key: "S"})) == wanted
    assert roles(json.dumps({"prompt": CHAT[:1], "completion": CHAT[1:], key: "S"})) == wanted
    told = [{"role": "system", "content": "S"}, *CHAT]
    assert roles(json.dumps({"messages": told, key: "S"})) == wanted, "said twice"
    assert roles(json.dumps({"messages": CHAT, key: ""})) == wanted[1:]
    with pytest.raises(Malformed, match=f"{key}: got another text than the first message"):
        parse(json.dumps({"messages": told, key: "other"}))


def test_functions_of_the_older_layout_are_tools():
    schema = {"name": "f", "parameters": {}}
    wanted = [{"type": "function", "function": schema}]
    for functions in ([schema], json.dumps([schema])):
        assert parse(json.dumps({"messages": CHAT, "functions": functions})).tools == wanted
    with pytest.raises(Malformed, match="functions: given beside tools"):
        parse(json.dumps({"messages": CHAT, "functions": [schema], "tools": wanted}))


def test_null_is_no_key():
    """As libraries write the keys that other rows have."""
    keys = ("weight", "name", "tool_calls", "function_call", "train", "reasoning_content", "images", "refusal")
    turns = [{**turn, **dict.fromkeys(keys)} for turn in CHAT]
    others = ("tools", "functions", "system", "prompt", "completion", "conversations", "chosen", "images", "label")
    wanted = [("user", "hi", False), ("assistant", "hello", True)]
    assert roles(json.dumps({"messages": turns, **dict.fromkeys(others)})) == wanted
    for empty in (None, []):
        assert roles(json.dumps({"messages": empty, "conversations": turns})) == wanted
        assert roles(json.dumps({"messages": empty, "prompt": CHAT[:1], "completion": CHAT[1:]})) == wanted
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    silent = [CHAT[0], call, {"role": "tool", "content": None}, {"role": "assistant", "content": None}, CHAT[1]]
    assert [learnt for *_, learnt in roles(json.dumps({"messages": silent}))] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("of_record", "of_turn", "named"),
    [
        ({"loss_mask": [0, 1]}, {}, "loss_mask"),
        ({"train": False}, {}, "train"),
        ({"enable_thinking": True}, {}, "enable_thinking"),
        ({}, {"is_masked": True}, r"messages\[1\].is_masked"),
        ({}, {"ignore_loss": False}, r"messages\[1\].ignore_loss"),
        ({}, {"token_weights": [1, 0]}, r"messages\[1\].token_weights"),
        ({}, {"reasoning": "so"}, r"messages\[1\].reasoning: .* accepted: reasoning_content"),
        ({}, {"tools": [{"name": "f"}]}, r"messages\[1\].tools"),
    ],
)
def test_keys_that_say_what_is_learnt_in_another_way_are_refused(of_record, of_turn, named):
    with pytest.raises(Malformed, match=f"^{named}"):
        parse(json.dumps({"messages": [CHAT[0], {**CHAT[1], **of_turn}], **of_record}))
    metadata = {"loss": 0.5, "weight": 2, "train_split": "a", "id": 1}
    assert roles(json.dumps({"messages": CHAT, **metadata}))[1] == ("assistant", "hello", True)


def test_calls_are_of_the_assistant():
    with pytest.raises(Malformed, match=r"messages\[0\].tool_calls: .* of user"):
        parse(json.dumps({"messages": [{**CHAT[0], "tool_calls": [{"function": {"name": "f"}}]}, CHAT[1]]}))


def test_arguments_of_tool_calls_are_objects():
    for arguments in ({"a": 1}, '{"a": 1}'):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        found = parse(json.dumps({"messages": [CHAT[0], message], "tools": '[{"name": "f"}]'}))
        made = found.messages[1]["tool_calls"][0]
        assert made["function"] == {"name": "f", "arguments": {"a": 1}} and made["id"] == "c1"
        assert found.learnt == [False, True] and found.tools == [{"name": "f"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": []},
        {"messages": CHAT[:1]},
        {"messages": [CHAT[0], {"role": "assistant", "content": ""}]},
        {"prompt": "x", "completion": ""},
        {"messages": [CHAT[0], {**CHAT[1], "weight": 0}]},
    ],
)
def test_nothing_to_learn(record):
    assert parse(json.dumps(record)) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "accepted: an object"),
        ('{"text": "x"}', "got an object with text"),
        ('{"messages": "x"}', "messages: got"),
        ('{"messages": [{"role": "asistant", "content": "x"}]}', 'messages[0].role: got "asistant"'),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content: got 3"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "parts of type text"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}', "tool_calls[0]"),
        ('{"messages": [{"role": "user", "content": "x", "weight": 2}]}', "weight: got 2"),
        ('{"conversations": [{"from": "me", "value": "x"}]}', 'conversations[0].from: got "me"'),
        ('{"prompt": "x", "completion": []}', "accepted: both text"),
        ('{"prompt": 1, "completion": 2}', "prompt: got 1"),
        ('{"messages": [{"role": "user", "content": "x", "train": true}]}', "messages[0].train: got true of a turn of"),
        ('{"messages": [{"role": "assistant", "content": "x", "train": 0.5}]}', "messages[0].train: got 0.5"),
        (
            '{"messages": [{"role": "assistant", "content": "x", "train": 0, "weight": 1}]}',
            "weight 1, train 0, accepted",
        ),
        ('{"messages": [{"role": "user", "content": "x", "images": ["a"]}]}', "messages[0].images: got"),
        ('{"messages": [], "images": ["a.png"]}', "images: got"),
        ('{"messages": [], "chosen": [1]}', "chosen: got [1], accepted: no preferences"),
        ('{"prompt": "x", "completion": "y", "label": false}', "label: got false"),
        ('{"prompt": "x", "completion": "y", "system": "S"}', "system: got"),
        ('{"messages": [], "history": [["a", "b"]]}', "history: got"),
        ('{"messages": [{"role": "user", "content": "a"}], "conversations": [{}]}', "messages and conversations: got"),
    ],
)
def test_malformed(text, named):
    with pytest.raises(Malformed) as problem:
        parse(text)
    assert named in str(problem.value)


def test_lines_and_arrays_of_files(tmp_path):
    lines, array, empty = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "none"
    lines.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"b": 2}\n\xff\n')
    array.write_text('[{"a": 1}, {"b": 2}]')
    assert list(records(lines)) == [(1, '{"a": 1}'), (4, '{"b": 2}'), (5, None)]
    assert list(records(array)) == [(1, {"a": 1}), (2, {"b": 2})]
    array.write_text('[{"a": 1}, ')
    with pytest.raises(DataError, match="not a whole JSON array"):
        list(records(array))
    assert find_files([str(tmp_path)], "--data") == [lines, array]
    empty.mkdir()
    for given in ([str(empty)], [str(lines), str(lines)], [str(tmp_path / "missing")]):
        with pytest.raises(DataError, match="^--data: "):
            find_files(given, "--data")


def test_a_function_call_of_the_older_layout_is_a_tool_call():
    call = {"name": "f", "arguments": '{"a": 1}'}
    for content in (None, "", "let me see"):
        message = {"role": "assistant", "content": content, "function_call": call}
        found = parse(json.dumps({"messages": [CHAT[0], message]}))
        assert found.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
        assert found.learnt == [False, True]


def test_nesting_without_end_is_malformed():
    deep = "[" * 100_000
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    for text in (
        '{"messages": ' + deep,
        json.dumps({"messages": [message]}),
        json.dumps({"messages": [], "tools": deep}),
    ):
        with pytest.raises(Malformed):
            parse(text)


@pytest.mark.parametrize(("head", "kind"), [(b"\x1f\x8b\x08", "gzip"), (b"PAR1", "Parquet")])
def test_a_packed_file_is_refused_as_a_whole(tmp_path, head, kind):
    """With --skip-bad each of its lines would be left out."""
    (tmp_path / "chats.jsonl").write_bytes(head + b"\n\xff\n")
    with pytest.raises(DataError, match=f"is a {kind} file"):
        list(records(tmp_path / "chats.jsonl"))
