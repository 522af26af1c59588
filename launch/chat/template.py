"""Token ids of a conversation, and which of them are trained: the assistant's, and no others.

Where the chat template marks the assistant's text (``{% generation %}``), transformers finds the
marks. For other templates, the conversation is rendered up to each of the assistant's messages,
with the prompt that asks for it, and with it; what the second has beyond the first is the message,
its end-of-turn token included. That is right only where each of these texts begins the whole
conversation's, which is checked for every message.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch.chat.records import Conversation, Malformed
from launch.prep import DataError

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate", "ids_of_text", "load_tokenizer"]

# Roles as headings, tool calls as JSON; every message of the assistant ends with the
# end-of-sequence token.
PLAIN_TEMPLATE = """\
{%- if bos_token %}{{ bos_token }}{% endif -%}
{%- if tools %}{{ '### Tools:\\n' + (tools | tojson) + '\\n\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '### ' + message.role.capitalize() + ':\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- eos_token -}}
{%- endgeneration -%}
{{- '\\n\\n' -}}
{%- else -%}
{{- (message.content or '') + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif -%}
"""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
Spans = list[tuple[int, int]]


def load_tokenizer(given: str, chat_template: str | None = None) -> Any:
    """The tokenizer of a local folder in Hugging Face's layout, with the chat template that is to
    be used.

    That is ``plain`` for :data:`PLAIN_TEMPLATE`, a Jinja file, or None: the tokenizer's own, else
    the plain one.

    Raises:
        DataError: the folder holds no tokenizer, or no such template.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            Path(given).resolve(), local_files_only=True
        )
        if not len(tokenizer):
            raise ValueError("an empty vocabulary")
    except Exception as problem:  # many kinds: missing files, JSON, unknown classes
        first = str(problem).strip().split("\n")[0]
        raise DataError(
            f"--tokenizer: got {given}, accepted: a folder with tokenizer.json ({first})"
        ) from None
    if chat_template is not None and chat_template != "plain":
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(
                f"--chat-template: got {chat_template}, accepted: a Jinja file, plain ({problem})"
            ) from None
    elif chat_template == "plain" or not tokenizer.chat_template:
        if tokenizer.eos_token is None:
            raise DataError(
                f"--chat-template: got plain, accepted: a file, as {given} has no eos_token to end "
                "a turn"
            )
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def ids_of_text(tokenizer: Any) -> int:
    """Ids that a model needs for text: what was added to the vocabulary, for padding say, need
    not occur.
    """
    added = tokenizer.get_added_vocab()
    return (
        max(
            (number for token, number in tokenizer.get_vocab().items() if token not in added),
            default=0,
        )
        + 1
    )


class ChatTemplate:
    """Renders, encodes and masks conversations with one tokenizer.

    Args:
        tokenizer: of transformers, with a chat template.
        vocab_size: ids that the model has; None = no limit. Tokens that were added to a tokenizer
            may lie beyond.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.in_pieces = 0
        """Conversations in which a token would have joined trained text and other text."""
        self.without_tools = 0
        """Conversations whose tools the template ignores."""
        self._special = tuple(
            t for t in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if t
        )

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them are trained.

        Raises:
            Malformed: the template refuses the conversation, or does not separate the assistant's
                text; or it holds a token that the model has no id for.
        """
        try:
            if conversation.completion is not None:
                ids, learnt = self._encode_pair(conversation.prompt, conversation.completion)
            else:
                text, spans = self._spans(conversation)
                self._check_tools(conversation, text)
                ids, learnt = self._encode(text, spans)
        except Malformed:
            raise
        # Templates raise anything, tokenizers where half a surrogate pair is in a text.
        except Exception as problem:
            raise Malformed(
                f"the chat template does not take it: {type(problem).__name__}: {problem}"
            ) from None
        if self.vocab_size is not None and (largest := max(ids, default=0)) >= self.vocab_size:
            raise Malformed(
                f"holds the token {self.tokenizer.convert_ids_to_tokens(largest)!r} with the id "
                f"{largest}, accepted: "
                f"ids below the model's {self.vocab_size}"
            )
        return ids, learnt

    def _check_tools(self, conversation: Conversation, text: str) -> None:
        """Whether the template writes calls and tools, which many leave out: they would not be
        learnt.
        """
        messages, tools = conversation.messages, conversation.tools
        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
        if silent != messages and self._same(text, silent, tools):
            raise Malformed(
                "tool_calls: the chat template ignores them, accepted: one that does not "
                "(--chat-template)"
            )
        if tools is not None and self._same(text, messages, None):
            self.without_tools += 1

    def _same(self, text: str, messages: list[dict[str, Any]], tools: Any) -> bool:
        try:
            return self._render(messages, tools) == text
        except Exception:  # a template may insist on what was left out
            return False

    def _render(self, messages: list[dict[str, Any]], tools: Any, **more: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **more)

    def _spans(self, conversation: Conversation) -> tuple[str, Spans]:
        """The text of a conversation, and where in it trained messages begin and end."""
        template = self.tokenizer.get_chat_template(None, conversation.tools)
        if not _MARKED.search(template):
            return self._by_prefixes(conversation)
        # What `apply_chat_template(return_assistant_tokens_mask=True)` calls: its mask of tokens
        # would not show which of them cross a border.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marked = render_jinja_template(  # type: ignore[str-unpack]
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        spans: Spans = list(marked[0])  # type: ignore[arg-type]
        messages = zip(conversation.messages, conversation.learnt, strict=True)
        said = [learnt for message, learnt in messages if message["role"] == "assistant"]
        if not all(said):
            if len(spans) != len(said):
                raise Malformed(
                    f"the chat template marks {len(spans)} texts of {len(said)} messages of the "
                    "assistant, accepted: "
                    "one each where not all of them are trained"
                )
            spans = [span for span, learnt in zip(spans, said, strict=True) if learnt]
        return texts[0], [(start, end) for start, end in spans if end > start]

    def _by_prefixes(self, conversation: Conversation) -> tuple[str, Spans]:
        messages, tools = conversation.messages, conversation.tools
        whole, spans = self._render(messages, tools), []
        for place in (place for place, learnt in enumerate(conversation.learnt) if learnt):
            if not place:
                raise Malformed(
                    "messages[0] is the assistant's, accepted: that with {% generation %} markers "
                    "only"
                )
            before = self._render(messages[:place], tools, add_generation_prompt=True)
            upto = self._render(messages[: place + 1], tools)
            if not (upto.startswith(before) and whole.startswith(upto)):
                raise Malformed(
                    f"messages[{place}]: the chat template writes it otherwise when it is the last "
                    "one, accepted: a "
                    "template with {% generation %} markers (--chat-template)"
                )
            # Without the white space between an end-of-turn token and the next turn.
            bare = upto.rstrip()
            spans.append((len(before), len(bare if bare.endswith(self._special) else upto)))
        return whole, spans

    def _encode_pair(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Completion and the end-of-sequence token are trained."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise Malformed(
                "completion: ends with the eos_token, accepted: a tokenizer that has one"
            )
        ids, said = self._with_start(prompt), self._ids_within(completion, bool(prompt))
        said = said if said[-1:] == [end] else [*said, end]
        return ids + said, [False] * len(ids) + [True] * len(said)

    def _with_start(self, text: str) -> list[int]:
        """As a prompt is encoded: with the start token of tokenizers that have one, without an
        end token.
        """
        ids = list(self.tokenizer(text).input_ids)
        if (
            ids
            and ids[-1] == self.tokenizer.eos_token_id
            and not text.endswith(self.tokenizer.eos_token)
        ):
            ids.pop()
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _encode(self, text: str, spans: Spans) -> tuple[list[int], list[bool]]:
        """Ids of a text. A token that crosses the border of a span is split, as when the model
        generates.
        """
        borders = [border for span in spans for border in span]
        texts = [text, *(text[:border] for border in borders)]
        ids, *before = self.tokenizer(texts, add_special_tokens=False).input_ids
        if all(ids[: len(one)] == one for one in before):
            cuts = [0, *map(len, before), len(ids)]
            pieces = [ids[start:end] for start, end in pairwise(cuts)]
        else:
            self.in_pieces += 1
            pieces = [
                self._ids_within(text[start:end], start > 0)
                for start, end in pairwise([0, *borders, len(text)])
            ]
        mask = [number % 2 == 1 for number, piece in enumerate(pieces) for _ in piece]
        return [token for piece in pieces for token in piece], mask

    def _ids_within(self, piece: str, inside: bool) -> list[int]:
        """Ids of a piece of a text: inside it, without the space that some tokenizers put before
        a text.
        """
        for anchor in ("\n", ".", "a") if inside else ():
            before, both = self._ids(anchor), self._ids(anchor + piece)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._ids(piece)
