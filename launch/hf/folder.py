"""A Hugging Face folder: which files its tensors are in, and the whole as a source of weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import torch

from launch.hf.config import read_config
from launch.hf.families import Family
from launch.hf.recipes import from_hugging_face, put_together, to_hugging_face
from launch.weights.shapes import check_shapes
from launch.weights.source import CheckpointError, Weights, rounded
from launch.weights.tensor_files import Entry, TensorFiles, read_header, written_manifest

__all__ = ["CONFIG", "GENERATION", "HuggingFaceWeights", "has_tokenizer", "refuse_adapter", "travelling_files"]

CONFIG, GENERATION = "config.json", "generation_config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model*",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)
"""Files each of which holds a tokenizer."""
_TRAVEL = (
    CONFIG,
    GENERATION,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *_TOKENIZERS,
    "chat_template*",
    "additional_chat_templates/*",
)
"""Files that belong to a model beside its tensors."""


class HuggingFaceWeights(Weights):
    """A folder as ``save_pretrained`` writes it: config.json and safetensors files, one or several with an index.

    Args:
        path: the folder.
        dtype: that tensors are given in; None = as they are stored.
        tensors: False = there need be none, and none can be read.

    Raises:
        CoatConfigError: config.json asks for what cannot be honoured; names the key.
        CheckpointError: a file or a tensor is missing, of another shape, too much or cut off; names it.
    """

    kind = "a Hugging Face folder"

    def __init__(self, path: Path, dtype: torch.dtype | None = None, tensors: bool = True) -> None:
        self.path = path
        refuse_adapter(path)
        self.model, self.family = read_config(path / CONFIG)
        self.recipes = from_hugging_face(self.model, self.family)
        self.shapes = {name: recipe.shape for name, recipe in self.recipes.items()}
        entries = _each_expert(_tensors(path), self.family) if tensors else {}
        if tensors:
            wanted = {name: recipe.shape for name, recipe in to_hugging_face(self.model, self.family).items()}
            if "lm_head.weight" in entries:  # of tied embeddings a copy may be there
                wanted.setdefault("lm_head.weight", wanted["model.embed_tokens.weight"])
            there = {n: e.shape for n, e in entries.items() if not n.endswith(".rotary_emb.inv_freq")}  # a constant
            check_shapes(path, there, wanted, CONFIG, {name: entry.file for name, entry in entries.items()})
        self._files = TensorFiles(entries, written_manifest(path).get("tensors"))
        self._dtype = dtype
        if self.model.tie_embeddings and "lm_head.weight" in entries:
            self._check_tied()

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`; of parts that differ the type that holds both."""
        parts = {self._files.entries[p.name].dtype for p in self.recipes[name].pieces if p.name is not None}
        return self._dtype or (parts.pop() if len(parts) == 1 else torch.float32)

    def parts_types(self) -> dict[str, torch.dtype]:
        """See :class:`Weights`."""
        found = {}
        for recipe in self.recipes.values():
            parts = {p.name: self._files.entries[p.name].dtype for p in recipe.pieces if p.name is not None}
            found.update(parts if len(set(parts.values())) > 1 else {})
        return found

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Weights`."""
        dtype = self.dtype(name)
        return put_together(self.recipes[name], dtype, lambda part: rounded(self._files.read(part), dtype, part))

    def travelling(self) -> dict[str, Path]:
        """See :class:`Weights`."""
        return travelling_files(self.path)

    def _check_tied(self) -> None:
        if not torch.equal(*map(self._files.read, ("model.embed_tokens.weight", "lm_head.weight"))):
            raise CheckpointError(
                f"{self._files.entries['lm_head.weight'].file}: lm_head.weight differs from "
                "model.embed_tokens.weight, and config.json has tie_word_embeddings true, accepted: false"
            )


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter of PEFT: its weights would be left out.

    Raises:
        CheckpointError: names the file.
    """
    found = sorted([*folder.glob("adapter_config.json"), *folder.glob("adapter_model*")])
    if found:
        raise CheckpointError(
            f"{found[0]}: holds an adapter (LoRA) apart from the model, accepted: the merged model; merge it first, "
            "with PEFT's merge_and_unload() and save_pretrained"
        )


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether a tokenizer is among files by name."""
    return any(fnmatch(name, pattern) for name in names for pattern in _TOKENIZERS)


def travelling_files(folder: Path) -> dict[str, Path]:
    """What travels with the tensors, by name in the folder: tokenizer, chat template, generation and model config."""
    found = {path for pattern in _TRAVEL for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")


def _each_expert(entries: dict[str, Entry], family: Family) -> dict[str, Entry]:
    """Stacked tensors of experts, under the names and with the places of the tensors that they are stacks of."""
    found = {}
    for name, entry in entries.items():
        number = _LAYER.search(name)
        parts = family.fused.get(_LAYER.sub("{}", name), ()) if number else ()
        if not number or not parts or ("{e}" in parts[0] and len(entry.shape) != 3):
            found[name] = entry
            continue
        whole = [part.replace("{}", number[0]) for part in parts]
        if "{e}" not in parts[0]:
            found[whole[0]] = entry
            continue
        experts, rows, width = entry.shape
        one = rows // len(parts)
        for i in range(experts * len(parts)):
            expert, part = divmod(i, len(parts))
            place = (expert, slice(part * one, (part + 1) * one))
            found[whole[part].replace("{e}", str(expert))] = entry._replace(shape=(one, width), place=place)
    return found


def _tensors(folder: Path) -> dict[str, Entry]:
    """Where each tensor is."""
    if (folder / _SINGLE).is_file():  # first, as transformers does: an index beside it may be of an earlier save
        return read_header(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        return _sharded(folder)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        raise CheckpointError(f"{folder}: has {files[0].name} and no {_INDEX}, accepted: that file too, or {_SINGLE}")
    old = sorted(folder.glob("pytorch_model*.bin"))
    what = f"{old[0].name}, which may run code when it is read" if old else "no tensors"
    hint = "; save_pretrained of transformers writes such" if old else ""
    raise CheckpointError(f"{folder}: has {what}, accepted: {_SINGLE}, or shards with {_INDEX}{hint}")


def _sharded(folder: Path) -> dict[str, Entry]:
    index = folder / _INDEX
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        files = {folder / file for file in places.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{index}: cannot be read ({type(problem).__name__}: {problem})") from None
    entries: dict[str, Entry] = {}
    for path in sorted(files):
        for name, entry in read_header(path).items():
            if folder / places.get(name, "") != path:  # listed nowhere, or in two files, of an earlier save
                where = f"says is in {places[name]}" if name in places else "does not list"
                raise CheckpointError(f"{path}: holds {name}, which {index.name} {where}")
            entries[name] = entry
    for name, file in places.items():
        if name not in entries:
            raise CheckpointError(f"{folder / file}: has no tensor {name}; {index.name} says that it is there")
    return entries
