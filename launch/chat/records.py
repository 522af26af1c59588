"""One record of a chat file, in any of the layouts that ``finetune.py`` reads, as one kind of conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Conversation", "Malformed", "parse"]

ROLES = ("system", "developer", "user", "assistant", "tool")
# What ToolBench and ShareGPT call them.
_SPEAKERS = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "tool": "tool",
    "observation": "tool",
}
_LAYOUTS = 'an object with "messages", with "prompt" and "completion", or with "conversations"'


class Malformed(ValueError):
    """A record that cannot be read as a conversation; says what was given and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is rendered and learnt: messages, or a prompt and its completion as plain text."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """``role`` and ``content`` (str), of assistants also ``tool_calls``; empty for plain text."""
    learnt: list[bool] = field(default_factory=list)
    """For each message, whether its tokens are trained: messages of the assistant only."""
    tools: list[Any] | None = None
    """JSON schemas of functions, for the template."""
    prompt: str = ""
    completion: str | None = None
    """Of plain text; None where there are messages."""


def parse(text: str) -> Conversation | None:
    """The conversation of one line of a file.

    Args:
        text: a JSON object: ``{"messages": [{"role", "content", "tool_calls"?}, ...], "tools"?: [...]}``;
            ``{"prompt", "completion"}``, both text or both lists of messages; or ``{"conversations": [{"from",
            "value"}, ...]}`` as ToolBench and ShareGPT have it. Other keys of the object are left alone.

    Returns:
        None where there is nothing to learn: no words or calls of an assistant, or an empty completion.

    Raises:
        Malformed: anything else.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise Malformed(f"not JSON ({problem}), accepted: {_LAYOUTS}") from None
    return from_record(record)


def from_record(record: Any) -> Conversation | None:
    """:func:`parse` of what is read already."""
    if not isinstance(record, Mapping):
        raise Malformed(f"got {_short(record)}, accepted: {_LAYOUTS}")
    if "messages" in record:
        found = _of_messages(_messages(record["messages"], "messages"), 0, record)
    elif "prompt" in record and "completion" in record:
        found = _pair(record)
    elif "conversations" in record:
        found = _of_messages(_messages(record["conversations"], "conversations"), 0, record)
    else:
        raise Malformed(f"got an object with {', '.join(map(str, record)) or 'no keys'}, accepted: {_LAYOUTS}")
    if found.completion is None and not any(found.learnt):
        return None
    return None if found.completion == "" else found


def _pair(record: Mapping[str, Any]) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(prompt=_text(prompt, "prompt"), completion=_text(completion, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        given = f"{_short(prompt)} and {_short(completion)}"
        raise Malformed(f"prompt and completion: got {given}, accepted: both text or both lists of messages")
    before = _messages(prompt, "prompt")
    return _of_messages(before + _messages(completion, "completion"), len(before), record)


def _of_messages(messages: list[tuple[dict[str, Any], bool]], given: int, record: Mapping[str, Any]) -> Conversation:
    """The first ``given`` messages are a prompt, which is not trained."""
    return Conversation(
        messages=[message for message, _ in messages],
        learnt=[wanted and place >= given for place, (_, wanted) in enumerate(messages)],
        tools=_tools(record.get("tools")),
    )


def _messages(value: Any, key: str) -> list[tuple[dict[str, Any], bool]]:
    """Messages, and whether each is to be trained."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Malformed(f"{key}: got {_short(value)}, accepted: a list of messages")
    return [_message(one, f"{key}[{place}]") for place, one in enumerate(value)]


def _message(value: Any, key: str) -> tuple[dict[str, Any], bool]:
    if not isinstance(value, Mapping):
        raise Malformed(f"{key}: got {_short(value)}, accepted: an object with role and content")
    if "from" in value and "role" not in value:
        role = _SPEAKERS.get(value["from"]) if isinstance(value["from"], str) else None
        if role is None:
            raise Malformed(f"{key}.from: got {_short(value['from'])}, accepted: {', '.join(_SPEAKERS)}")
        if "value" not in value:
            raise Malformed(f"{key}.value: missing, accepted: text")
        content: Any = value["value"]
    else:
        role = value.get("role")
        role = "tool" if role == "function" else role
        if role not in ROLES:
            raise Malformed(f"{key}.role: got {_short(role)}, accepted: {', '.join(ROLES)}")
        content = value.get("content")
    calls = _calls(value.get("tool_calls"), key) if role == "assistant" else []
    if role == "assistant" and not calls and value.get("function_call") is not None:  # what one call was before
        calls = _calls([value["function_call"]], key)
    if content is None and not calls:
        raise Malformed(f"{key}.content: got null, accepted: text")
    message = {"role": role, "content": _content(content, key)}
    # Templates use them: a tool's name and the call that it answers, what a model thought before it spoke.
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(value.get(name), str):
            message[name] = _text(value[name], f"{key}.{name}")
    if calls:
        message["tool_calls"] = calls
    weight = value.get("weight", 1)
    if weight not in (0, 1):
        raise Malformed(f"{key}.weight: got {_short(weight)}, accepted: 0 or 1")
    return message, role == "assistant" and bool(weight) and bool(message["content"] or calls)


def _content(value: Any, key: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Malformed(f"{key}.content: got the part {_short(part)}, accepted: parts of type text")
        value = "".join(part["text"] for part in value)
    return _text(value, f"{key}.content")


def _calls(value: Any, key: str) -> list[dict[str, Any]]:
    """Tool calls as templates expect them: arguments as an object, also where they are given as JSON text."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed(f"{key}.tool_calls: got {_short(value)}, accepted: a list of calls")
    calls = []
    for place, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Malformed(
                f'{key}.tool_calls[{place}]: got {_short(call)}, accepted: {{"function": {{"name", "arguments"}}}}'
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise Malformed(
                    f"{key}.tool_calls[{place}].arguments: got {_short(arguments)}, accepted: an object, or its JSON"
                ) from None
        made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({**made, "id": call["id"]} if isinstance(call.get("id"), str) else made)
    return calls


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):  # Parquet and its relatives cannot keep schemas of different shapes
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise Malformed(f"tools: got {_short(value)}, accepted: a list of JSON schemas") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise Malformed(f"tools: got {_short(value)}, accepted: a list of JSON schemas")
    return value


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{key}: got {_short(value)}, accepted: text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{key}: holds half of a surrogate pair, accepted: text that can be written as UTF-8") from None
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
