"""A Hugging Face folder: which files its tensors are in, and the whole as a source of weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import torch

from launch.convert.config_json import model_from_config, read_config
from launch.convert.families import Family
from launch.convert.recipes import from_hugging_face, put_together, to_hugging_face
from launch.convert.tensor_files import Entry, TensorFiles, read_header, rounded
from launch.convert.weights import CheckpointError, Weights, check_shapes, own_manifest

CONFIG, GENERATION = "config.json", "generation_config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZERS = (
    *(
        "tokenizer.json",
        "tokenizer.model*",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
    ),
    *("tekken.json", "*.tiktoken"),
)
"""Files that each hold a tokenizer."""
_TRAVEL = (
    *(
        CONFIG,
        GENERATION,
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "merges.txt",
        *_TOKENIZERS,
    ),
    *("chat_template*", "additional_chat_templates/*"),
)
"""Files that belong to a model beside its tensors."""
_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")


class HuggingFaceWeights(Weights):
    """A folder as ``save_pretrained`` writes it: config.json and safetensors files, one or several
    with an index.

    Args:
        path: the folder.
        dtype: of the tensors that are read; None = as they are stored.
        tensors: False = there need be none, and none can be read.

    Raises:
        CoatConfigError: config.json asks for what cannot be honoured; names the key.
        CheckpointError: a file or a tensor is missing, of another shape, surplus or cut off; names
            it.
    """

    kind = "a Hugging Face folder"

    def __init__(self, path: Path, dtype: torch.dtype | None = None, tensors: bool = True) -> None:
        self.path, self._dtype = path, dtype
        refuse_adapter(path)
        self.model, self.family = model_from_config(read_config(path / CONFIG), str(path / CONFIG))
        self.recipes = from_hugging_face(self.model, self.family)
        self.shapes = {name: recipe.shape for name, recipe in self.recipes.items()}
        entries = _each_expert(_tensors(path), self.family) if tensors else {}
        if tensors:
            wanted = {
                name: recipe.shape
                for name, recipe in to_hugging_face(self.model, self.family).items()
            }
            if "lm_head.weight" in entries:  # of tied embeddings a copy may be there
                wanted.setdefault("lm_head.weight", wanted["model.embed_tokens.weight"])
            # A constant.
            there = {
                n: e.shape for n, e in entries.items() if not n.endswith(".rotary_emb.inv_freq")
            }
            check_shapes(path, there, wanted, CONFIG)
        self._files = TensorFiles(entries)
        # People edit the other files of such a folder.
        files = {
            n: sums
            for n, sums in own_manifest(path).get("files", {}).items()
            if n.endswith(".safetensors")
        }
        self.manifest = {"files": files}

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Weights`; of parts that differ the type that holds both."""
        if self._dtype is not None:
            return self._dtype
        parts = (piece.name for piece in self.recipes[name].pieces if piece.name is not None)
        types = {self._files.entries[part].dtype for part in parts}
        return types.pop() if len(types) == 1 else torch.float32

    def stored_types(self) -> dict[str, torch.dtype]:
        """See :class:`Weights`."""
        return {name: entry.dtype for name, entry in self._files.entries.items()}

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Weights`."""
        dtype = self.dtype(name)
        return put_together(
            self.recipes[name], dtype, lambda part: rounded(self._files.read(part), dtype, part)
        )

    def travelling(self) -> dict[str, Path]:
        """See :class:`Weights`."""
        return travelling_files(self.path)


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter of PEFT: its weights would be left out.

    Raises:
        CheckpointError: names the file.
    """
    found = sorted([*folder.glob("adapter_config.json"), *folder.glob("adapter_model*")])
    if found:
        raise CheckpointError(
            f"{found[0]}: holds an adapter (LoRA) apart from the model, accepted: the merged "
            "model; merge it first, "
            "with PEFT's merge_and_unload() and save_pretrained"
        )


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether a tokenizer is among files by name."""
    return any(fnmatch(name, pattern) for name in names for pattern in _TOKENIZERS)


def travelling_files(folder: Path) -> dict[str, Path]:
    """What travels with the tensors, by name in the folder: tokenizer, chat template, generation
    and model config.
    """
    found: set[Path] = set()
    for pattern in _TRAVEL:
        found.update(path for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def _each_expert(entries: dict[str, Entry], family: Family) -> dict[str, Entry]:
    """Stacked tensors of experts, under the names and with the places of the tensors that they
    are stacks of.
    """
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
            found[whole[part].replace("{e}", str(expert))] = entry._replace(
                shape=(one, width), place=place
            )
    return found


def _tensors(folder: Path) -> dict[str, Entry]:
    """Where each tensor is."""
    # First, as transformers does: an index beside it may be of an earlier save.
    if (folder / _SINGLE).is_file():
        return read_header(folder / _SINGLE)
    index = folder / _INDEX
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
    except FileNotFoundError:
        old = (
            "; pytorch_model.bin may run code when it is read"
            if list(folder.glob("pytorch_model*.bin"))
            else ""
        )
        raise CheckpointError(
            f"{folder}: has no tensors, accepted: {_SINGLE}, or shards with {_INDEX}{old}"
        ) from None
    except (OSError, ValueError, KeyError) as problem:
        raise CheckpointError(f"{index}: cannot be read ({problem!r})") from None
    headers = {file: read_header(folder / file) for file in sorted(set(places.values()))}
    return {name: headers[file][name] for name, file in places.items() if name in headers[file]}
