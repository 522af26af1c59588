"""One record of a chat file, in any of the layouts that ``finetune.py`` reads, as one kind of
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError, model_validator

__all__ = ["Conversation", "Malformed", "parse"]

LEARNT = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_scale")
"""Keys of a turn by which layouts say whether it is learnt: OpenAI's, axolotl's, verl's,
ms-swift's.
"""
_MASKS = ("mask", "train", "loss", "weight")
"""In the name of an unknown key that holds a boolean or a list, these say what is learnt, one
way or the other.
"""
_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
}
"""Roles by the names that ToolBench and ShareGPT have for them."""
_SYSTEM = ("system", "system_prompt", "system_message")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_OF_RECORDS = (
    *_MEDIA,
    *("chosen", "rejected", "rejected_response", "rejected_messages"),
    *("history", "documents", "chat_template_kwargs", "enable_thinking"),
)
"""Keys beside the messages that change what a model is told or learns, and are not supported."""
_OF_TURNS = (*_MEDIA, "train_detail", "refusal", "reasoning", "tools", "functions")
"""The same of a turn."""
_LAYOUTS = 'an object with "messages", with "prompt" and "completion", or with "conversations"'


class Malformed(ValueError):
    """A record that cannot be read as a conversation; names what was given and what is accepted."""


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


def _decoded(value: Any) -> Any:
    """A value that may be given as its JSON text, as columns of Parquet have it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise ValueError("a value, or its JSON text") from None


def _joined(value: Any) -> Any:
    """The text of a list of parts."""
    if not isinstance(value, list):
        return value
    texts: list[Any] = [
        part.get("text")
        for part in value
        if isinstance(part, Mapping) and part.get("type") == "text"
    ]
    if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
        raise ValueError("parts of type text")
    return "".join(texts)


class _Function(BaseModel):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_decoded)] = {}


class _Call(BaseModel):
    type: Literal["function"] = "function"
    function: _Function
    id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, value: Any) -> Any:
        return (
            {"function": value} if isinstance(value, Mapping) and "function" not in value else value
        )


class _Message(BaseModel):
    """A turn as templates expect it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined)]
    # Templates use a tool's name, the call that it answers, and what a model thought before it
    # spoke.
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    tool_calls: list[_Call] | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        """A turn of ShareGPT (``from``, ``value``), and the older form of one call,
        ``function_call``.
        """
        if not isinstance(value, Mapping):
            return value
        role, content = (
            value.get("role", value.get("from")),
            value.get("content", value.get("value")),
        )
        call = value.get("function_call")
        calls = value.get("tool_calls") or (None if call is None else [call])
        role = _SPEAKERS.get(str(role), role)
        if content is None and role in ("assistant", "tool"):
            content = ""
        known = {key: one for key, one in value.items() if key in cls.model_fields}
        return {**known, "role": role, "content": content, "tool_calls": calls}


_Tools = Annotated[list[dict[str, Any]] | None, BeforeValidator(_decoded)]
_MESSAGES, _TEXT, _TOOLS = TypeAdapter(list[_Message]), TypeAdapter(str), TypeAdapter(_Tools)


def parse(text: str | bytes | Mapping[str, Any]) -> Conversation | None:
    """The conversation of one line of a file: of a JSON object, or its text.

    Layouts: ``{"messages": [{"role", "content", "tool_calls"?}, ...], "tools"?: [...]}``;
    ``{"prompt", "completion"}``, both text or both lists of messages; ``{"conversations": [{"from",
    "value"}, ...]}`` of ToolBench and ShareGPT. ``system`` is the first message. A null is no key.
    Unsupported keys that would change what is told or learnt are refused; all others are ignored.

    Returns:
        None where there is nothing to learn: no words or calls of an assistant, or an empty
            completion.

    Raises:
        Malformed: anything else.
    """
    try:
        given = json.loads(text) if isinstance(text, str | bytes) else text
    except (ValueError, RecursionError) as problem:  # ValueError: not UTF-8, too
        raise Malformed(f"not JSON ({problem}), accepted: {_LAYOUTS}") from None
    if not isinstance(given, Mapping):
        raise Malformed(f"got {_short(given)}, accepted: {_LAYOUTS}")
    record = _without_nulls(given, "", _OF_RECORDS)
    for key in ("label", "kto_tag"):
        if record.get(key) in (False, "false"):
            raise Malformed(f"{key}: got {_short(record[key])}, accepted: what is to be learnt")
    pair = {"prompt", "completion"} <= record.keys()
    turns = next((key for key in ("messages", "conversations") if record.get(key)), None)
    if turns is not None:
        found = _of_messages(_messages(record[turns], turns), 0, record)
    elif not pair and record.keys() & {"messages", "conversations"}:
        return None
    elif not pair:
        raise Malformed(
            f"got an object with {', '.join(map(str, record)) or 'no keys'}, accepted: {_LAYOUTS}"
        )
    elif isinstance(record["prompt"], list):
        before = _messages(record["prompt"], "prompt")
        found = _of_messages(
            before + _messages(record["completion"], "completion"), len(before), record
        )
    else:
        for key in (*_SYSTEM, "tools", "functions"):
            if record.get(key):
                raise Malformed(
                    f"{key}: got {_short(record[key])} beside text, accepted: lists of messages "
                    "beside it"
                )
        prompt, completion = (_valid(_TEXT, record[key], key) for key in ("prompt", "completion"))
        return Conversation(prompt=prompt, completion=completion) if completion else None
    return found if any(found.learnt) else None


def _without_nulls(
    value: Mapping[str, Any], where: str, refused: Iterable[str], known: Iterable[str] = ()
) -> dict:
    """A record or turn without its nulls.

    Raises:
        Malformed: a key in it changes what is told or learnt in a way that is not known here.
    """
    found = {key: one for key, one in value.items() if one is not None}
    for key, one in found.items():
        if one and key in refused:
            raise Malformed(
                f"{where}{key}: got {_short(one)}, accepted: a line without it "
                "(docs/fine-tuning.md)"
            )
        if (
            key not in known
            and isinstance(one, bool | list)
            and any(word in str(key).lower() for word in _MASKS)
        ):
            raise Malformed(
                f"{where}{key}: got {_short(one)}, accepted: {', '.join(LEARNT)} of turns, 0 or 1"
            )
    return found


def _of_messages(
    messages: list[tuple[dict[str, Any], bool]], given: int, record: Mapping[str, Any]
) -> Conversation:
    """The first ``given`` messages are a prompt, which is not trained."""
    if key := next((key for key in _SYSTEM if record.get(key)), None):
        told, first = _valid(_TEXT, record[key], key), messages[0][0] if messages else {}
        if first.get("role") not in ("system", "developer"):
            messages, given = [({"role": "system", "content": told}, False), *messages], given + 1
        elif first["content"] != told:
            raise Malformed(
                f"{key}: got another text than the first message has, accepted: one of the two"
            )
    # `functions` is the layout of `function_call`.
    tools, functions = (_valid(_TOOLS, record.get(key), key) for key in ("tools", "functions"))
    return Conversation(
        messages=[message for message, _ in messages],
        learnt=[wanted and place >= given for place, (_, wanted) in enumerate(messages)],
        tools=tools or [{"type": "function", "function": one} for one in functions or ()] or None,
    )


def _messages(value: Any, key: str) -> list[tuple[dict[str, Any], bool]]:
    """Messages, and whether each is to be trained."""
    if isinstance(value, list):
        value = [
            _without_nulls(one, f"{key}[{place}].", _OF_TURNS, LEARNT)
            if isinstance(one, Mapping)
            else one
            for place, one in enumerate(value)
        ]
    found = []
    for place, message in enumerate(_valid(_MESSAGES, value, key)):
        of_assistant, learnt = message.role == "assistant", True
        for name in LEARNT:
            one = value[place].get(name, 1)
            if one not in (0, 1) or (
                one and name in value[place] and name != "weight" and not of_assistant
            ):
                raise Malformed(
                    f"{key}[{place}].{name}: got {_short(one)} of a turn of {message.role}, "
                    "accepted: 0, or 1 of the "
                    "assistant's"
                )
            learnt = learnt and bool(one)
        spoken = bool(message.content or message.tool_calls)
        found.append((message.model_dump(exclude_none=True), of_assistant and learnt and spoken))
    return found


def _valid(adapter: TypeAdapter[Any], value: Any, key: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as problem:
        one = problem.errors()[0]
        where = key + "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"]
        )
        accepted = one["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise Malformed(f"{where}: got {_short(one['input'])}, accepted: {accepted}") from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
