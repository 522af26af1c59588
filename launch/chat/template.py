"""From a conversation to token ids and to which of them are trained: the assistant's, and no others.

Where the chat template marks what the assistant says (``{% generation %}``), the marks decide. Of other templates, the
conversation is rendered up to each of the assistant's messages, with the prompt that asks for it, and with it; what the
second has beyond the first is the message, its end-of-turn token included. That is right only where each of these texts
begins the whole conversation's, which is checked for every message.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launch.chat.records import Conversation, Malformed
from launch.prep import DataError

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate", "ids_of_text", "load_tokenizer"]

# Roles as headings, tool calls as JSON; every message of the assistant ends with the end-of-sequence token.
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
    """The tokenizer of a folder, with the chat template that is to be used; nothing is downloaded.

    Args:
        given: a folder in Hugging Face's layout.
        chat_template: ``plain`` for :data:`PLAIN_TEMPLATE`, a file with a Jinja template, or None: the tokenizer's
            own, else the plain one.

    Raises:
        DataError: transformers is missing, the folder holds no tokenizer, or no such template.
    """
    try:
        import transformers
    except ImportError:
        raise DataError("--tokenizer: needs transformers: pip install '/path/to/coat_dist[hf]'") from None
    if not Path(given).is_dir():
        raise DataError(f"--tokenizer: got {given}, accepted: a folder with tokenizer.json (nothing is downloaded)")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(given, local_files_only=True)
    except Exception as problem:  # many kinds: missing files, JSON, unknown classes
        first = str(problem).strip().split("\n")[0]
        raise DataError(f"--tokenizer: {given} holds no tokenizer that can be loaded ({first})") from None
    if not len(tokenizer):
        raise DataError(f"--tokenizer: {given} holds no tokenizer, accepted: a folder with tokenizer.json")
    if chat_template is not None and chat_template != "plain":
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(
                f"--chat-template: {chat_template} cannot be read ({problem}), accepted: a Jinja file, or plain"
            ) from None
    elif chat_template == "plain" or not tokenizer.chat_template:
        if tokenizer.eos_token is None:
            raise DataError(f"--chat-template: {given} names no eos_token, with which plain ends a turn")
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def ids_of_text(tokenizer: Any) -> int:
    """Ids that a model needs for text: what was added to the vocabulary, for padding say, need not occur."""
    added = tokenizer.get_added_vocab()
    return max((number for token, number in tokenizer.get_vocab().items() if token not in added), default=0) + 1


def _without_empty(spans: Spans) -> Spans:
    return [(start, end) for start, end in spans if end > start]


class ChatTemplate:
    """Renders, encodes and masks conversations with one tokenizer.

    Args:
        tokenizer: of transformers, with a chat template.
        vocab_size: ids that the model has; None = no limit. Tokens that were added to a tokenizer may lie beyond.

    Raises:
        DataError: a template that is no Jinja.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.in_pieces = 0
        """Conversations in which a token would have belonged to the assistant and to somebody else."""
        self.without_tools = 0
        """Conversations with tools of which the template writes nothing."""
        self._special = tuple(t for t in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if t)
        self._named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else None
        self._check()

    def _check(self) -> None:
        import jinja2

        for text in self._named.values() if self._named else [self.tokenizer.chat_template]:
            try:
                self._render([{"role": "user", "content": "?"}], None, text)
            except jinja2.exceptions.TemplateSyntaxError as problem:
                raise DataError(
                    f"--chat-template: line {problem.lineno}: {problem.message}, accepted: a Jinja template"
                ) from None
            except Exception:  # such a conversation may be refused: the file's own will be tried
                continue

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them are trained.

        Raises:
            Malformed: the template refuses the conversation, or does not let the assistant's words be told; or it holds
                a token that the model has no id for.
        """
        ids, learnt = self._ids_and_learnt(conversation)
        if self.vocab_size is not None and (largest := max(ids, default=0)) >= self.vocab_size:
            raise Malformed(
                f"holds the token {self.tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}, accepted: "
                f"ids below the model's {self.vocab_size}"
            )
        return ids, learnt

    def _ids_and_learnt(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        if conversation.completion is not None:
            return self._encode_pair(conversation.prompt, conversation.completion)
        try:
            text, spans = self._spans(conversation)
            self._check_tools(conversation, text)
        except Malformed:
            raise
        except Exception as problem:  # a template may raise anything
            raise Malformed(f"the chat template does not take it: {type(problem).__name__}: {problem}") from None
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:  # of a call's arguments, or of tools
                raise Malformed("holds half of a surrogate pair, accepted: text that can be written as UTF-8") from None
        return self._encode(text, spans)

    def _check_tools(self, conversation: Conversation, text: str) -> None:
        """Whether the template writes calls and tools, which many leave out: nothing would be learnt of them."""
        messages, tools = conversation.messages, conversation.tools
        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
        if silent != messages and self._same(text, silent, tools):
            raise Malformed(
                "the chat template writes nothing of tool_calls, accepted: a template that does (--chat-template)"
            )
        if tools is not None and self._same(text, messages, None):
            self.without_tools += 1

    def _same(self, text: str, messages: list[dict[str, Any]], tools: Any) -> bool:
        try:
            return self._render(messages, tools) == text
        except Exception:  # a template may insist on what was left out
            return False

    def _render(self, messages: list[dict[str, Any]], tools: Any, template: str | None = None, **more: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, **more)

    def _spans(self, conversation: Conversation) -> tuple[str, Spans]:
        """The text of a conversation, and where in it trained messages begin and end."""
        template = self.tokenizer.get_chat_template(None, conversation.tools)
        if _MARKED.search(template):
            text, spans = self._marked(conversation, template)
            speaking = [place for place, m in enumerate(conversation.messages) if m["role"] == "assistant"]
            if not all(conversation.learnt[place] for place in speaking):
                marked = self._one_each(spans, [conversation.messages[place] for place in speaking])
                spans = [s for place, s in zip(speaking, marked, strict=True) if conversation.learnt[place]]
            return text, _without_empty(spans)
        return self._by_prefixes(conversation)

    def _marked(self, conversation: Conversation, template: str) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(  # type: ignore[str-unpack]
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], list(spans[0])  # type: ignore[arg-type]

    @staticmethod
    def _one_each(spans: Spans, said: list[dict[str, Any]]) -> Spans:
        """The spans of messages, in their order; one that says nothing may have an empty one."""
        full = _without_empty(spans)
        if len(spans) == len(said):
            return spans
        # Marks around a part that a message may lack, such as its thoughts, leave empty spans of no message.
        if len(full) == len(said) and all(m["content"] or m.get("tool_calls") for m in said):
            return full
        raise Malformed(
            f"the chat template marks {len(spans)} texts of {len(said)} messages of the assistant, accepted: one each "
            "where not all of them are trained"
        )

    def _by_prefixes(self, conversation: Conversation) -> tuple[str, Spans]:
        messages, tools = conversation.messages, conversation.tools
        whole, spans = self._render(messages, tools), []
        for place, learnt in enumerate(conversation.learnt):
            if not learnt:
                continue
            if not place:
                raise Malformed("messages[0] is the assistant's, accepted: that with {% generation %} markers only")
            before = self._render(messages[:place], tools, add_generation_prompt=True)
            upto = self._render(messages[: place + 1], tools)
            if not (upto.startswith(before) and whole.startswith(upto)):
                raise Malformed(
                    f"messages[{place}]: the chat template writes it otherwise when it is the last one, so its tokens "
                    "cannot be told; accepted: a template with {% generation %} markers (--chat-template)"
                )
            spans.append((len(before), len(before) + len(self._up_to_its_end(upto[len(before) :]))))
        return whole, spans

    def _up_to_its_end(self, said: str) -> str:
        """Without the white space between an end-of-turn token and the next turn."""
        bare = said.rstrip()
        return bare if bare.endswith(self._special) else said

    def _encode_pair(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Completion and the end-of-sequence token are trained."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise Malformed("a completion ends with the eos_token, and the tokenizer has none")
        ids, both = self._with_start(prompt), self._with_start(prompt + completion)
        if both[: len(ids)] == ids:
            said = both[len(ids) :]
        else:  # a token would belong to both: the model will be given the prompt's tokens
            self.in_pieces += 1
            said = self._ids(completion)
        said = said if said[-1:] == [end] else [*said, end]
        return ids + said, [False] * len(ids) + [True] * len(said)

    def _with_start(self, text: str) -> list[int]:
        """As a prompt is encoded: with the start token of tokenizers that have one, without an end token."""
        ids = list(self.tokenizer(text).input_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(self.tokenizer.eos_token):
            ids.pop()
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _encode(self, text: str, spans: Spans) -> tuple[list[int], list[bool]]:
        found = self._by_offsets(text, spans) if self.tokenizer.is_fast else None
        if found is not None:
            return found
        self.in_pieces += 1
        ids: list[int] = []
        mask: list[bool] = []
        borders = [0, *(border for span in spans for border in span), len(text)]
        for number, (start, end) in enumerate(zip(borders, borders[1:], strict=False)):
            piece = self._ids_within(text[start:end]) if start else self._ids(text[:end])
            ids += piece
            mask += [number % 2 == 1] * len(piece)
        return ids, mask

    def _ids_within(self, piece: str) -> list[int]:
        """Ids of text that something stands before: without the space that some tokenizers put before a text."""
        for anchor in ("\n", ".", "a"):
            before, both = self._ids(anchor), self._ids(anchor + piece)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._ids(piece)

    def _by_offsets(self, text: str, spans: Spans) -> tuple[list[int], list[bool]] | None:
        """None where a token lies across the border of a span."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask, span = [], 0
        for start, end in encoded.offset_mapping:
            # Some special tokens take the white space beside them along, and offsets of others may leave theirs out.
            part = text[start:end]
            if bare := part.strip():
                start += len(part) - len(part.lstrip())
                end = start + len(bare)
            while span < len(spans) and start >= spans[span][1]:
                span += 1
            inside = span < len(spans) and start >= spans[span][0]
            if span < len(spans) and (end > spans[span][1] if inside else end > spans[span][0]):
                return None
            mask.append(inside)
        ids = list(encoded.input_ids)
        # A token with white space may lie across a border that its offsets do not show; no special token does.
        for border in (border for one in spans for border in one if 0 < border < len(text)):
            white = text[border - 1].isspace() or text[border].isspace()
            if white and not text.endswith(self._special, 0, border) and not text.startswith(self._special, border):
                before = self._ids(text[:border])
                if ids[: len(before)] != before:
                    return None
        return ids, mask
