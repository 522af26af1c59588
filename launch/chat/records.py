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
_SILENT = ("assistant", "tool")
"""Roles whose turns may have no words."""
LEARNT = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_scale")
"""Keys of a turn by which layouts say whether it is learnt: OpenAI's, axolotl's, verl's, ms-swift's."""
_LISTS = ("messages", "conversations")
_SYSTEM = ("system", "system_prompt", "system_message")
_OF_RECORDS = {
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages"), "no preferences"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "text alone"),
    "history": "turns before, as messages",
    "documents": "their text, in a message",
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking"), "a template that needs none (--chat-template)"),
}
"""Keys beside the messages that say what a model is told or learns, and what is accepted in their place."""
_OF_TURNS = {
    "train_detail": "turns that are learnt as a whole",
    "refusal": "the words as content",
    "reasoning": "reasoning_content",
    **dict.fromkeys(("tools", "functions"), "tools beside the messages"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "text alone"),
}
"""The same of a turn."""
_MASKS = ("mask", "train", "loss", "weight")
"""In the name of an unknown key that holds a boolean or a list, these say what is learnt, one way or the other."""
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
            "value"}, ...]}`` as ToolBench and ShareGPT have it. ``system`` is the first message. A null is no key. Keys
            that say what is told or learnt in a way that is not known here are refused; all others are left alone.

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
    record = {key: value for key, value in record.items() if value is not None}
    for key, accepted in _OF_RECORDS.items():
        if record.get(key):
            raise Malformed(f"{key}: got {_short(record[key])}, accepted: {accepted}")
    _refuse_masks(record, "")
    for key in ("label", "kto_tag"):
        if record.get(key) in (False, "false"):
            raise Malformed(f"{key}: got {_short(record[key])}, accepted: what is to be learnt")
    lists = [key for key in _LISTS if key in record]
    lists = [key for key in lists if record[key]] or lists[:1]
    if len(lists) > 1 and record["messages"] != record["conversations"]:
        raise Malformed("messages and conversations: got both, accepted: one of the two")
    if lists and (record[lists[0]] or not {"prompt", "completion"} <= record.keys()):
        found = _of_messages(_messages(record[lists[0]], lists[0]), 0, record)
    elif "prompt" in record and "completion" in record:
        found = _pair(record)
    else:
        raise Malformed(f"got an object with {', '.join(map(str, record)) or 'no keys'}, accepted: {_LAYOUTS}")
    if found.completion is None and not any(found.learnt):
        return None
    return None if found.completion == "" else found


def _pair(record: Mapping[str, Any]) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if key := next((key for key in (*_SYSTEM, "tools", "functions") if record.get(key)), None):
            raise Malformed(f"{key}: got {_short(record[key])} beside text, accepted: lists of messages beside it")
        return Conversation(prompt=_text(prompt, "prompt"), completion=_text(completion, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        given = f"{_short(prompt)} and {_short(completion)}"
        raise Malformed(f"prompt and completion: got {given}, accepted: both text or both lists of messages")
    before = _messages(prompt, "prompt")
    return _of_messages(before + _messages(completion, "completion"), len(before), record)


def _of_messages(messages: list[tuple[dict[str, Any], bool]], given: int, record: Mapping[str, Any]) -> Conversation:
    """The first ``given`` messages are a prompt, which is not trained."""
    for key in _SYSTEM:
        if key not in record or record[key] == "":
            continue
        told = _text(record[key], key)
        first = messages[0][0] if messages else {}
        if first.get("role") not in ("system", "developer"):
            messages, given = [({"role": "system", "content": told}, False), *messages], given + 1
        elif first["content"] != told:
            raise Malformed(f"{key}: got another text than the first message has, accepted: one of the two")
    return Conversation(
        messages=[message for message, _ in messages],
        learnt=[wanted and place >= given for place, (_, wanted) in enumerate(messages)],
        tools=_all_tools(record),
    )


def _all_tools(record: Mapping[str, Any]) -> list[Any] | None:
    """The schemas of ``tools``, or of ``functions``, which the layout of ``function_call`` has."""
    tools, functions = _tools(record.get("tools"), "tools"), _tools(record.get("functions"), "functions")
    if tools and functions:
        raise Malformed("functions: given beside tools, accepted: one of the two")
    return tools or (functions and [{"type": "function", "function": one} for one in functions])


def _messages(value: Any, key: str) -> list[tuple[dict[str, Any], bool]]:
    """Messages, and whether each is to be trained."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Malformed(f"{key}: got {_short(value)}, accepted: a list of messages")
    return [_message(one, f"{key}[{place}]") for place, one in enumerate(value)]


def _message(value: Any, key: str) -> tuple[dict[str, Any], bool]:
    if not isinstance(value, Mapping):
        raise Malformed(f"{key}: got {_short(value)}, accepted: an object with role and content")
    value = {name: one for name, one in value.items() if one is not None}
    for name, accepted in _OF_TURNS.items():
        if value.get(name):
            raise Malformed(f"{key}.{name}: got {_short(value[name])}, accepted: {accepted}")
    _refuse_masks(value, f"{key}.", known=LEARNT)
    if "from" in value and "role" not in value:
        role = _SPEAKERS.get(value["from"]) if isinstance(value["from"], str) else None
        if role is None:
            raise Malformed(f"{key}.from: got {_short(value['from'])}, accepted: {', '.join(_SPEAKERS)}")
        content: Any = value.get("value")
        if content is None and role not in _SILENT:
            raise Malformed(f"{key}.value: missing, accepted: text")
    else:
        role = value.get("role")
        role = "tool" if role == "function" else role
        if role not in ROLES:
            raise Malformed(f"{key}.role: got {_short(role)}, accepted: {', '.join(ROLES)}")
        content = value.get("content")
    for of_calls in ("tool_calls", "function_call"):
        if role != "assistant" and value.get(of_calls):
            raise Malformed(
                f"{key}.{of_calls}: got {_short(value[of_calls])} of {role}, accepted: the assistant's calls"
            )
    calls = _calls(value.get("tool_calls"), key)
    if role == "assistant" and not calls and "function_call" in value:  # what one call was before
        calls = _calls([value["function_call"]], key)
    if content is None and role not in _SILENT:
        raise Malformed(f"{key}.content: got null, accepted: text")
    message = {"role": role, "content": _content(content, key)}
    # Templates use them: a tool's name and the call that it answers, what a model thought before it spoke.
    for name in ("name", "tool_call_id", "reasoning_content", "thinking"):
        if isinstance(value.get(name), str):
            message[name] = _text(value[name], f"{key}.{name}")
    if calls:
        message["tool_calls"] = calls
    learnt = _is_learnt(value, role, key)
    return message, role == "assistant" and learnt and bool(message["content"] or calls)


def _refuse_masks(value: Mapping[str, Any], where: str, known: Sequence[str] = ()) -> None:
    """Refuse keys that say what is learnt in a way that is not known here."""
    for name, one in value.items():
        if name not in known and isinstance(one, bool | list) and any(word in str(name).lower() for word in _MASKS):
            raise Malformed(f"{where}{name}: got {_short(one)}, accepted: {', '.join(LEARNT)} of turns, 0 or 1")


def _is_learnt(value: Mapping[str, Any], role: str, key: str) -> bool:
    """What the :data:`LEARNT` keys of a turn say, which is the same."""
    said = {name: value[name] for name in LEARNT if name in value}
    for name, one in said.items():
        if one not in (0, 1):
            raise Malformed(f"{key}.{name}: got {_short(one)}, accepted: 0 or 1")
        if one and name != "weight" and role != "assistant":
            raise Malformed(
                f"{key}.{name}: got {_short(one)} of a turn of {role}, accepted: the assistant's are learnt"
            )
    if len({bool(one) for one in said.values()}) > 1:
        raise Malformed(f"{key}: got {', '.join(f'{n} {_short(one)}' for n, one in said.items())}, accepted: the same")
    return all(said.values())


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


def _tools(value: Any, key: str) -> list[Any] | None:
    if isinstance(value, str):  # Parquet and its relatives cannot keep schemas of different shapes
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise Malformed(f"{key}: got {_short(value)}, accepted: a list of JSON schemas") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise Malformed(f"{key}: got {_short(value)}, accepted: a list of JSON schemas")
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
