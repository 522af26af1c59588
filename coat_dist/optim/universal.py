"""DeepSpeed checkpoints of ZeRO-1, 2 and 3 to DeepSpeed's universal format, with FP8 moments decoded to fp32.

A universal checkpoint has one folder a parameter, ``zero/<name>/``, with the whole tensor in ``fp32.pt``, its moments
in ``exp_avg.pt`` and ``exp_avg_sq.pt`` and the count of steps in ``step.pt``; it knows nothing of the ranks that wrote
it.
DeepSpeed's own converter (``deepspeed/checkpoint/ds_to_universal.py``) cannot read FP8 moments, copies everything twice
and keeps ZeRO stages apart. This one reads memory-mapped shards and writes a parameter at a time: it needs memory for
the largest parameter, and its output loads at any of the three stages.

Checkpoints of fp32 optimizers with ``exp_avg``, ``exp_avg_sq`` and ``step`` (torch's AdamW) are converted by the same
code, so a run can move to FP8 moments and back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .checkpoint import read_moment
from .master import read_master

__all__ = ["KEYS", "convert_to_universal"]

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
"""Tensors a parameter has in a universal checkpoint."""
_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
_OF_MODEL = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names")


class _Place(NamedTuple):
    """Where one rank keeps its part of a parameter: in flat tensor ``flat``, from ``start``."""

    flat: int
    start: int
    numel: int


class _Shard:
    """The optimizer file of one rank."""

    def __init__(self, path: Path, dp_rank: int, dp: int, param_shapes: list[Mapping[str, torch.Size]]) -> None:
        self.path = path
        file = _read(path)
        saved = self.saved = file["optimizer_state_dict"]
        self.version = saved.get("ds_version") or file.get("ds_version")
        self.stage3 = "fp32_flat_groups" in saved
        base = saved["optimizer_state_dict"] if self.stage3 else saved["base_optimizer_state"]
        if not isinstance(base, Mapping):
            raise ValueError(f"{path}: written with elastic_checkpoint, accepted: the default, false")
        self.state, self.groups = base["state"], base["param_groups"]
        self.fp32 = saved["fp32_flat_groups" if self.stage3 else "single_partition_of_fp32_groups"]
        self.group_of = {i: group for group in self.groups for i in group["params"]}
        self.places: dict[str, _Place] = {}
        if not self.stage3:
            for i, mapping in enumerate(saved["param_slice_mappings"]):
                self.places.update({name: _Place(i, at.start, at.numel) for name, at in mapping.items()})
            return
        for i, shapes in enumerate(param_shapes):  # every parameter is divided by itself and padded at its end
            start = 0
            for name, shape in shapes.items():
                part = -(-shape.numel() // dp)
                self.places[name] = _Place(i, start, max(0, min(part, shape.numel() - dp_rank * part)))
                start += part

    def part(self, name: str, key: str) -> torch.Tensor:
        """This rank's part of a parameter or moment, flat, fp32."""
        i, start, numel = self.places.get(name, _Place(0, 0, 0))
        if not numel:
            return torch.empty(0)
        if key == "fp32":
            return read_master(self.fp32[i].reshape(-1), self.state.get(i) or {}, start, numel)
        state, which = self._state(name), KEYS.index(key) - 1
        if key in state:
            return state[key].reshape(-1).narrow(0, start, numel).float()
        return read_moment(state, self.group_of[i], which, start, numel)

    def step(self, name: str) -> int | None:
        """Steps taken; None where this rank has nothing of the parameter."""
        place = self.places.get(name)
        return int(self._state(name)["step"]) if place is not None and place.numel else None

    def _state(self, name: str) -> Mapping[str, Any]:
        state = self.state.get(self.places[name].flat) or {}
        if "step" not in state or not ("coat_m_q" in state or "exp_avg" in state):
            found = ", ".join(sorted(state)) or "nothing (saved before the first step)"
            raise ValueError(
                f"{self.path}: state of {name}: got {found}, accepted: that of CoatAdamW, or step, exp_avg and "
                "exp_avg_sq"
            )
        return state


def convert_to_universal(source: str | Path, target: str | Path) -> int:
    """Write the universal form of one checkpoint's folder into another, without processes or temporary files.

    Args:
        source: what ``engine.save_checkpoint`` wrote (a tag's folder): ZeRO stage 1, 2 or 3 or BF16_Optimizer, any
            data- and tensor-parallel size. With more than one tensor-parallel rank its model files hold
            ``universal_checkpoint_info`` (``megatron_patches.universal_checkpoint_info`` makes it), which says how each
            parameter is divided.
        target: is created where absent; should be empty.

    Returns:
        The number of parameters written.

    Raises:
        ValueError: names the file, what is wrong with it and what is accepted.
    """
    source, target = Path(source), Path(target)
    optimizer_files = _grid(source, r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
    model_files = _grid(source, r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt", required=False)
    if not model_files:  # ZeRO-1 and 2: one file a tensor-parallel rank
        model_files = [[path] for row in _grid(source, r"(mp)_rank_(\d+)_model_states\.pt") for path in row]
    if len(model_files) != len(optimizer_files):
        raise ValueError(
            f"{source}: got model files of {len(model_files)} tensor-parallel ranks and optimizer files of "
            f"{len(optimizer_files)}, accepted: equally many"
        )
    models = [[_read(path) for path in row] for row in model_files]
    shards = [
        [_Shard(path, d, len(row), models[t][0]["param_shapes"]) for d, path in enumerate(row)]
        for t, row in enumerate(optimizer_files)
    ]
    first = models[0][0]
    if first.get("ds_autoep_layers") or list(source.glob("*expert*_states.pt")):
        raise ValueError(f"{source}: holds expert-parallel files, accepted: checkpoints without expert parallelism")
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
    for name in shapes[0]:
        _write_parameter(target / "zero" / name, name, shards, [s[name] for s in shapes], rules or {})
    torch.save(_rest(models, shapes[0], rules or {}, source), _file(target / "zero" / "rest.pt"))
    _write_globals(target, shards[0][0], first)
    return len(shapes[0])


def _write_parameter(
    folder: Path, name: str, shards: list[list[_Shard]], shapes: list[torch.Size], rules: Mapping[str, Any]
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
        whole, layout = _merge(name, pieces, rules)
        torch.save({"param": whole, **layout}, _file(folder / f"{key}.pt"))
    # torch's optimizers want a tensor; ours takes either.
    torch.save(torch.tensor(float(steps.pop())), _file(folder / "step.pt"))


def _merge(name: str, pieces: list[torch.Tensor], rules: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
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


def _rest(
    models: list[list[dict[str, Any]]], trained: Mapping[str, Any], rules: Mapping[str, Any], source: Path
) -> dict[str, dict[str, Any]]:
    """Frozen parameters and buffers, in their own dtype: ``{name: {"param": tensor, ...}}``."""
    found: dict[str, dict[str, Any]] = {}
    aliases = set(models[0][0].get("shared_params") or {})
    per_rank = [_untrained(row) for row in models]
    for name in per_rank[0]:
        if name in trained or name in aliases:
            continue
        pieces = [one[name] for one in per_rank]
        if name in (models[0][0].get("frozen_param_shapes") or {}) or not rules:
            whole, layout = _merge(name, pieces, rules)
        elif all(torch.equal(piece, pieces[0]) for piece in pieces):
            whole, layout = pieces[0].clone(), {}
        else:
            raise ValueError(f"{source}: buffer {name} differs between tensor-parallel ranks, accepted: equal buffers")
        found[name] = {"param": whole, **layout}
    return found


def _untrained(row: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
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
    return {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}


def _write_globals(target: Path, shard: _Shard, model: Mapping[str, Any]) -> None:
    """What is not a tensor of a parameter: loss scale, parameter groups, counters of the engine."""
    kept = {k: v for k, v in shard.saved.items() if k not in (*_SHARDED, "optimizer_state_dict")}
    step = next(s["step"] for s in shard.state.values() if "step" in s)
    kept |= {
        "ds_version": shard.version,
        "param_groups": shard.groups,
        # Where DeepSpeed's ZeRO-3 looks for them.
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(float(step))}},
            "param_groups": shard.groups,
        },
    }
    torch.save(kept, _file(target / "zero" / "optimizer_state.pt"))
    counters = {k: v for k, v in model.items() if k not in _OF_MODEL} | {"module": {}, "mp_world_size": 1}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO-1, 2 and ZeRO-3
        torch.save(counters, target / name)


def _grid(folder: Path, pattern: str, required: bool = True) -> list[list[Path]]:
    """Files by [tensor-parallel rank][data-parallel rank]."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := re.fullmatch(pattern, path.name):
            dp_rank, tp_rank = match.groups()
            found[int(tp_rank), 0 if dp_rank == "mp" else int(dp_rank)] = path
    if not found:
        if required:
            raise ValueError(f"{folder}: no file matches {pattern}, accepted: a folder that DeepSpeed's ZeRO saved")
        return []
    tp, dp = (max(key[i] for key in found) + 1 for i in range(2))
    missing = [(t, d) for t in range(tp) for d in range(dp) if (t, d) not in found]
    if missing:
        t, d = missing[0]
        raise ValueError(f"{folder}: no file for data-parallel rank {d} of tensor-parallel rank {t} ({pattern})")
    return [[found[t, d] for d in range(dp)] for t in range(tp)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except (OSError, RuntimeError, EOFError) as problem:
        raise ValueError(f"{path}: cannot be read ({problem})") from problem


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
