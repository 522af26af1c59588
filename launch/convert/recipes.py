"""How each tensor is put together from rows of the other side's tensors, in both directions.

Every layout of ``launch/convert/families.py`` is a matter of rows, so a conversion copies ranges of
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from launch.convert.families import Family
from launch.model.model_config import ModelConfig
from launch.model.sizes import parameter_shapes

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


def put_together(
    recipe: Recipe, dtype: torch.dtype, read: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """A tensor of ``dtype``; ``read`` gives the tensors that its rows are taken from. It shares
    memory with one that it is the whole of.
    """
    parts: dict[str, torch.Tensor] = {}
    rows = []
    for piece in recipe.pieces:
        if piece.name is None:
            rows.append(torch.zeros(piece.rows, *recipe.shape[1:], dtype=dtype))
            continue
        if piece.name not in parts:
            parts[piece.name] = read(piece.name)
        rows.append(parts[piece.name][piece.start : piece.start + piece.rows])
    if len(rows) == len(parts) == 1 and len(rows[0]) == len(*parts.values()):
        return rows[0].contiguous().to(dtype)
    return torch.cat(rows).to(dtype)


def from_hugging_face(model: ModelConfig, family: Family) -> dict[str, Recipe]:
    """Megatron's tensors, made of Hugging Face's."""
    recipes = {}
    for name, shape in parameter_shapes(model).items():
        found = _NUMBERS.fullmatch(name)
        layer, expert = (found["layer"], found["expert"] or "") if found else ("", "")
        line = name.replace(f".{layer}.", ".{}.", 1) if found else name
        line = line.replace(f".local_experts.{expert}.", ".local_experts.{e}.")
        layout, parts = family.table[line]
        parts = tuple(part.replace("{}", layer).replace("{e}", expert) for part in parts)
        recipes[name] = Recipe(shape, list(_pieces(layout, parts, shape[0], model)))
    return recipes


def to_hugging_face(model: ModelConfig, family: Family) -> dict[str, Recipe]:
    """Hugging Face's tensors, made of Megatron's; rows of padding are left out."""
    pieces: dict[str, list[Piece]] = {}
    inner: dict[str, tuple[int, ...]] = {}
    for name, recipe in from_hugging_face(model, family).items():
        row = 0
        for piece in recipe.pieces:  # rows of each part come in their order
            if piece.name is not None:
                pieces.setdefault(piece.name, []).append(Piece(name, row, piece.rows))
                inner[piece.name] = recipe.shape[1:]
            row += piece.rows
    return {
        name: Recipe((sum(p.rows for p in own), *inner[name]), own) for name, own in pieces.items()
    }


def _pieces(layout: str, parts: tuple[str, ...], rows: int, model: ModelConfig) -> Iterator[Piece]:
    if layout == "qkv":
        q, k, v = parts
        one = model.head_channels
        queries = one * (model.num_attention_heads // model.kv_heads)
        for group in range(model.kv_heads):
            yield Piece(q, group * queries, queries)
            yield Piece(k, group * one, one)
            yield Piece(v, group * one, one)
    elif layout == "halves":
        for part in parts:
            yield Piece(part, 0, rows // 2)
    elif layout == "vocab":
        assert model.vocab_size is not None
        yield Piece(parts[0], 0, model.vocab_size)
        if rows > model.vocab_size:
            yield Piece(None, 0, rows - model.vocab_size)
    else:
        yield Piece(parts[0], 0, rows)
