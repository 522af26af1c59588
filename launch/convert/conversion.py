"""A conversion to a Hugging Face folder, streamed: which files and tensors are written, from which
rows.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from launch.convert.config_json import read_config
from launch.convert.config_json_out import config_for
from launch.convert.hugging_face import CONFIG, GENERATION
from launch.convert.recipes import Recipe, put_together, to_hugging_face
from launch.convert.tensor_files import write_tensors
from launch.convert.weights import DTYPES, Weights


class Conversion(NamedTuple):
    """What is going to be written."""

    tensors: dict[str, torch.Tensor]
    """By name, without memory (device "meta")."""
    recipes: Mapping[str, Recipe]
    """Each tensor, made of the source's rows."""
    texts: Mapping[str, str]
    """Content of text files, by name."""
    copies: Mapping[str, Path]
    """Files that are copied."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(
        self, weights: Weights, folder: Path, shard_bytes: int, progress: Callable[[int], object]
    ) -> None:
        """Write everything into a folder that is there.

        Raises:
            OSError: it cannot be written.
            CheckpointError: a tensor of ``weights`` cannot be read.
        """
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, path in self.copies.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            # Without the byte order mark that editors put before text and transformers does not
            # read.
            (folder / name).write_bytes(path.read_bytes().removeprefix(BOM_UTF8))
        read = self.reader(weights)
        write_tensors(
            folder, "model", self.tensors, read, shard_bytes=shard_bytes, progress=progress
        )

    def reader(self, weights: Weights) -> Callable[[str], torch.Tensor]:
        """A function that makes the written tensors of those of ``weights``; the last one read
        is kept for the next.
        """
        read = lru_cache(maxsize=1)(weights.read)
        return lambda name: put_together(self.recipes[name], self.tensors[name].dtype, read)


def plan_conversion(
    weights: Weights,
    dtype: torch.dtype | None,
    travelling: Mapping[str, Path],
    texts: Mapping[str, str],
    family: str | None,
    end: int | None,
) -> Conversion:
    """The conversion into a folder that ``AutoModelForCausalLM.from_pretrained`` reads.

    Args:
        weights: of any source.
        dtype: None = each tensor as it is.
        travelling: files that go along, by name; of a config.json among them everything is kept
            that does not decide what the model computes.
        texts: content of further files, by name.
        family: ``model_type`` to write; None = that of config.json, or the first that can say what
            the model is.
        end: end-of-document id, ``eos_token_id`` of a new config.json and generation config.

    Raises:
        CoatConfigError: no family has such a model, by its keys, or the config.json that travels
            cannot be read.
    """
    copies = dict(travelling)
    remembered = read_config(copies.pop(CONFIG)) if CONFIG in copies else {}
    dtypes = {dtype or weights.dtype(name) for name in weights.shapes}
    most = DTYPES.get(str(remembered.get("dtype", remembered.get("torch_dtype"))))
    whole = torch.float32
    if len(dtypes) == 1:
        (whole,) = dtypes
    elif most in dtypes:
        whole = most
    config, known = config_for(weights.model, whole, remembered, family, end)
    recipes = to_hugging_face(weights.model, known)
    stored, tensors = weights.stored_types(), {}
    for name, recipe in recipes.items():
        types = {weights.dtype(piece.name) for piece in recipe.pieces if piece.name is not None}
        one = dtype or stored.get(name) or (types.pop() if len(types) == 1 else torch.float32)
        tensors[name] = torch.empty(recipe.shape, dtype=one, device="meta")
    texts = {**texts, CONFIG: json.dumps(config, indent=2) + "\n"}
    if end is not None and not remembered and GENERATION not in copies:
        texts[GENERATION] = json.dumps({"eos_token_id": end}, indent=2) + "\n"
    return Conversion(tensors, recipes, texts, copies)
