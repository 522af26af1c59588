"""A checkpoint of ZeRO-1, 2 or 3 as one model: which parameters it holds, and each of them whole, of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .expert_names import divided_experts, joined_experts, larger
from .zero_files import MODEL, MODEL3, OPTIMIZER, Shard, files_by_rank, read

__all__ = ["ZeroCheckpoint", "is_extra_state"]


class ZeroCheckpoint:
    """The folder that ``engine.save_checkpoint`` wrote; tensors are memory-mapped, and joined one at a time.

    Args:
        source: the folder: ZeRO stage 1, 2 or 3 or BF16_Optimizer, any data- and tensor-parallel size. With more than
            one tensor-parallel rank its model files hold ``universal_checkpoint_info``, which says how each parameter
            is divided.

    Raises:
        ValueError: names the file, what is wrong with it and what is accepted.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        _refuse_other_kinds(source)
        optimizer_files = files_by_rank(source, OPTIMIZER)
        model_files = files_by_rank(source, MODEL3, required=False)
        if not model_files:  # ZeRO-1 and 2: one file a tensor-parallel rank
            model_files = [[path] for row in files_by_rank(source, MODEL) for path in row]
        if len(model_files) != len(optimizer_files):
            raise ValueError(
                f"{source}: got model files of {len(model_files)} tensor-parallel ranks and optimizer files of "
                f"{len(optimizer_files)}, accepted: equally many"
            )
        self.models = [[read(path) for path in row] for row in model_files]
        """Contents of the model files by [tensor-parallel rank][data-parallel rank]; of ZeRO-1 and 2 of rank 0 only."""
        self.shards = [
            [Shard(path, d, len(row), self.models[t][0]["param_shapes"]) for d, path in enumerate(row)]
            for t, row in enumerate(optimizer_files)
        ]
        """Optimizer files by [tensor-parallel rank][data-parallel rank]."""
        first = self.models[0][0]
        if first.get("ds_autoep_layers"):
            raise ValueError(
                f"{source}: holds expert-parallel layers, accepted: checkpoints without expert parallelism"
            )
        if (first.get("universal_checkpoint_info") or {}).get("pipeline"):
            raise ValueError(
                f"{source}: is of a pipeline-parallel model, accepted: checkpoints without pipeline parallelism"
            )
        wanted, given = (first["mp_world_size"], first["dp_world_size"]), (len(self.shards), len(self.shards[0]))
        if given != wanted:
            raise ValueError(
                f"{source}: got optimizer files of {given[0]} tensor- x {given[1]} data-parallel ranks, accepted: of "
                f"{wanted[0]} x {wanted[1]}, which wrote it"
            )
        rules = first.get("universal_checkpoint_info")
        if len(self.shards) > 1 and rules is None:
            raise ValueError(
                f"{model_files[0][0]}: of {len(self.shards)} tensor-parallel ranks and without "
                "universal_checkpoint_info, accepted: one rank, or a model whose attribute of that name was set before "
                "it was saved"
            )
        self.rules: Mapping[str, Any] = rules or {}
        self.shapes = [
            {name: s for group in row[0]["param_shapes"] for name, s in group.items()} for row in self.models
        ]
        """Shapes of the trained parameters of each tensor-parallel rank."""
        self._name_experts()
        for row, model in zip(self.shards, self.models, strict=True):
            if row[0].round_robin:
                _check_places(row, model[0])

    def _name_experts(self) -> None:
        """Call experts that ranks divide by their names in the whole model; a shard holds those of its rank."""
        size, names = divided_experts(self.rules)
        self.joined, self.expert_parallel = joined_experts(self.rules), size
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

    def whole(self, name: str, part: Callable[[Shard], torch.Tensor], key: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """One tensor of a trained parameter, of all ranks.

        Args:
            name: of the parameter.
            part: what one rank has of it, flat.
            key: what the tensor is called, for errors.

        Returns:
            The tensor, and how it is divided over tensor-parallel ranks, in DeepSpeed's keys.
        """
        pieces = []
        for row, shapes in zip(self.shards, self.shapes, strict=True):
            # Tensors in which experts are joined: one expert-parallel rank's after the other's.
            step = self.expert_parallel if name in self.joined else 1
            flat = torch.cat([part(shard) for first in range(step) for shard in row[first::step]])
            if flat.numel() != shapes[name].numel():
                raise ValueError(
                    f"{self.source}: {name} {key}: got {flat.numel()} elements over all ranks, accepted: "
                    f"{shapes[name].numel()}"
                )
            pieces.append(flat.view(shapes[name]))
        return self.join(name, pieces)

    def join(self, name: str, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tensor of all tensor-parallel ranks, and how to divide it again, in DeepSpeed's keys."""

        def listed(key: str) -> bool:
            return any(re.match(pattern, name) for pattern in self.rules.get(key, ()))

        if not self.rules or listed("tp_replicated_parameter_patterns"):
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
        first = self.models[0][0]
        aliases = set(first.get("shared_params") or {})
        per_rank = [_outside_optimizer(row) for row in self.models]
        for name in per_rank[0]:
            if name in self.shapes[0] or name in aliases:
                continue
            pieces = [one[name] for one in per_rank]
            if name not in first["buffer_names"] or not self.rules:  # frozen_param_shapes are not saved at stage 1
                whole, layout = self.join(name, pieces)
                whole = whole.clone() if whole is pieces[0] else whole  # of its own, for it may be a view
            elif all(torch.equal(piece, pieces[0]) for piece in pieces):
                whole, layout = pieces[0].clone(), {}
            else:
                raise ValueError(
                    f"{self.source}: buffer {name} differs between tensor-parallel ranks, accepted: equal buffers"
                )
            found[name] = {"param": whole, **layout}
        return found


def is_extra_state(name: str) -> bool:
    """Whether a state dict's entry is what a module's ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == "_extra_state"


def _refuse_other_kinds(source: Path) -> None:
    """Checkpoints of parallelisms that cannot be converted, known by their files' names."""
    if found := sorted(source.glob("layer_*-model_states.pt")):
        raise ValueError(
            f"{found[0]}: is of a pipeline-parallel model, accepted: checkpoints without pipeline parallelism"
        )
    if found := sorted(source.glob("*expert*_states.pt")):
        raise ValueError(
            f"{source}: holds expert-parallel files ({found[0].name}), accepted: checkpoints without expert parallelism"
        )
    if list(source.glob("mp_rank_*_model_states.pt")) and not list(source.glob("*zero_pp_rank_*optim_states.pt")):
        raise ValueError(
            f"{source}: has model files and no zero_pp_rank_*_optim_states.pt of ZeRO, accepted: checkpoints of "
            "zero_optimization.stage 1, 2 or 3, with the optimizer's files"
        )


def _check_places(row: list[Shard], model: Mapping[str, Any]) -> None:
    """DeepSpeed alone records wrong places with round-robin gradients (``deepspeed/round_robin.py``)."""
    for name in row[0].names:
        low = model["module"][name].reshape(-1)
        # A bfloat16 partition is what the model holds; what it makes with its remainder would round to another number
        # where it lies half-way between two (reference/master.py).
        held = torch.cat([shard.weights(name) for shard in row]).to(low.dtype)
        if held.shape != low.shape or not ((held == low) | (held.isnan() & low.isnan())).all():
            raise ValueError(
                f"{row[0].path}: zero_optimization.round_robin_gradients: got true, and places of parameters as "
                "DeepSpeed records them then, which are wrong; accepted: false, or a checkpoint of an engine of "
                "coat_dist.initialize"
            )


def _outside_optimizer(row: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Tensors of one tensor-parallel rank's model files that may lie outside the optimizer."""
    first = row[0]
    if len(row) == 1:
        module = first["module"]
    else:  # ZeRO-3: parameters in ``module`` are empty, frozen ones are divided like the others
        module = {name: first["module"][name] for name in first["buffer_names"] if name in first["module"]}
    if len(row) > 1 or any(v.numel() == 0 for v in module.values() if isinstance(v, torch.Tensor)):
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            flat = torch.cat([one["frozen_param_fragments"][name].reshape(-1) for one in row])
            module[name] = flat[: shape.numel()].view(shape)
    return {n: value for n, value in module.items() if isinstance(value, torch.Tensor) and not is_extra_state(n)}
