"""How each tensor is put together from rows of the other side's tensors, in both directions.

Every layout of ``launch/hf/families.py`` is a matter of rows, so a conversion copies ranges of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from launch.hf.families import Family
from launch.model.gpt import ModelConfig
from launch.weights.shapes import parameter_shapes

__all__ = ["Piece", "Recipe", "from_hugging_face", "put_together", "to_hugging_face"]

_NUMBERS = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(.*\.local_experts\.(?P<expert>\d+)\.)?.*")


class Piece(NamedTuple):
    """Rows of one tensor, or zeros."""

    name: str | None
    """Of the tensor that they are taken from; None: zeros."""
    start: int
    rows: int


class Recipe(NamedTuple):
    """A tensor as pieces, one above the other."""

    shape: tuple[int, ...]
    pieces: list[Piece]


def put_together(recipe: Recipe, dtype: torch.dtype, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A tensor of ``dtype``; ``read`` gives those that its rows are taken from. It shares memory with one that it is
    the whole of."""
    parts = {name: read(name) for name in dict.fromkeys(p.name for p in recipe.pieces) if name is not None}
    if recipe.pieces == [Piece(recipe.pieces[0].name, 0, len(next(iter(parts.values()))))]:
        return next(iter(parts.values())).to(dtype).contiguous()
    rows = [
        torch.zeros(p.rows, *recipe.shape[1:], dtype=dtype)
        if p.name is None
        else parts[p.name][p.start : p.start + p.rows]
        for p in recipe.pieces
    ]
    return torch.cat(rows).to(dtype)


class _Rule(NamedTuple):
    name: str
    shape: tuple[int, ...]
    layout: str
    parts: tuple[str, ...]


def from_hugging_face(model: ModelConfig, family: Family) -> dict[str, Recipe]:
    """Megatron's tensors, made of Hugging Face's."""
    return {rule.name: Recipe(rule.shape, list(_pieces(rule, model))) for rule in _rules(model, family)}


def to_hugging_face(model: ModelConfig, family: Family) -> dict[str, Recipe]:
    """Hugging Face's tensors, made of Megatron's; rows of padding are left out."""
    recipes: dict[str, Recipe] = {}
    for rule in _rules(model, family):
        taken: dict[str, list[Piece]] = {part: [] for part in rule.parts}
        row = 0
        for piece in _pieces(rule, model):  # rows of each part come in their order
            if piece.name is not None:
                taken[piece.name].append(Piece(rule.name, row, piece.rows))
            row += piece.rows
        for part, pieces in taken.items():
            recipes[part] = Recipe((sum(p.rows for p in pieces), *rule.shape[1:]), pieces)
    return recipes


def _rules(model: ModelConfig, family: Family) -> Iterator[_Rule]:
    for name, shape in parameter_shapes(model).items():
        found = _NUMBERS.fullmatch(name)
        number, expert = (found["layer"], found["expert"] or "") if found else ("", "")
        line = name.replace(f".{number}.", ".{}.", 1) if number else name
        line = line.replace(f".local_experts.{expert}.", ".local_experts.{e}.") if expert else line
        layout, parts = family.table[line]
        yield _Rule(name, shape, layout, tuple(p.replace("{}", number).replace("{e}", expert) for p in parts))


def _pieces(rule: _Rule, model: ModelConfig) -> Iterator[Piece]:
    rows = rule.shape[0]
    if rule.layout == "qkv":
        q, k, v = rule.parts
        one = model.head_channels
        queries = one * (model.num_attention_heads // model.kv_heads)
        for group in range(model.kv_heads):
            yield Piece(q, group * queries, queries)
            yield Piece(k, group * one, one)
            yield Piece(v, group * one, one)
    elif rule.layout == "halves":
        for part in rule.parts:
            yield Piece(part, 0, rows // 2)
    elif rule.layout == "vocab":
        assert model.vocab_size is not None
        yield Piece(rule.parts[0], 0, model.vocab_size)
        if rows > model.vocab_size:
            yield Piece(None, 0, rows - model.vocab_size)
    else:
        yield Piece(rule.parts[0], 0, rows)
