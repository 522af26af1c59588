"""Conversations whose answers can be checked: arithmetic, worked out by calling a calculator."""

from __future__ import annotations

import json
import operator
import random
import re
from pathlib import Path
from typing import Any

OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
_RUN = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_ASKED = ("What is {}?", "How much is {}?", "Please calculate {}.", "Tell me {}.")


def calculator(expression: str) -> str:
    """The tool: two whole numbers and an operation between them; anything else is answered as an
    error.
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    return "error" if found is None else str(_RUN[found[2]](int(found[1]), int(found[3])))


def problem(rng: random.Random) -> tuple[str, list[str], str]:
    """A question, the calls that answer it, in order, and the result. One in three questions has
    two steps.
    """
    word, second = rng.choice(list(OPERATIONS)), rng.choice(list(OPERATIONS))
    a = rng.randint(10, 99)
    b, c = (rng.randint(2, 9) if one == "times" else rng.randint(10, 99) for one in (word, second))
    asked, calls = f"{a} {word} {b}", [f"{a} {OPERATIONS[word]} {b}"]
    if rng.random() < 1 / 3:
        asked += f", then {second} {c}"
        calls.append(f"{calculator(calls[0])} {OPERATIONS[second]} {c}")
    return rng.choice(_ASKED).format(asked), calls, calculator(calls[-1])


def conversation(question: str, calls: list[str], result: str) -> list[dict[str, Any]]:
    """What a perfect assistant and the calculator say."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for call in calls:
        function = {"name": "calculator", "arguments": {"expression": call}}
        messages.append(
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "name": "calculator", "content": calculator(call)})
    return [*messages, {"role": "assistant", "content": f"The result is {result}."}]


def problems(
    count: int, seed: int, without: set[str] = frozenset()
) -> list[tuple[str, list[str], str]]:
    """``count`` problems, each question once and none of those in ``without``."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        made = problem(rng)
        if made[0] not in without:
            found[made[0]] = made
    return list(found.values())


def write(path: Path, chosen: list[tuple[str, list[str], str]]) -> None:
    """A chat file."""
    lines = (json.dumps({"messages": conversation(*one)}) for one in chosen)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
