"""Layouts of chat files, and what is refused in them."""

import json

import pytest

from launch.chat.records import LEARNT, Malformed, parse

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
CHAT = [USER, ANSWER]
READ = [("user", "hi", False), ("assistant", "hello", True)]


def roles(record):
    found = parse(json.dumps(record))
    return [
        (m["role"], m["content"], learnt)
        for m, learnt in zip(found.messages, found.learnt, strict=True)
    ]


def learnt(turns, **record):
    return [one for *_, one in roles({"messages": turns, **record})]


def shared_gpt(*turns):
    return [{"from": name, "value": text} for name, text in turns]


def test_layouts_mean_the_same():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    for record in (
        {"messages": CHAT, "id": 7},
        {"messages": [USER, {**ANSWER, "content": parts}]},
        {"conversations": CHAT},
        {"conversations": shared_gpt(("human", "hi"), ("gpt", "hello"))},
        {"conversations": shared_gpt(("user", "hi"), ("assistant", "hello"))},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
    ):
        assert roles(record) == READ
    assert [one for *_, one in roles({"prompt": [*CHAT, USER], "completion": [ANSWER]})] == [
        False,
        False,
        False,
        True,
    ]


def test_toolbench_layout():
    turns = [
        ("system", "S"),
        ("user", "U"),
        ("assistant", "Action: f"),
        ("function", "{}"),
        ("assistant", "done"),
    ]
    found = roles({"id": "x", "conversations": shared_gpt(*turns)})
    assert [role for role, *_ in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert [learnt for *_, learnt in found] == [False, False, True, False, True]


@pytest.mark.parametrize("key", LEARNT)
def test_a_turn_that_its_data_masks_is_not_learnt(key):
    for no, yes in ((0, 1), (False, True), (0, None)):
        assert learnt([USER, {**ANSWER, key: no}, USER, {**ANSWER, key: yes}]) == [
            False,
            False,
            False,
            True,
        ]
    turns = shared_gpt(("human", "hi"), ("gpt", "no"), ("gpt", "a"))
    turns[1][key] = 0
    assert [one for *_, one in roles({"conversations": turns})] == [False, False, True]


@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
def test_a_system_prompt_beside_the_turns_is_the_first_message(key):
    told = [{"role": "system", "content": "S"}, *CHAT]
    for record in (
        {"conversations": shared_gpt(("human", "hi"), ("gpt", "hello"))},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"messages": told},
    ):
        assert roles({**record, key: "S"}) == [("system", "S", False), *READ]
    assert roles({"messages": CHAT, key: ""}) == READ
    with pytest.raises(Malformed, match=f"{key}: got another text than the first message"):
        parse(json.dumps({"messages": told, key: "other"}))


def test_null_is_no_key():
    """As libraries write the keys that other rows have."""
    keys = (
        "weight",
        "name",
        "tool_calls",
        "function_call",
        "train",
        "reasoning_content",
        "images",
        "refusal",
    )
    turns = [{**turn, **dict.fromkeys(keys)} for turn in CHAT]
    others = (
        "tools",
        "functions",
        "system",
        "prompt",
        "completion",
        "conversations",
        "chosen",
        "images",
        "label",
    )
    assert roles({"messages": turns, **dict.fromkeys(others)}) == READ
    for empty in (None, []):
        assert roles({"messages": empty, "conversations": turns}) == READ
        assert roles({"messages": empty, "prompt": CHAT[:1], "completion": CHAT[1:]}) == READ
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    silent = [
        USER,
        call,
        {"role": "tool", "content": None},
        {"role": "assistant", "content": None},
        ANSWER,
    ]
    assert learnt(silent) == [False, True, False, False, True]


CALL = {"name": "f", "arguments": {"a": None}}


@pytest.mark.parametrize(
    "given",
    [
        {"tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
        {"tool_calls": [{"function": {**CALL, "arguments": '{"a": null}'}}]},
        {"tool_calls": [CALL]},
        {"function_call": {**CALL, "arguments": '{"a": null}'}},
    ],
)
@pytest.mark.parametrize("content", [None, "", "let me see"])
def test_calls_have_one_layout(given, content):
    found = parse(
        json.dumps({"messages": [USER, {"role": "assistant", "content": content, **given}]})
    )
    (call,) = found.messages[1]["tool_calls"]
    assert call["function"] == CALL and call["type"] == "function" and call.get("id", "c1") == "c1"
    assert found.learnt == [False, True]


def test_tools_have_one_layout():
    schema = {"name": "f", "parameters": {}}
    wanted = [{"type": "function", "function": schema}]
    for key, value in (("tools", wanted), ("functions", [schema])):
        for given in (value, json.dumps(value)):
            assert parse(json.dumps({"messages": CHAT, key: given})).tools == wanted


@pytest.mark.parametrize(
    "record",
    [
        {"messages": []},
        {"messages": CHAT[:1]},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"prompt": "x", "completion": ""},
        {"messages": [USER, {**ANSWER, "weight": 0}]},
        {"messages": [USER, {**ANSWER, "weight": 1, "train": False}]},
    ],
)
def test_nothing_to_learn(record):
    assert parse(json.dumps(record)) is None


def test_keys_that_are_no_masks_are_ignored():
    assert learnt(CHAT, loss=0.5, weight=2, train_split="a", id=1) == [False, True]


@pytest.mark.parametrize(
    ("turn", "key"),
    [
        ({"role": "asistant"}, "role: got"),
        ({"content": 3}, "content: got 3"),
        ({"content": [{"type": "image"}]}, "content: got"),
        ({"content": [{"type": "text"}]}, "content: got"),
        ({"tool_calls": [{"function": {}}]}, "tool_calls[0].function.name: got"),
        (
            {"tool_calls": [{"name": "f", "arguments": "[" * 100_000}]},
            "tool_calls[0].function.arguments: got",
        ),
        ({"weight": 2}, "weight: got 2"),
        ({"train": 0.5}, "train: got 0.5"),
        ({"role": "user", "train": True}, "train: got true of a turn of user"),
        ({"is_masked": True}, "is_masked: got true"),
        ({"ignore_loss": False}, "ignore_loss: got false"),
        ({"token_weights": [1, 0]}, "token_weights: got"),
        ({"reasoning": "so"}, 'reasoning: got "so"'),
        ({"tools": [{"name": "f"}]}, "tools: got"),
        ({"images": ["a"]}, "images: got"),
    ],
)
def test_a_malformed_turn_is_named(turn, key):
    with pytest.raises(Malformed) as problem:
        parse(json.dumps({"messages": [USER, {**ANSWER, **turn}]}))
    assert str(problem.value).startswith(f"messages[1].{key}") and "accepted: " in str(
        problem.value
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ('{"messages": ' + "[" * 100_000, "not JSON"),
        ("[1]", "accepted: an object"),
        ('{"text": "x"}', "got an object with text"),
        ('{"messages": "x"}', "messages: got"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content: got null"),
        ('{"conversations": [{"from": "me", "value": "x"}]}', 'conversations[0].role: got "me"'),
        ('{"prompt": "x", "completion": []}', "completion: got []"),
        ('{"prompt": 1, "completion": 2}', "prompt: got 1"),
        ('{"prompt": "x", "completion": "y", "label": false}', "label: got false"),
        ('{"prompt": "x", "completion": "y", "system": "S"}', "system: got"),
        ('{"messages": [], "images": ["a.png"]}', "images: got"),
        ('{"messages": [], "chosen": [1]}', "chosen: got [1]"),
        ('{"messages": [], "history": [["a", "b"]]}', "history: got"),
        ('{"messages": [], "loss_mask": [0, 1]}', "loss_mask: got"),
        ('{"messages": [], "train": false}', "train: got false"),
        ('{"messages": [], "enable_thinking": true}', "enable_thinking: got true"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tools": "%s"}' % ("[" * 100_000),
            "tools: got",
        ),
    ],
)
def test_a_malformed_record_is_named(text, named):
    with pytest.raises(Malformed) as problem:
        parse(text)
    assert named in str(problem.value) and "accepted: " in str(problem.value)
