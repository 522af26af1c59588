"""Conversion of DeepSpeed checkpoints of ZeRO-1, 2 and 3 to its universal format, with FP8 moments
decoded to fp32.

A universal checkpoint has one folder a parameter, ``zero/<name>/``, with the whole tensor in
``fp32.pt``, its moments in ``exp_avg.pt`` and ``exp_avg_sq.pt`` and the count of steps in
``step.pt``; it holds nothing of the ranks that wrote it. Codes of FP8 moments lie beside them
(``codes.py``).

DeepSpeed's own converter (``deepspeed/checkpoint/ds_to_universal.py``) cannot read FP8 moments,
copies everything twice and keeps ZeRO stages apart. This one reads memory-mapped shards and writes
a parameter at a time: it needs memory for the largest parameter, and its output loads at any of the
three stages. It also converts checkpoints of torch's AdamW, so a run can move to FP8 moments and
back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...extras import need
from ..names import place_in_pipeline
from .codes import CODES_FILE, write_codes
from .zero_checkpoint import ZeroCheckpoint, is_extra_state
from .zero_files import EXTRA_STATE, KEYS, Shard

_SHARDED = (
    "base_optimizer_state",
    "param_slice_mappings",
    "single_partition_of_fp32_groups",
    "fp32_flat_groups",
)
_OF_MODEL = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "buffer_names",
)


def convert_to_universal(
    source: str | Path, target: str | Path, on_progress: Callable[[int, int], None] | None = None
) -> int:
    """Write the universal form of one checkpoint's folder into another, without processes or
    temporary files.

    Args:
        source: what ``engine.save_checkpoint`` wrote (a tag's folder), as :class:`ZeroCheckpoint`
            reads it. A tied embedding, of which two stages have copies, is written once.
        target: is created where absent; empty, and not in ``source``.
        on_progress: called after each parameter with its number of elements and that of all.

    Returns:
        The number of parameters written.

    Raises:
        ValueError: names the file, what is wrong with it and what is accepted.
    """
    # Its classes are in the files.
    need("deepspeed", "deepspeed", "coat_dist.convert_to_universal")
    source, target = Path(source), Path(target)
    used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if used or target.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"target: got {target}, accepted: an empty or a new folder outside of {source}"
        )
    checkpoint = ZeroCheckpoint(source)
    elements = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names}
    for name in elements:
        _write_parameter(target / "zero" / name, name, checkpoint)
        if on_progress is not None:
            on_progress(elements[name], sum(elements.values()))
    torch.save(checkpoint.untrained(), target / "zero" / "rest.pt")
    if extra := _extra_states(checkpoint):
        torch.save(extra, target / "zero" / EXTRA_STATE)
    _write_globals(target, checkpoint.shards[0][0], checkpoint.models[0][0])
    return len(elements)


def _write_parameter(folder: Path, name: str, checkpoint: ZeroCheckpoint) -> None:
    shards = checkpoint.shards
    steps = {step for row in shards for shard in row if (step := shard.step(name)) is not None}
    if len(steps) != 1:
        raise ValueError(
            f"{shards[0][0].path}: steps of {name}: got {sorted(steps)}, accepted: one, on all "
            "ranks"
        )
    for key in KEYS:
        whole, layout = checkpoint.whole(name, partial(Shard.part, name=name, key=key), key)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"param": whole, **layout}, folder / f"{key}.pt")
    if name not in checkpoint.joined:
        _write_codes(folder / CODES_FILE, name, shards[checkpoint.ranks(name)])
    # torch's optimizers want a tensor; ours takes either.
    torch.save(torch.tensor(float(steps.pop())), folder / "step.pt")


def _write_codes(path: Path, name: str, shards: list[list[Shard]]) -> None:
    """Write the codes of one parameter, where its moments are FP8."""
    layout, ranks = None, []
    for row in shards:
        pieces, first = [], 0
        for shard in row:
            if (group := shard.layout(name)) is not None:
                layout = group
                pieces.append(shard.codes(name, first))
                first += shard.places[name].numel
        ranks.append(pieces)
    if layout is not None:
        write_codes(path, layout, ranks)


def _extra_states(checkpoint: ZeroCheckpoint) -> dict[str, list[Any]]:
    """What modules' ``get_extra_state`` gave, tensors or not, by name; of each tensor-parallel
    rank.
    """
    found: dict[str, list[Any]] = {}
    for first, rename in checkpoint.stages():
        rows = [
            row[0]["module"]
            for row in checkpoint.models[first : first + checkpoint.tensor_parallel]
        ]
        for name in dict.fromkeys(
            n for row in rows for n, v in row.items() if is_extra_state(n) and v is not None
        ):
            found.setdefault(rename(name), [row.get(name) for row in rows])
    return found


def _write_globals(target: Path, shard: Shard, model: Mapping[str, Any]) -> None:
    """What is not a tensor of a parameter: loss scale, parameter groups, counters of the engine."""
    kept = {k: v for k, v in shard.saved.items() if k not in (*_SHARDED, "optimizer_state_dict")}
    step = next(s for flat in shard.state if (s := shard.steps(flat)) is not None)
    kept |= {"ds_version": shard.version, "param_groups": shard.groups}
    # Where DeepSpeed's ZeRO-3 looks for them.
    state = {0: {"step": torch.tensor(float(step))}}
    kept["optimizer_state_dict"] = {"state": state, "param_groups": shard.groups}
    torch.save(kept, target / "zero" / "optimizer_state.pt")
    counters = {k: v for k, v in model.items() if k not in _OF_MODEL} | {
        "module": {},
        "mp_world_size": 1,
    }
    if place_in_pipeline(counters.get("universal_checkpoint_info"))[1] > 1:
        del counters["universal_checkpoint_info"]  # what it says is of one stage
    # ZeRO-1, 2 and ZeRO-3.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(counters, target / name)
