"""A checkpoint of ZeRO-1, 2 or 3 as one model: which parameters it holds, and each of them
whole, of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..manifest import MANIFEST
from ..names import divided_experts, in_whole, larger, place_in_pipeline
from .zero_files import MODEL, MODEL3, OPTIMIZER, Shard, files_by_rank, read


class ZeroCheckpoint:
    """The folder that ``engine.save_checkpoint`` wrote; tensors are memory-mapped, and joined one
    at a time.

    Args:
        source: the folder: ZeRO stage 1, 2 or 3 or BF16_Optimizer, any data- and tensor-parallel
            size, and any number of pipeline stages. With more than one tensor-parallel rank or
            stage its model files hold ``universal_checkpoint_info``
            (``megatron_patches.universal_checkpoint_info`` makes it), which says how each parameter
            is divided and what it is called in the whole model.

    Attributes:
        models: contents of the model files by [model-parallel rank][data-parallel rank]; of ZeRO-1
            and 2 of rank 0 only. The tensor-parallel ranks of one pipeline stage follow those of
            the one before.
        shards: optimizer files by [model-parallel rank][data-parallel rank].
        shapes: of the trained parameters of each model-parallel rank.
        tensor_parallel: ranks of each pipeline stage.
        names: trained parameters, those of the first pipeline stage first.

    Raises:
        ValueError: names the file, what is wrong with it and what is accepted.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        for pattern in ("layer_*-model_states.pt", "*expert*_states.pt"):
            if found := sorted(source.glob(pattern)):
                raise ValueError(
                    f"{source}: got {found[0].name}, accepted: files without those of "
                    "DeepSpeed's pipeline and expert parallelism"
                )
        optimizer_files = files_by_rank(source, OPTIMIZER)
        model_files = files_by_rank(source, MODEL3, required=False)
        if not model_files:  # ZeRO-1 and 2: one file a tensor-parallel rank
            model_files = [[path] for row in files_by_rank(source, MODEL) for path in row]
        self.models = [[read(path) for path in row] for row in model_files]
        first = self.models[0][0]
        rules = first.get("universal_checkpoint_info")
        wanted = first["mp_world_size"], first["dp_world_size"]
        given = len(optimizer_files), min(map(len, optimizer_files))
        stages = place_in_pipeline(rules)[1]
        if given != wanted or len(self.models) != wanted[0]:
            kind = "model" if stages > 1 else "tensor"
            raise ValueError(
                f"{source}: got optimizer files of {given[0]} {kind}- x {given[1]} data-parallel "
                f"ranks, accepted: of {wanted[0]} x {wanted[1]}, which wrote it, and model files "
                f"of {wanted[0]}"
            )
        if len(self.models) > 1 and rules is None:
            raise ValueError(
                f"{model_files[0][0]}: of {len(self.models)} tensor-parallel ranks and without "
                "universal_checkpoint_info, accepted: one rank, or a model whose attribute of that "
                "name was set before it was saved"
            )
        self.shards = [
            [Shard(path, d, len(row), models[0]["param_shapes"]) for d, path in enumerate(row)]
            for models, row in zip(self.models, optimizer_files, strict=True)
        ]
        # DeepSpeed alone records wrong places then (``deepspeed/step/accessors.py``).
        plain = not (source / MANIFEST).is_file()
        if plain and given[1] > 1 and self.shards[0][0].round_robin:
            raise ValueError(
                f"{source}: zero_optimization.round_robin_gradients: got true, and places of "
                "parameters as DeepSpeed records them then, which are wrong; accepted: false, or a "
                "checkpoint of an engine of coat_dist.initialize"
            )
        self.rules: Mapping[str, Any] = rules or {}
        self.shapes = [
            {name: s for group in row[0]["param_shapes"] for name, s in group.items()}
            for row in self.models
        ]
        self._name_experts()
        self.tensor_parallel = len(self.models) // stages
        self._own: dict[str, tuple[int, str]] = {}
        self._name_stages()
        self.names = list(self._own)

    def _name_experts(self) -> None:
        """Call experts that ranks divide by their names in the whole model; a shard holds those
        of its rank.
        """
        size, names, self.joined = divided_experts(self.rules)
        self.expert_parallel = size
        if size == 1:
            return
        for row in self.shards:
            for d, shard in enumerate(row):
                shard.rename({name: of_all[d % size] for name, of_all in names.items()})
        self.shapes = [
            {
                whole: larger(shape, self.joined[name], size) if name in self.joined else shape
                for name, shape in shapes.items()
                for whole in names.get(name, [name])
            }
            for shapes in self.shapes
        ]

    def _name_stages(self) -> None:
        """Call what pipeline stages hold by the names in the whole model, and note the first
        stage that holds it.
        """
        for first, rename in self.stages():
            for name in self.shapes[first]:
                self._own.setdefault(rename(name), (first, name))
            for row in range(first, first + self.tensor_parallel):
                for shard in self.shards[row]:
                    shard.rename({name: rename(name) for name in shard.names})
                self.shapes[row] = {rename(name): shape for name, shape in self.shapes[row].items()}

    def stages(self) -> Iterator[tuple[int, Callable[[str], str]]]:
        """The first model-parallel rank of each pipeline stage, and a function to names in the
        whole model.
        """
        for first in range(0, len(self.models), self.tensor_parallel):
            yield first, in_whole(self.models[first][0].get("universal_checkpoint_info"))

    def ranks(self, name: str) -> slice:
        """The model-parallel ranks that divide a trained parameter; of a tied one those of the
        first stage.
        """
        first, _ = self._own[name]
        return slice(first, first + self.tensor_parallel)

    def whole(
        self, name: str, part: Callable[[Shard], torch.Tensor], key: str
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """One tensor of a trained parameter, of all ranks, and how to divide it again, in
        DeepSpeed's keys.

        Args:
            name: of the parameter.
            part: what one rank has of it, flat.
            key: what the tensor is called, for errors.
        """
        pieces = []
        for row, shapes in zip(
            self.shards[self.ranks(name)], self.shapes[self.ranks(name)], strict=True
        ):
            # Tensors in which experts are joined: one expert-parallel rank's after the other's.
            step = self.expert_parallel if name in self.joined else 1
            flat = torch.cat([part(shard) for first in range(step) for shard in row[first::step]])
            if flat.numel() != shapes[name].numel():
                raise ValueError(
                    f"{self.source}: {name} {key}: got {flat.numel()} elements over all ranks, "
                    f"accepted: {shapes[name].numel()}"
                )
            pieces.append(flat.view(shapes[name]))
        return self.join(name, pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a trained parameter, whole."""
        meta = [
            torch.empty(shapes[name], device="meta") for shapes in self.shapes[self.ranks(name)]
        ]
        return tuple(self.join(name, meta)[0].shape)

    def join(self, name: str, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tensor of all tensor-parallel ranks, and how to divide it again, in DeepSpeed's
        keys.
        """
        first, own = self._own.get(name, (0, name))
        rules = self.models[first][0].get("universal_checkpoint_info") or {}

        def listed(key: str) -> bool:
            return any(re.match(pattern, own) for pattern in rules.get(key, ()))

        if not rules or listed("tp_replicated_parameter_patterns"):
            return pieces[0].contiguous(), {}
        if listed("parameter_with_2_sub_params_cat_dim_0"):
            halves = [piece.chunk(2, 0) for piece in pieces]
            whole = torch.cat([half[i] for i in range(2) for half in halves])
            return whole, {"cat_dim": 0, "param_n_sub_params": 2}
        dim = 1 if listed("parameter_with_row_parallelism_patterns") else 0
        return torch.cat(pieces, dim), {"cat_dim": dim}

    def untrained(self) -> dict[str, dict[str, Any]]:
        """Frozen parameters and buffers, in their own dtype: ``{name: {"param": tensor, ...}}``."""
        found: dict[str, dict[str, Any]] = {}
        for first, rename in self.stages():
            for own, value in self._untrained(first, rename).items():
                found.setdefault(rename(own), value)
        return found

    def buffers(self) -> set[str]:
        """Names of the buffers among :meth:`untrained`."""
        return {
            rename(name)
            for first, rename in self.stages()
            for name in self.models[first][0]["buffer_names"]
        }

    def _untrained(self, rank: int, rename: Callable[[str], str]) -> dict[str, dict[str, Any]]:
        """Those of one stage, by the stage's own names."""
        found: dict[str, dict[str, Any]] = {}
        first = self.models[rank][0]
        aliases = set(first.get("shared_params") or {})
        per_rank = [
            _outside_optimizer(row) for row in self.models[rank : rank + self.tensor_parallel]
        ]
        for name in per_rank[0]:
            if rename(name) in self.shapes[rank] or name in aliases:
                continue
            pieces = [one[name] for one in per_rank]
            whole, layout = pieces[0], dict[str, Any]()
            # frozen_param_shapes are not saved at stage 1.
            if name not in first["buffer_names"] or not self.rules:
                self._own.setdefault(rename(name), (rank, name))
                whole, layout = self.join(rename(name), pieces)
            elif not all(torch.equal(piece, pieces[0]) for piece in pieces):
                raise ValueError(
                    f"{self.source}: buffer {name} differs between tensor-parallel ranks, "
                    "accepted: equal buffers"
                )
            # It may be a view.
            found[name] = {"param": whole.clone() if whole is pieces[0] else whole, **layout}
        return found


def is_extra_state(name: str) -> bool:
    """Whether a state dict's entry is what a module's ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == "_extra_state"


def _outside_optimizer(row: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Tensors of one tensor-parallel rank's model files that may lie outside the optimizer."""
    first = row[0]
    found: dict[str, torch.Tensor] = {}
    for name, value in first["module"].items():
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            continue
        if value.numel() or name in first["buffer_names"]:  # parameters of ZeRO-3 are empty
            found[name] = value
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        if name not in found:  # of ZeRO-3, divided like the others
            flat = torch.cat([one["frozen_param_fragments"][name].reshape(-1) for one in row])
            found[name] = flat[: shape.numel()].view(shape)
    return found
