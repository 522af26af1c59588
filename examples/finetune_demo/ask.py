"""Let a trained model answer questions, with the calculator run for it."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from task import calculator

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MOST_CALLS = 3


def step(messages: list[dict[str, Any]], said: str) -> bool:
    """Add what the model said and what the tool answers; whether the model is to go on."""
    calls = []
    for text in _CALL.findall(said):
        try:
            function = json.loads(text)
            expression = str(function["arguments"]["expression"])
        except (ValueError, KeyError, TypeError):
            continue
        calls.append((function, expression))
    if not calls:
        messages.append({"role": "assistant", "content": said})
        return False
    messages.append(
        {"role": "assistant", "tool_calls": [{"type": "function", "function": f} for f, _ in calls]}
    )
    messages += [
        {"role": "tool", "name": "calculator", "content": calculator(text)} for _, text in calls
    ]
    return True


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, questions: list[str], batch: int = 128
) -> list[list[dict[str, Any]]]:
    """The whole conversation for each question."""
    tokenizer.padding_side = "left"
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": question}] for question in questions
    ]
    waiting = list(range(len(chats)))
    for _ in range(_MOST_CALLS + 1):
        going_on = []
        for start in range(0, len(waiting), batch):
            chosen = waiting[start : start + batch]
            texts = [
                tokenizer.apply_chat_template(chats[i], tokenize=False, add_generation_prompt=True)
                for i in chosen
            ]
            given = tokenizer(
                texts, return_tensors="pt", padding=True, add_special_tokens=False
            ).to(model.device)
            made = model.generate(
                input_ids=given.input_ids,
                attention_mask=given.attention_mask,
                max_new_tokens=48,
                do_sample=False,
            )
            for i, row in zip(chosen, made[:, given.input_ids.shape[1] :], strict=True):
                if step(chats[i], tokenizer.decode(row, skip_special_tokens=True)):
                    going_on.append(i)
        waiting = going_on
        if not waiting:
            break
    return chats


def right(chat: list[dict[str, Any]], result: str) -> bool:
    """Whether the last thing said is the result."""
    return chat[-1]["role"] == "assistant" and re.findall(
        r"-?\d+", chat[-1].get("content") or ""
    ) == [result]
