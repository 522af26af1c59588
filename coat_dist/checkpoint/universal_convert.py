"""DeepSpeed checkpoints of ZeRO-1, 2 and 3 to DeepSpeed's universal format, with FP8 moments decoded to fp32.

A universal checkpoint has one folder a parameter, ``zero/<name>/``, with the whole tensor in ``fp32.pt``, its moments
in ``exp_avg.pt`` and ``exp_avg_sq.pt`` and the count of steps in ``step.pt``; it knows nothing of the ranks that wrote
it. Of groups that lie within one parameter it also has the codes (``checkpoint/universal_codes.py``).

DeepSpeed's own converter (``deepspeed/checkpoint/ds_to_universal.py``) cannot read FP8 moments, copies everything twice
and keeps ZeRO stages apart. This one reads memory-mapped shards and writes a parameter at a time: it needs memory for
the largest parameter, and its output loads at any of the three stages.

Checkpoints of fp32 optimizers with ``exp_avg``, ``exp_avg_sq`` and ``step`` (torch's AdamW) are converted by the same
code, so a run can move to FP8 moments and back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .universal_codes import CODES_FILE, write_codes
from .zero_files import EXTRA_STATE, KEYS, MODEL, MODEL3, OPTIMIZER, Shard, files_by_rank, read

__all__ = ["convert_to_universal"]

_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
_OF_MODEL = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names")


def convert_to_universal(
    source: str | Path, target: str | Path, on_progress: Callable[[int, int], None] | None = None
) -> int:
    """Write the universal form of one checkpoint's folder into another, without processes or temporary files.

    Args:
        source: what ``engine.save_checkpoint`` wrote (a tag's folder): ZeRO stage 1, 2 or 3 or BF16_Optimizer, any
            data- and tensor-parallel size. With more than one tensor-parallel rank its model files hold
            ``universal_checkpoint_info`` (``megatron_patches.universal_checkpoint_info`` makes it), which says how each
            parameter is divided.
        target: is created where absent; empty, and not in ``source``.
        on_progress: called after each parameter with its number of elements and that of all (of the first
            tensor-parallel rank).

    Returns:
        The number of parameters written.

    Raises:
        ValueError: names the file, what is wrong with it and what is accepted.
    """
    source, target = Path(source), Path(target)
    used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if used or target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"target: got {target}, accepted: an empty or a new folder outside of {source}")
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
    models = [[read(path) for path in row] for row in model_files]
    shards = [
        [Shard(path, d, len(row), models[t][0]["param_shapes"]) for d, path in enumerate(row)]
        for t, row in enumerate(optimizer_files)
    ]
    first = models[0][0]
    if first.get("ds_autoep_layers"):
        raise ValueError(f"{source}: holds expert-parallel layers, accepted: checkpoints without expert parallelism")
    wanted, given = (first["mp_world_size"], first["dp_world_size"]), (len(shards), len(shards[0]))
    if given != wanted:
        raise ValueError(
            f"{source}: got optimizer files of {given[0]} tensor- x {given[1]} data-parallel ranks, accepted: of "
            f"{wanted[0]} x {wanted[1]}, which wrote it"
        )
    rules = first.get("universal_checkpoint_info")
    if len(shards) > 1 and rules is None:
        raise ValueError(
            f"{model_files[0][0]}: of {len(shards)} tensor-parallel ranks and without universal_checkpoint_info, "
            "accepted: one rank, or a model whose attribute of that name was set before it was saved"
        )
    shapes = [{name: s for group in row[0]["param_shapes"] for name, s in group.items()} for row in models]
    for row, model in zip(shards, models, strict=True):
        if row[0].round_robin:
            _check_places(row, model[0])
    elements = {name: math.prod(shape) for name, shape in shapes[0].items()}
    for name in shapes[0]:
        _write_parameter(target / "zero" / name, name, shards, [s[name] for s in shapes], rules or {})
        if on_progress is not None:
            on_progress(elements[name], sum(elements.values()))
    torch.save(_untrained_tensors(models, shapes[0], rules or {}, source), _in_new_folder(target / "zero" / "rest.pt"))
    if extra := _extra_states(models):
        torch.save(extra, target / "zero" / EXTRA_STATE)
    _write_globals(target, shards[0][0], first)
    return len(shapes[0])


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


def _write_parameter(
    folder: Path, name: str, shards: list[list[Shard]], shapes: list[torch.Size], rules: Mapping[str, Any]
) -> None:
    steps = {step for row in shards for shard in row if (step := shard.step(name)) is not None}
    if len(steps) != 1:
        raise ValueError(f"{shards[0][0].path}: steps of {name}: got {sorted(steps)}, accepted: one, on all ranks")
    for key in KEYS:
        pieces = []
        for row, shape in zip(shards, shapes, strict=True):
            flat = torch.cat([shard.part(name, key) for shard in row])
            if flat.numel() != shape.numel():
                raise ValueError(
                    f"{row[0].path.parent}: {name} {key}: got {flat.numel()} elements over all ranks, accepted: "
                    f"{shape.numel()}"
                )
            pieces.append(flat.view(shape))
        whole, layout = _join_ranks(name, pieces, rules)
        torch.save({"param": whole, **layout}, _in_new_folder(folder / f"{key}.pt"))
    _write_codes(folder / CODES_FILE, name, shards)
    # torch's optimizers want a tensor; ours takes either.
    torch.save(torch.tensor(float(steps.pop())), _in_new_folder(folder / "step.pt"))


def _write_codes(path: Path, name: str, shards: list[list[Shard]]) -> None:
    layout = next((found for row in shards for shard in row if (found := shard.layout(name)) is not None), None)
    if layout is None:  # fp32 moments
        return
    ranks = []
    for row in shards:
        pieces, first = [], 0
        for shard in row:
            if shard.layout(name) is not None:
                pieces.append(shard.codes(name, first))
                first += shard.places[name].numel
        ranks.append(pieces)
    write_codes(path, layout, ranks)


def _join_ranks(name: str, pieces: list[torch.Tensor], rules: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tensor of all tensor-parallel ranks, and how to divide it again, in DeepSpeed's keys."""

    def listed(key: str) -> bool:
        return any(re.match(pattern, name) for pattern in rules.get(key, ()))

    if not rules or listed("tp_replicated_parameter_patterns"):
        return pieces[0].contiguous().clone(), {}
    if listed("parameter_with_2_sub_params_cat_dim_0"):
        halves = [piece.chunk(2, 0) for piece in pieces]
        whole = torch.cat([half[i] for i in range(2) for half in halves])
        return whole, {"cat_dim": 0, "param_n_sub_params": 2}
    dim = 1 if listed("parameter_with_row_parallelism_patterns") else 0
    return torch.cat(pieces, dim), {"cat_dim": dim}


def _untrained_tensors(
    models: list[list[dict[str, Any]]], trained: Mapping[str, Any], rules: Mapping[str, Any], source: Path
) -> dict[str, dict[str, Any]]:
    """Frozen parameters and buffers, in their own dtype: ``{name: {"param": tensor, ...}}``."""
    found: dict[str, dict[str, Any]] = {}
    aliases = set(models[0][0].get("shared_params") or {})
    per_rank = [_outside_optimizer(row) for row in models]
    for name in per_rank[0]:
        if name in trained or name in aliases:
            continue
        pieces = [one[name] for one in per_rank]
        if name not in models[0][0]["buffer_names"] or not rules:  # frozen_param_shapes are not saved at stage 1
            whole, layout = _join_ranks(name, pieces, rules)
        elif all(torch.equal(piece, pieces[0]) for piece in pieces):
            whole, layout = pieces[0].clone(), {}
        else:
            raise ValueError(f"{source}: buffer {name} differs between tensor-parallel ranks, accepted: equal buffers")
        found[name] = {"param": whole, **layout}
    return found


def _extra_states(models: list[list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """What modules' ``get_extra_state`` gave, tensors or not, by name; of each tensor-parallel rank."""
    rows = [
        {n: v for n, v in row[0]["module"].items() if _is_extra_state(n) and v is not None}  # None: there is none
        for row in models
    ]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


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
    return {n: value for n, value in module.items() if isinstance(value, torch.Tensor) and not _is_extra_state(n)}


def _write_globals(target: Path, shard: Shard, model: Mapping[str, Any]) -> None:
    """What is not a tensor of a parameter: loss scale, parameter groups, counters of the engine."""
    kept = {k: v for k, v in shard.saved.items() if k not in (*_SHARDED, "optimizer_state_dict")}
    step = next(s for flat in shard.state if (s := shard.steps(flat)) is not None)
    kept |= {
        "ds_version": shard.version,
        "param_groups": shard.groups,
        # Where DeepSpeed's ZeRO-3 looks for them.
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(float(step))}},
            "param_groups": shard.groups,
        },
    }
    torch.save(kept, _in_new_folder(target / "zero" / "optimizer_state.pt"))
    counters = {k: v for k, v in model.items() if k not in _OF_MODEL} | {"module": {}, "mp_world_size": 1}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO-1, 2 and ZeRO-3
        torch.save(counters, target / name)


def _in_new_folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
